"""Events: what a rank reports while it runs, and the outlet they leave by. Runs in ranks; the kernel reads them.

`train` emits, `launch` and `trackers` listen; neither knows the other. The current outlet is the one piece of
module-level state in nbaccel: a plain variable, because threads do not inherit context variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CollectiveEntered",
    "Event",
    "Metric",
    "Sink",
    "StepEntered",
    "StepsEnded",
    "Waiting",
    "emit",
    "outlet",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one rank."""


@dataclass(frozen=True, slots=True)
class Metric(Event):
    """Numbers the user logged.

    values: name to number or 0-d tensor; tensors are read later, away from the step.
    step: the optimizer step they belong to.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepEntered(Event):
    """The rank is at a step boundary and about to enter a step; every collective of earlier steps is over.

    step: training step about to be entered, 0-based and equal on all ranks that meet in its collectives.
    substep: batches taken since the last training step, for loops that never train (evaluation).

    An outlet may answer by raising `nbaccel.errors.RunStopped`: this is where a run stops.
    """

    step: int
    substep: int = 0


@dataclass(frozen=True, slots=True)
class StepsEnded(Event):
    """The rank left its loop: no step is in flight until the next `StepEntered`."""


@dataclass(frozen=True, slots=True)
class CollectiveEntered(Event):
    """The rank enters a collective of ours. Every rank enters the same ones, so counting them compares ranks."""


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The rank waits in the collective that it entered last; emitted again while that lasts.

    call: the collective in words.  seconds: for how long, so far.

    An outlet that knows of a peer which will never come may answer by raising `nbaccel.errors.CollectiveMismatch`.
    """

    call: str
    seconds: float = 0.0


Sink = Callable[[Event], None]


def _nowhere(event: Event) -> None:
    """The outlet of a process that nobody listens to."""


_current: Sink = _nowhere


def emit(event: Event) -> None:
    """Hand `event` to the current outlet. Cheap; never blocks on the kernel."""
    _current(event)


@contextmanager
def outlet(sink: Sink) -> Iterator[None]:
    """Send every event of this process to `sink` while the block runs.

    >>> seen = []
    >>> with outlet(seen.append):
    ...     emit(StepEntered(step=3))
    >>> seen[0].step
    3
    """
    global _current
    previous, _current = _current, sink
    try:
        yield
    finally:
        _current = previous
