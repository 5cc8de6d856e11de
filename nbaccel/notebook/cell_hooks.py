"""Hooks before and after every cell of the notebook. Run in the kernel; never touch CUDA.

Before IPython reads a cell, comments above `%%accelerate` are moved below it. `CudaWatch` finds the cell after which
forks fail.
"""

from __future__ import annotations

from typing import Any

from nbaccel.forkable import CUDA_IS_INITIALISED, why_forks_fail

__all__ = [
    "MAGIC",
    "CudaWatch",
    "comments_below_magic",
    "is_code",
]

MAGIC = "%%accelerate"


def comments_below_magic(lines: list[str]) -> list[str]:
    """Move comments such as `#@title` from above `%%accelerate` to below it; an input transformer.

    IPython recognises a cell magic only in the first line. No line is lost.

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
