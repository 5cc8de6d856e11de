"""Autosave: saves a training automatically at step boundaries. Runs in ranks; no collective.

It decides when to save and under which name. The Accelerator writes and reads checkpoints, and passes in the two
functions for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nbaccel.events import SavingAtStop, emit
from nbaccel.train.accumulation import Saver
from nbaccel.train.checkpoint.generators import State
from nbaccel.train.checkpoint.policy import CheckpointPolicy
from nbaccel.train.checkpoint.schedule import Schedule, schedule
from nbaccel.train.checkpoint.shelf import Timeline
from nbaccel.world import World

__all__ = ["Autosave"]

Save = Callable[[Path, bool], None]


class Autosave(Saver):
    """Saves at a step boundary, when a checkpoint is due.

    save: writes the training to a folder, waiting for the disk or not.  keep: returns this process's random states.
    """

    def __init__(self, policy: CheckpointPolicy, world: World, save: Save, keep: Callable[[], State]) -> None:
        self.timeline = Timeline(policy.folder, policy.keep)
        self._schedule: Schedule | None = None if policy.every is None else schedule(policy.every, world)
        self._save = save
        self._keep = keep
        self._saved_step = 0

    def enter(self, step: int, may_save: bool) -> None:
        if may_save and self._schedule is not None and self._schedule.is_due(step):
            self._saved_step = step
            self._save(self.timeline.folder_for(step), False)

    def keep(self) -> State:
        return self._keep()

    def stop(self, step: int) -> Path | None:
        """Save what was trained since the last checkpoint, since the session ends or the user ends the run."""
        if self._schedule is None:
            return None
        if step > self._saved_step:
            self._saved_step = step
            emit(SavingAtStop())
            try:
                self._save(self.timeline.folder_for(step), True)
            finally:
                emit(SavingAtStop(is_over=True))
        return self.timeline.folder

    def resumed(self, step: int) -> None:
        """Note that the training continues from a checkpoint of `step`."""
        self._saved_step = step
