"""Hooks of the training that `raw_loop` makes of loops that prepare nothing. Runs in ranks.

What prepares by itself says so here, and asks here for the step of such a loop, without importing that training.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "begin_anew",
    "count_steps_by",
    "forget",
    "step_back",
    "step_under_way",
    "when_beginning_anew",
    "when_stepping_back",
]

_watches: list[Callable[[], None]] = []
_renewed: list[Callable[[], None]] = []
_counts: list[Callable[[], int | None]] = []


def when_stepping_back(leave: Callable[[], None]) -> None:
    """Call `leave` at the next `step_back`, once."""
    _watches.append(leave)


def forget(leave: Callable[[], None]) -> None:
    """Do not call `leave` at the next `step_back` any more."""
    _watches[:] = [each for each in _watches if each != leave]


def count_steps_by(step: Callable[[], int | None] | None) -> None:
    """Let `step` answer `step_under_way` from now on; None where nothing trains unprepared any more."""
    _counts[:] = [] if step is None else [step]


def step_under_way() -> int | None:
    """Return the step of the loop that trains without having prepared anything, 0-based; None without such a loop."""
    return _counts[0]() if _counts else None


def when_beginning_anew(begin: Callable[[], None]) -> None:
    """Call `begin` at each `begin_anew`; it replaces the function that an earlier task has given."""
    _renewed[:] = [begin]


def begin_anew() -> None:
    """Start the program again, as in a new attempt after memory ran out: earlier state is not valid any more."""
    for begin in _renewed:
        begin()


def step_back() -> None:
    """Leave the loop unmodified until the next task, since the program prepares by itself.

    Cheap: any call may do it.
    """
    while _watches:
        _watches.pop()()
