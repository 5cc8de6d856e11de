"""CallLog: the last collectives that this rank entered, and the user's lines that called them. Runs in ranks.

It gets `CollectiveEntered` on its way to the `PeerWatch`. A call costs up to 3 us here (measured on a busy machine);
the entries stay in the rank until its report.
"""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType

from nbaccel.events import CollectiveEntered, Event, Sink
from nbaccel.launch.rank.look import is_users
from nbaccel.launch.snapshot import Call

__all__ = ["CallLog"]

_KEPT = 20


class CallLog:
    """The last 20 collectives.

    then: gets every event afterwards.
    """

    def __init__(self, then: Sink) -> None:
        self._then = then
        self._calls: deque[Call] = deque(maxlen=_KEPT)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CollectiveEntered):
            self._calls.append(Call(event.call, *_users_line()))
        self._then(event)

    def last(self) -> list[Call]:
        """Return the collectives, oldest first."""
        return list(self._calls)


def _users_line() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
