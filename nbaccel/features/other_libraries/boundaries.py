"""StepBoundaries: passes the steps and progress of a foreign trainer to the run's handshake and the panel. In ranks.

All ranks of a trainer cross the same boundaries, so a run that is stopped ends after the same step everywhere. The
trainer is asked to stop in its own way, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from nbaccel.base.events import Gauge, Progress, StepEntered, StepsEnded, emit
from nbaccel.errors import RunStopped

__all__ = [
    "StepBoundaries",
    "TrainerProgress",
]


class StepBoundaries:
    """The position of one training of a foreign trainer; it begins with `step`.

    Attributes:
        is_asked: The trainer was asked to stop.

    Raises:
        RunStopped: The run ends before this training begins.
    """

    def __init__(self, step: int) -> None:
        self.is_asked = False
        self._step = -1
        self._substep = 0
        self._cross(step)

    def enter(self, step: int) -> bool:
        """Enter `step`; return whether the trainer is to stop here by itself instead.

        Raises:
            RunStopped: It was asked before, and goes on.
        """
        try:
            self._cross(step)
        except RunStopped:
            if self.is_asked:
                raise
            self.is_asked = True
        return self.is_asked

    def enter_evaluation(self) -> None:
        """Enter a batch of an evaluation.

        Raises:
            RunStopped: The run ends here; an evaluation cannot be asked to stop in its own way.
        """
        if not self.is_asked:  # else it is the trainer's final evaluation
            self._cross(self._step)

    def leave(self) -> None:
        """Report that the training is over."""
        emit(StepsEnded())

    def _cross(self, step: int) -> None:
        self._substep = self._substep + 1 if step == self._step else 0
        self._step = step
        emit(StepEntered(step, self._substep))


class TrainerProgress:
    """A loop of a foreign trainer, shown until it is closed.

    Args:
        look: Returns its progress; called from another thread.
        step: The trainer's own when the loop began.
        began: The time of that, by `time.monotonic()`; None for now.
    """

    def __init__(self, look: Callable[[], Progress], step: int, began: float | None = None) -> None:
        self._look = look
        self._first = step
        self._began = time.monotonic() if began is None else began
        self._is_open = True
        emit(Gauge(self._read))

    def _read(self) -> Progress | None:
        return replace(self._look(), first=self._first, began=self._began) if self._is_open else None

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(Exception):  # an unknown version of the library
                emit(replace(self._look(), first=self._first, began=self._began, is_over=True))
