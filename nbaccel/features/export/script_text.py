"""Write the text of a script from the cells that it consists of. Runs in the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.features.export.needed import Needed

__all__ = ["MARK", "ExportedScript"]

MARK = "Written by %accelerate export"
"""What a script says by which it is known as one; such a file may be written anew."""

_FUTURE = "from __future__ import "


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """A script.

    Args:
        needed: The cells.
        name: Its file name.
        num_processes: Number of ranks of the notebook's run.
        settings: The settings of each rank, as keywords of `RunSettings`.
        without: Flags of the cell that a script has not, as they were written.
    """

    needed: Needed
    name: str
    num_processes: int
    settings: Mapping[str, Any]
    without: Sequence[str] = ()

    def __str__(self) -> str:
        trained = self.needed.trained
        futures, above = self._bodies()
        forms_group = "init_process_group" in trained.code and "accelerator" not in trained.facts.reads
        binds = ", binds_accelerator=False" if forms_group or "accelerator" in trained.facts.binds else ""
        parts = [
            f'"""{self._heading()}"""',
            *futures,
            *(["from IPython.display import display"] if self._displays else []),
            "from nbaccel.features.export.exported_cell import ExportedCell",
            f"nbaccel_cell = ExportedCell({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})",
            *above,
            f"# --- {trained}: %%accelerate {trained.flags}".rstrip(),
            f"nbaccel_cell.begin(globals(){binds})",
            _without_futures(trained.code)[1],
            "nbaccel_cell.end()",
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def _displays(self) -> bool:
        """Return whether a cell reads the `display` that IPython gives each notebook."""
        bound = {name for cell in self.needed.all for name in cell.facts.binds}
        return "display" not in bound and any("display" in cell.facts.reads for cell in self.needed.all)

    def _bodies(self) -> tuple[list[str], list[str]]:
        """Return the imports from `__future__`, which stand at the top, and the cells above the training."""
        futures: list[str] = []
        bodies: list[str] = []
        for cell in self.needed.all:
            found, rest = _without_futures(cell.code)
            futures += found
            if cell is not self.needed.trained:
                bodies.append(f"# --- {cell}\n\n{rest}")
        return ["\n".join(dict.fromkeys(futures))] if futures else [], bodies

    def _heading(self) -> str:
        above = [str(cell.number) for cell in self.needed.above]
        ranks = f"{self.num_processes} rank{'s' * (self.num_processes > 1)}"
        cells = f" and what it needs of the cells above it, {', '.join(above)}" if above else ""
        n = self.num_processes
        lines = [
            f"Cell [{self.needed.trained.number}] of a notebook{cells}, as they ran there: {ranks} trained it.",
            "",
            f"    nbaccel launch -n {n} {self.name}",
            f"    nbaccel launch --nnodes 2 --node-rank R --master-addr IP -n {max(1, n // 2)} {self.name}",
            f"    srun --ntasks-per-node=1 nbaccel launch -n {max(1, n // 2)} {self.name}",
            "",
            "What stands above the cell runs in each rank as if it were alone, the cell in all ranks together. Flags",
            "of the command beat those of the cell, which are in the first statement.",
        ]
        if self.without:
            lines.append(f"Without effect in a script: {', '.join(self.without)}.")
        if installs := self.needed.installs:
            lines += ["Needs:", *(f"    {command}" for command in installs)]
        if shell := self.needed.shell_lines:
            lines += ["Not in here, run it before where it is needed:", *(f"    {line}" for line in shell)]
        text = "\n".join(lines)
        return f"{text}\n\n{MARK}.\n".replace("\\", "\\\\").replace('"""', r"\"\"\"")


def _without_futures(code: str) -> tuple[list[str], str]:
    """Return the lines that import from `__future__`, and the code without them."""
    lines = code.split("\n")
    found = [line.strip() for line in lines if line.startswith(_FUTURE)]
    return found, "\n".join(line for line in lines if not line.startswith(_FUTURE)).strip("\n")
