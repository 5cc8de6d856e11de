"""The kernel of one public notebook: its cells run one after the other, each for a limited time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import nbaccel.errors as errors
from environments import NEWEST, REPOSITORY
from kernel.harness import Cell, RealKernel
from public_notebooks.catalogue import STAND_INS, Catalogue, Notebook
from public_notebooks.cells import copy_files

__all__ = ["Ended", "KernelGone", "NotebookKernel"]

_GRACE_S = 40.0
"""For a cell that was interrupted to end."""

_TEXT, _ERROR = 1500, 300
"""Characters that are kept of what a cell prints, from its end, and of an error."""

_OF_RANKS = {"PeerFailed", "RankDied", "RanksFailed"}
"""Errors of ours that report a defect, and refuse nothing."""


class KernelGone(RuntimeError):
    """The kernel died, or a cell did not end after an interrupt."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a cell.

    how: "well", "error", "cut" (interrupted after its time), "hangs" or "died".  error: "NameError: ...", or "".
    printed: the end of what the cell has printed.  shown: the plain text of its displays.  number: its execution count.
    """

    how: str
    error: str = ""
    seconds: float = 0.0
    printed: str = ""
    shown: list[str] = field(default_factory=list)
    number: int = 0

    @property
    def fails(self) -> bool:
        return self.how in ("error", "hangs", "died")

    @property
    def is_refused(self) -> bool:
        """Whether it ended with a sentence of ours, which is no failure of ranks."""
        name = self.error.partition(":")[0]
        return self.how == "error" and name in errors.__all__ and name not in _OF_RANKS

    def facts(self) -> dict[str, Any]:
        return asdict(self)


class NotebookKernel:
    """A kernel in a temporary folder with the files of a notebook. Leaving the block ends it."""

    def __init__(self, catalogue: Catalogue, notebook: Notebook, *, one_thread: bool = True) -> None:
        self._notebook = notebook
        self._folder = tempfile.TemporaryDirectory(prefix="notebook-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        paths = [REPOSITORY, catalogue.package_folder, STAND_INS]
        environ = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "CUDA_VISIBLE_DEVICES": "",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "HF_HUB_OFFLINE": "1",
            **({"OMP_NUM_THREADS": "1"} if one_thread else {}),
        }
        try:
            copy_files(catalogue.repository(notebook), notebook, folder)
            (folder / notebook.folder).mkdir(parents=True, exist_ok=True)
            self._kernel = RealKernel(NEWEST, folder / notebook.folder, **environ)
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> NotebookKernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._kernel.close()
        self._folder.cleanup()

    def begin(self) -> None:
        """Run what comes before the first cell.

        Raises:
            RuntimeError: it failed, so nothing can be said about the notebook.
        """
        ended = self.run(self._notebook.first_cell, 90.0)
        if ended.how != "well":
            raise RuntimeError(f"{self._notebook.name}: the cell before the first one failed: {ended.error}")

    def run(self, text: str, limit_s: float) -> Ended:
        """Run a cell, interrupted after `limit_s`.

        Its lines are sent as they are: a first empty line would count. An interrupt that the cell catches is its end.
        """
        execution = self._kernel.begin(text or "pass")
        how = "well"
        try:
            execution.until(lambda cell: execution.is_idle, limit_s)  # the output is read meanwhile, however much it is
        except AssertionError:
            if not self._kernel.is_alive:
                return Ended("died", "the kernel died", limit_s)
            how = "cut"
            self._kernel.interrupt()
            try:
                execution.until(lambda cell: execution.is_idle, _GRACE_S)
            except AssertionError:
                return Ended("hangs", f"no end {_GRACE_S:.0f} s after an interrupt", limit_s + _GRACE_S)
        cell = execution.end(10.0)
        if cell.error is not None and not (how == "cut" and "nterrupt" in cell.error.ename + cell.error.evalue):
            how = "error"
        return _ended(how, cell)

    def run_before(self, cells: Sequence[str], limit_s: float = 90.0) -> list[Ended]:
        """Run the cells that prepare a training.

        Raises:
            KernelGone: a cell did not end.
        """
        ends = []
        for text in cells:
            ends.append(self.run(text, limit_s))
            if ends[-1].how in ("hangs", "died"):
                raise KernelGone(f"{self._notebook.name}: {ends[-1].error}")
        return ends


def _ended(how: str, cell: Cell) -> Ended:
    error = "" if cell.error is None or how == "cut" else f"{cell.error.ename}: {cell.error.evalue}"[:_ERROR]
    shown = [str(data.get("text/plain", "")) for data in cell.displays]
    return Ended(how, error, round(cell.seconds, 1), cell.printed[-_TEXT:], shown, cell.number)
