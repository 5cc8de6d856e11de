"""Schedule: before which steps a training is saved by itself. Runs in ranks, asked at step boundaries.

All ranks have to answer alike without waiting for each other, because each adds its own random numbers to a
checkpoint. Counting steps they do. Time is kept by rank 0, which tells the others one step ahead: none of them can
be further than inside the step that rank 0 is about to enter, since its gradients need rank 0's.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Protocol

from nbaccel.events import SaveAsked, SaveDue, emit
from nbaccel.world import World

__all__ = ["EveryPeriod", "EverySteps", "Schedule", "parse_interval"]

_UNITS_S = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_STEPS = re.compile(r"(\d+)\s*(steps?)?", re.I)
_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)\s*(h|min|m|sec|s))", re.I)


class Schedule(Protocol):
    """When to save."""

    def is_due(self, step: int) -> bool:
        """Whether to save before optimizer step `step`; asked once per step, with rising numbers."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """After every `steps` optimizer steps.

    >>> [step for step in range(1, 8) if EverySteps(3).is_due(step)]
    [3, 6]
    """

    steps: int

    def is_due(self, step: int) -> bool:
        return step % self.steps == 0

    def on(self, world: World) -> Schedule:
        return self


@dataclass(frozen=True, slots=True)
class EveryPeriod:
    """Every `seconds`, at the first step boundary after that."""

    seconds: float

    def on(self, world: World) -> Schedule:
        """This schedule as one rank keeps it."""
        if not world.is_distributed:
            return _Alone(self.seconds)
        return _Leading(self.seconds) if world.is_main_process else _Following()


def parse_interval(text: str | int | float) -> EverySteps | EveryPeriod:
    """What ``checkpoint_every`` says: ``"500steps"`` or 500, ``"10min"``, ``"90s"``, ``"1h30min"``.

    Raises:
        ValueError: it says neither.

    >>> parse_interval("500steps"), parse_interval("1h30min")
    (EverySteps(steps=500), EveryPeriod(seconds=5400.0))
    """
    said = str(text).strip()
    if (steps := _STEPS.fullmatch(said)) and int(steps[1]) > 0:
        return EverySteps(int(steps[1]))
    seconds = parse_seconds(said)
    if seconds:
        return EveryPeriod(seconds)
    raise ValueError(f"checkpoint_every must be steps or a time above 0, as in 500, '500steps', '10min': got {text!r}")


def parse_seconds(text: str) -> float | None:
    """Seconds in ``"1h30min"``; None where it is no such text."""
    parts = _TIME.findall(text)
    if not parts or _TIME.sub("", text).strip():
        return None
    return float(sum(float(number) * _UNITS_S[unit.lower()] for number, unit in parts))


class _Alone:
    """One process: the moment the time is over."""

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
    """Rank 0: the step after, which it announces."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._announced = 0

    def is_due(self, step: int) -> bool:
        if self._announced < step and super().is_due(step):
            self._announced = step + 1
            emit(SaveDue(self._announced))
        return self._announced == step


class _Following:
    """Other ranks: the step that rank 0 has announced. Without a launcher nobody carries the announcement.

    Then rank 0 saves alone, and the random numbers of the others are derived at load.
    """

    def __init__(self) -> None:
        self._is_due = False

    def is_due(self, step: int) -> bool:
        self._is_due = False
        emit(SaveAsked(step, self._learn))
        return self._is_due

    def _learn(self) -> None:
        self._is_due = True
