"""`--check` of an export: the losses of the first steps, in the notebook's run and in a run of the script.

The notebook's are those of the record that the cell's run has left, so nothing is run again there. The script runs in
fresh processes up to these steps, and ends there (`LossFile`, in ranks). Its files and downloads are its own: what
stands above its loop is run as it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.base.events import Event, Loss, reports
from nbaccel.base.world import World
from nbaccel.display.history import History
from nbaccel.launching.run import Run

__all__ = ["FIRST_STEPS", "LossFile", "compared", "losses_of_script"]

FIRST_STEPS = "NBACCEL_EXPORT_FIRST_STEPS"
"""The variable that makes a script end after its first steps: their number, and the folder for the losses."""

_STEPS, _MOST_STEPS = 3, 128
_EQUAL = 1e-6
"""Relative difference of losses that count as equal: sums may be in other orders. Another seed shows at once."""
_LIMIT_S = 600.0
_LINES = 8


@dataclass(slots=True)
class LossFile:
    """Takes the losses of one rank, and ends the rank once those of the first steps are there.

    Args:
        path: The file for the losses.
        steps: Number of optimizer steps.
    """

    path: Path
    steps: int
    values: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def begin(cls, where: str, world: World) -> LossFile:
        """Begin to take losses.

        Args:
            where: The value of `FIRST_STEPS`.
            world: That of this rank.
        """
        from nbaccel.launching.libraries import REPORTS, OtherLibraries

        steps, _, folder = where.partition(":")
        file = cls(Path(folder, f"{world.rank}.json"), int(steps))
        OtherLibraries(world).meet(REPORTS)
        reports.lead_to(file)
        return file

    def __call__(self, event: Event) -> None:
        if isinstance(event, Loss):
            self.record_loss(event.value, event.step)

    def record_loss(self, value: Any, step: int) -> None:
        """Take the loss of one backward; all ranks come here after the same ones."""
        if step < self.steps:
            self.values.append((step, float(value)))
            return
        self.end()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()  # a peer may still be receiving what this rank has sent in its backward
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def end(self) -> None:
        """Write the losses."""
        self.path.write_text(json.dumps(self.values))


def losses_of_script(path: Path, num_processes: int, steps: int, words: list[str]) -> tuple[History, str]:
    """Run the beginning of a script in fresh processes; return its losses, and what it printed if it failed.

    Args:
        words: Further flags of `nbaccel launch`.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "import sys; from nbaccel.cli import main; sys.exit(main())", "launch"]
        command += ["-n", str(num_processes), *words, str(path)]
        environ = {**os.environ, FIRST_STEPS: f"{steps}:{folder}"}
        with _ended(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as script:
            try:
                printed = script.communicate(timeout=_LIMIT_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return History(num_processes), f"its first {steps} steps took more than {_LIMIT_S:g} s"
        history = History(num_processes)
        for rank in range(num_processes):
            with contextlib.suppress(OSError, ValueError):
                for step, value in json.loads(Path(folder, f"{rank}.json").read_text()):
                    history.feed(rank, 0.0, Loss(value, step))
        last = "\n".join(printed.strip().splitlines()[-_LINES:])
        return history, "" if script.returncode == 0 else last or f"exit status {script.returncode}"


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a process with the block; torch's agent ends its ranks when it gets the signal."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compared(run: Run | None, path: Path, words: list[str]) -> str:
    """Run the beginning of a script, and return in one line whether its losses are those of the notebook's run.

    Args:
        run: The record of the cell's run; None if there is none.
        path: The script.
        words: Flags of `nbaccel launch` beside the number of ranks.
    """
    if run is None or "loss" not in run.history.names:
        return "--check: the notebook has no losses of that cell to compare with; run it once, then export again."
    theirs = run.history.curve("loss")
    first = theirs.step[0]
    span = theirs.step[1] - first if len(theirs.step) > 1 else 1
    steps = max(span, min(_STEPS, run.history.steps))
    if span > _MOST_STEPS:
        return f"--check: the record of so long a run has means of {span} steps, too many to run again; not compared."
    history, failed = losses_of_script(path, run.history.world_size, first + steps, words)
    if failed:
        return f"--check: the script failed, which the cell did not:\n{failed}"
    if "loss" not in history.names:
        return f"--check: the script ran, and reported no loss in its first {steps} steps; not compared."
    ours = history.curve("loss")
    pairs = (
        [(theirs.mean[0], math.fsum(ours.mean[:span]) / span)]
        if span > 1
        else zip(theirs.mean, ours.mean, strict=False)
    )
    for number, (there, here) in enumerate(pairs):
        if not math.isclose(there, here, rel_tol=_EQUAL, abs_tol=1e-12) and number * span < steps:
            return (
                f"--check: NOT equal: the loss of step {first + number} was {there:.9g} in the notebook, and is "
                f"{here:.9g} in the script."
            )
    return (
        f"--check: equal: the losses of the first {steps} steps are the notebook's ({theirs.mean[0]:.6g} at the first)."
    )
