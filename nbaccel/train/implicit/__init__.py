"""One training in all ranks out of a loop that prepares nothing. `loop` puts it together; the others are its parts."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["begin_anew", "forget", "step_back", "when_beginning_anew", "when_stepping_back"]

_watches: list[Callable[[], None]] = []
_renewed: list[Callable[[], None]] = []


def when_stepping_back(leave: Callable[[], None]) -> None:
    """Call `leave` at the next `step_back`, once."""
    _watches.append(leave)


def forget(leave: Callable[[], None]) -> None:
    """`leave` need not be called any more."""
    _watches[:] = [each for each in _watches if each != leave]


def when_beginning_anew(begin: Callable[[], None]) -> None:
    """Call `begin` at each `begin_anew`; it takes the place of what an earlier task has given."""
    _renewed[:] = [begin]


def begin_anew() -> None:
    """The program begins once more, as in a new attempt after memory ran out: nothing of before is true any more."""
    for begin in _renewed:
        begin()


def step_back() -> None:
    """The program prepares by itself: leave its loop alone until the next task. Cheap, so every way in may call it."""
    while _watches:
        _watches.pop()()
