"""Deadline: a time limit that a program sets itself, ``Accelerator(time_limit="11h30m")``. Runs in ranks and scripts.

A launcher that receives it ends the run in time, as by a limit of its own: all ranks leave before the same step.
Without a launcher a process that is alone leaves by itself, at its first step boundary after the limit. Several
processes that nothing could stop at the same step are refused before they begin.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nbaccel.errors import RunStopped
from nbaccel.events import TimeLimit, emit
from nbaccel.intervals import said
from nbaccel.train.accumulation import Saver
from nbaccel.world import World

__all__ = ["Deadline"]


class Deadline(Saver):
    """A `Saver` that ends the run once the time is over, and delegates everything else to the `saver` before it.

    seconds: from now.  saver: saves the training, also when the run is stopped; the base does nothing.

    Raises:
            ValueError: several processes, and no launcher that could stop them.
    """

    def __init__(self, seconds: float, world: World, saver: Saver) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds
        self._saver = saver
        if not self._is_seen_to() and world.is_distributed:
            raise ValueError(
                f"time_limit: nobody could stop these {world.world_size} ranks before the same step, since torchrun "
                "(or whoever started them) does not listen. Leave time_limit out and end the loop after so many "
                "steps, or start them from a notebook's cell or by the function nbaccel.launch."
            )

    def enter(self, step: int, may_save: bool) -> None:
        if time.monotonic() > self._at and not self._is_seen_to():
            raise RunStopped(
                f"stopped before step {step}: the time limit of {said(self._seconds)} is over. {self._left_by(step)}"
            )
        self._saver.enter(step, may_save)

    def keep(self) -> Any:
        return self._saver.keep()

    def stop(self, step: int) -> Path | None:
        return self._saver.stop(step)

    def _is_seen_to(self) -> bool:
        """Emit the limit and return whether a launcher takes it.

        A launcher of persistent ranks forgets earlier runs.
        """
        takers: list[bool] = []
        emit(TimeLimit(self._at, self._seconds, lambda: takers.append(True)))
        return bool(takers)

    def _left_by(self, step: int) -> str:
        folder = self._saver.stop(step)
        if folder is None:
            return "Nothing was saved: with checkpoint_every a training is, also when it is stopped."
        return f"The training is saved in {folder}: resume=True goes on from there."
