"""Schedule: decides before which steps a training is saved automatically. Runs in ranks, called at step boundaries.

All ranks must give the same answer without waiting for each other, because each adds its own random states to a
checkpoint. For step counts they do. For times rank 0 decides and tells the others one step ahead: none of them can
be further than inside the step that rank 0 is about to enter, since its gradients need rank 0's.
"""

from __future__ import annotations

import time
from typing import Protocol

from nbaccel.events import SaveAsked, SaveDue, emit
from nbaccel.intervals import Period, Steps
from nbaccel.world import World

__all__ = ["Schedule", "schedule"]


class Schedule(Protocol):
    """Decides when to save."""

    def is_due(self, step: int) -> bool:
        """Return whether to save before optimizer step `step`; called once per step, with rising numbers."""


def schedule(every: Steps | Period, world: World) -> Schedule:
    """Return the schedule of one rank."""
    if isinstance(every, Steps):
        return _EverySteps(every.count)
    if not world.is_distributed:
        return _Alone(every.seconds)
    return _Leading(every.seconds) if world.is_main_process else _Following()


class _EverySteps:
    """Saves at each multiple of `steps` optimizer steps, or at the next allowed boundary: not between epochs."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._asked: int | None = None

    def is_due(self, step: int) -> bool:
        before = step - 1 if self._asked is None else self._asked
        self._asked = step
        return step // self._steps > before // self._steps


class _Alone:
    """Saves as soon as the time is over, in one process."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def is_due(self, step: int) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class _Leading(_Alone):
    """Schedule of rank 0: saves one step after the time is over, and announces that step."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._announced = 0

    def is_due(self, step: int) -> bool:
        if self._announced < step and super().is_due(step):
            self._announced = step + 1
            emit(SaveDue(self._announced))
        return self._announced == step


class _Following:
    """Schedule of the other ranks: saves at the step that rank 0 has announced.

    Without a launcher nothing transmits the announcement: rank 0 then saves alone, and the random states of the others
    are derived at load.
    """

    def __init__(self) -> None:
        self._is_due = False

    def is_due(self, step: int) -> bool:
        self._is_due = False
        emit(SaveAsked(step, self._learn))
        return self._is_due

    def _learn(self) -> None:
        self._is_due = True
