"""Runs a cell in real kernels that are killed at random moments, each followed by one that goes on; for tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.cell_checkpoints.killed_shapes import KilledShape
from features.cell_checkpoints.marked_programs import ABOVE
from kernel.harness import Cell, Execution, RealKernel, accelerate

__all__ = ["KilledRuns", "Left"]

TESTS = Path(__file__).resolve().parents[2]

_FIRST = """
import json as _json, os as _os, sys as _sys, time as _time
%load_ext nbaccel
BEST = "best.pt"
def _pace(*_):
    with open("steps", "a") as _file: _file.write(".")
    _time.sleep({pause})
"""
"""Above all: each step of each rank is counted in a file, and takes some time, in which a kill can come."""

_PACED = """
from torch.optim.optimizer import register_optimizer_step_pre_hook as _before_steps
_paced = _before_steps(_pace)
{cell}
_paced.remove()
"""

_LAST = """
_sys.path.insert(0, {tests!r})
from features.cell_checkpoints.left_values import left as _left
with open("left.json", "w") as _file: _json.dump(_left(globals(), without=_at_first), _file)
"""

_SAID_BY_US = re.compile(
    r"^(nbaccel: |continuing from|nothing to resume in|the run was over|--checkpoint-every |-[ap] ).*\n", re.M
)
_BATCH = re.compile(r"(x2?|y2?|out|idx|batch|loss)\b")
_OF_OTHERS = re.compile(r"^\[rank [1-9]\] .*\n", re.M)  # lines that one rank printed much later than another
_OF_RANKS = re.compile(r"^\[(all|rank 0)\] ", re.M)
_BARS = re.compile(r"^.*\d\d:\d\d<.*\n", re.M)
"""Bars: of an epoch that was over at the save, one says less of its last batch, and each has other times."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a run has left.

    values: By their places.  printed: Lines of the cell, without ours and bars.  steps: How many the
    last run has taken, in as many `ranks`.
    """

    values: dict[str, Any]
    printed: str
    steps: int
    ranks: int

    def different(self, other: Left, is_same: Callable[[Any, Any], bool] = lambda a, b: a == b) -> list[str]:
        """Return the places whose values are others in `other`."""
        names = self.values.keys() | other.values.keys()
        if not self.steps or self.ranks != other.ranks:  # the last batch may be whole, or the part of a rank
            names = {name for name in names if not _BATCH.match(name)}
        return sorted(
            f"{name}: {str(self.values.get(name))[:60]}, not {str(other.values.get(name))[:60]}"
            for name in names
            if name not in self.values or name not in other.values or not is_same(self.values[name], other.values[name])
        )


class KilledRuns:
    """Runs of one shape in one folder.

    Args:
        new_kernel: Starts a kernel in `folder`.
        seed: Of the moments at which kernels are killed.

    Attributes:
        kills: How many kernels have been killed.
        told: What has happened, for a test that fails.
    """

    def __init__(
        self, new_kernel: Callable[[], RealKernel], folder: Path, shape: KilledShape, seed: int, pause: float = 0.02
    ) -> None:
        self._new_kernel, self._folder, self._shape = new_kernel, folder, shape
        self._random = random.Random(seed)
        self._above = _FIRST.format(pause=pause) + ABOVE + shape.above + "\n_at_first = frozenset(globals())"
        self._spare: tuple[RealKernel, Execution] | None = None
        self.kills, self.told = 0, [f"seed {seed}"]

    # -- kernels

    def _warm_up(self) -> None:
        """Start the next kernel, which runs the cells above while another one trains."""
        kernel = self._new_kernel()
        self._spare = kernel, kernel.begin(self._above)

    def _next(self) -> RealKernel:
        if self._spare is None:
            self._warm_up()
        assert self._spare is not None
        (kernel, above), self._spare = self._spare, None
        above.end(timeout_s=120).succeeded()
        return kernel

    # -- runs

    def undisturbed(self, n: int, flags: str = "") -> Left:
        """Run the cell as one that nothing disturbs."""
        self._steps_file.unlink(missing_ok=True)
        kernel = self._next()
        self._warm_up()
        cell = kernel.do(self._cell(n, flags), timeout_s=120)
        found = self._left(kernel, cell, n)
        self.steps = found.steps
        kernel.close()
        return found

    def killed(self, numbers: list[int], kills: int) -> Left:
        """Run the cell, kill its kernel, and go on in the next, until it has been killed `kills` times.

        Args:
            numbers: Of ranks, in turns.
        """
        shutil.rmtree(self._folder / "saved", ignore_errors=True)  # of a run that has come to its end
        saving = self._random.choice(["2steps", "3steps", "0.05s"])
        start = self._random.choice(["fork", "fork", "fork", "zygote"])
        self.told.append(f"--checkpoint-every {saving} --start {start}")
        flags = f"--checkpoint-every {saving} --checkpoint-dir saved --resume"
        for turn in range(kills + 1):
            n, kernel = numbers[turn % len(numbers)], self._next()
            if turn < kills:
                self._warm_up()
            self._steps_file.unlink(missing_ok=True)
            saved = self._saved()
            running = kernel.begin(self._cell(n, flags, start))
            if turn == kills or not self._kill(kernel, running, n, kills - turn):
                cell = running.end(timeout_s=120)
                self._note(f"{n} rank(s) from {saved} to the end", cell)
                cell.succeeded()
                assert ("continuing from" in cell.stdout) == bool(saved), self.told
                found = self._left(kernel, cell, n)
                kernel.close()
                return found
            kernel.close()
        raise AssertionError("unreachable")

    def _kill(self, kernel: RealKernel, running: Execution, n: int, left: int) -> bool:
        """Kill the kernel at a random moment; return False if the cell has ended before."""
        at_first = self._random.random() < 0.2  # anywhere: while it starts, restores, or before the first save
        moment = self._random.uniform(0, 1.5) if at_first else self._random.uniform(0, 0.06)
        steps = 0 if at_first else self._random.randint(1, max(1, round(1.2 * self.steps / (left + 1))))
        deadline = time.monotonic() + 120
        while self._steps_taken(n) < steps and not running.is_idle and time.monotonic() < deadline:
            running._read(time.monotonic() + 0.005)
        time.sleep(moment)
        while running._read(time.monotonic()):
            pass
        if running.is_idle:
            return False
        ranks = [pid for pid in kernel.family() if pid != kernel.pid]
        kernel.kill()
        if is_all := self._random.random() < 0.5:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.kills += 1
        survivors = kernel.survivors(within_s=30.0)
        self._note(
            f"killed {'with its ranks' if is_all else 'alone'} {moment:.3f} s after {steps} steps, "
            f"{self._steps_taken(n)} taken; saved: {self._saved()}",
            running.cell,
        )
        assert survivors == {}, self.told
        return True

    def _cell(self, n: int, flags: str, start: str = "fork") -> str:
        return accelerate(
            _PACED.format(cell=self._shape.cell.strip("\n")), start, n, f"--seed 3 {self._shape.flags} {flags}"
        )

    # -- what came of it

    @property
    def _steps_file(self) -> Path:
        return self._folder / "steps"

    def _steps_taken(self, n: int) -> int:
        return self._steps_file.stat().st_size // n if self._steps_file.exists() else 0

    def _saved(self) -> list[int]:
        """Return the steps of whole checkpoints."""
        return sorted(
            int(path.parent.name.split("_")[1]) for path in self._folder.glob("saved/checkpoint_*/manifest.json")
        )

    def _left(self, kernel: RealKernel, cell: Cell, n: int) -> Left:
        kernel.do(_LAST.format(tests=str(TESTS)))
        printed = _OF_RANKS.sub("", _OF_OTHERS.sub("", cell.printed))
        values = json.loads((self._folder / "left.json").read_text())
        return Left(values, _BARS.sub("", _SAID_BY_US.sub("", printed)), self._steps_taken(n), n)

    def _note(self, what: str, cell: Cell) -> None:
        self.told.append(f"{what}\n{cell.text}{cell.error.text if cell.error else ''}")
