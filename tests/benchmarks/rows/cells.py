"""A cell of a real kernel there and back, in wall time: from the front end's request to the reply.

The cell leaves a mark, by which the guard knows that every rank ran it, and does nothing else. Raw is the same line in
the kernel itself. Ours also make the process group and `accelerator`, which the peers' cells would still have to do;
"ranks that stay" are there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.harness import Row, installed
from benchmarks.kernels import LAUNCHERS, NEEDS, Launcher, new_kernel
from benchmarks.party import Bout, Sample

__all__ = ["bout", "rows"]

_MARK = "import os; open(f'marks/{os.getpid()}', 'x').close()"


def bout(launcher: Launcher) -> Bout:
    """Cells in a kernel of its own; refused when a rank has not run the cell."""
    until_closed = ExitStack()
    kernel = until_closed.enter_context(new_kernel())
    marks = kernel.folder / "marks"
    kernel.do(launcher.setup)
    cell = launcher.filled(_MARK)

    def turn() -> Sample:
        for mark in marks.glob("*"):
            mark.unlink()
        marks.mkdir(exist_ok=True)
        seconds = kernel.do(cell).seconds
        ran = len(list(marks.iterdir()))
        if ran != launcher.ranks:
            raise RuntimeError(f"{ran} of {launcher.ranks} ranks have run the cell")
        return Sample(seconds, 0.0)  # the kernel's processor time is not ours to read

    return Bout(turn, lambda: torch.zeros(1), until_closed.close)


def rows() -> Sequence[Row]:
    makes = {name: partial(bout, launcher) for name, launcher in LAUNCHERS.items()}
    return [Row("cell there and back, 2 ranks", installed(makes, NEEDS), unit="ms", turns=10, judged="wall")]
