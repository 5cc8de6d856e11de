"""One training in all ranks out of a loop that prepares nothing. `loop` puts it together; the others are its parts."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["forget", "step_back", "when_stepping_back"]

_watches: list[Callable[[], None]] = []


def when_stepping_back(leave: Callable[[], None]) -> None:
    """Call `leave` at the next `step_back`, once."""
    _watches.append(leave)


def forget(leave: Callable[[], None]) -> None:
    """`leave` need not be called any more."""
    _watches[:] = [each for each in _watches if each != leave]


def step_back() -> None:
    """The program prepares by itself: leave its loop alone until the next task. Cheap, so every way in may call it."""
    while _watches:
        _watches.pop()()
