"""What IPython calls besides the magics: hooks around every cell, and help for `accelerator`. Run in the kernel.

They never touch CUDA. Before IPython reads a cell, comments above `%%accelerate` are moved below it; `CudaWatch` finds
the cell after which forks fail. Ranks have a name `accelerator` and the kernel has not, so `AcceleratorHelp` answers
for it; it imports the class, and torch with it, only when help is asked for.
"""

from __future__ import annotations

from typing import Any

from nbaccel.base.forkable import CUDA_IS_INITIALISED, why_forks_fail

__all__ = [
    "ACCELERATOR",
    "MAGIC",
    "AcceleratorHelp",
    "CudaWatch",
    "FailedCells",
    "comments_below_magic",
    "is_code",
]

MAGIC = "%%accelerate"
ACCELERATOR = "accelerator"


def comments_below_magic(lines: list[str]) -> list[str]:
    """Move comments such as `#@title` from above `%%accelerate` to below it; an input transformer.

    IPython recognises a cell magic only in the first line. No line is lost.

    Example:
        >>> comments_below_magic(["#@title Training\\n", "%%accelerate -n 2\\n", "x = 1\\n"])
        ['%%accelerate -n 2\\n', '#@title Training\\n', 'x = 1\\n']
    """
    first = next((number for number, line in enumerate(lines) if is_code(line)), 0)
    if first == 0 or lines[first].split()[0] != MAGIC:
        return lines
    return [lines[first], *lines[:first], *lines[first + 1 :]]


def is_code(line: str) -> bool:
    """Return whether a line is more than blanks and a comment."""
    text = line.strip()
    return bool(text) and not text.startswith("#")


class CudaWatch:
    """Records after which cell each reason why forks fail was present for the first time."""

    def __init__(self) -> None:
        self._cells: dict[str, str | None] = {}
        self._look(None)
        self._last_cell: str | None = None

    def cell_of(self, why: str | None) -> str | None:
        """Return "cell [7]"; None if `why` is None, or older than the watch."""
        if why is None:
            return None
        return self._cells.setdefault(why, self._last_cell)  # a change by the last cell may appear a moment later

    def after_cell(self, result: Any) -> None:
        """Check after a cell; handler of IPython's `post_run_cell`."""
        if CUDA_IS_INITIALISED in self._cells:  # it is named before all others
            return
        self._last_cell = None if result.execution_count is None else f"cell [{result.execution_count}]"
        self._look(self._last_cell)

    def _look(self, cell: str | None) -> None:
        if (why := why_forks_fail()) is not None:
            self._cells.setdefault(why, cell)


class FailedCells:
    """Records which cells ended with an error; IPython keeps that since version 9 only.

    Attributes:
        numbers: Their execution numbers.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def after_cell(self, result: Any) -> None:
        """Note a cell that failed; handler of IPython's `post_run_cell`."""
        if result.execution_count is not None and not result.success:
            self.numbers.add(result.execution_count)


class AcceleratorHelp:
    """Answers requests about `accelerator` in one shell, between `install` and `remove`, unless the name is used."""

    _FINDER = "_object_find"

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def install(self) -> None:
        """Replace the shell's method that finds names: IPython has no hook for names that it does not find."""
        find = getattr(self._shell, self._FINDER, None)
        if find is None:
            return

        def found(name: str, namespaces: Any = None) -> Any:
            info = find(name, namespaces)
            if namespaces is None and not info.found and name.strip().partition(".")[0] == ACCELERATOR:
                return find(name, [("of the ranks", {ACCELERATOR: _stand_in()})])
            return info

        setattr(self._shell, self._FINDER, found)

    def remove(self) -> None:
        vars(self._shell).pop(self._FINDER, None)


def _stand_in() -> Any:
    """Return an empty Accelerator to read the help from."""
    from nbaccel.train.accelerator import Accelerator

    return object.__new__(Accelerator)
