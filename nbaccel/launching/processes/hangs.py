"""HangWatch: finds ranks that make no progress; what is made of it is the matter of `standstill`. Runs in the kernel.

A rank makes progress when it enters a step or a collective of the project, or has done a call of a map, as the control
page shows. If that has not happened for some seconds, a `Standstill` examines the ranks, which is loaded then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nbaccel.launching.ipc.control import ControlPage

if TYPE_CHECKING:
    from nbaccel.launching.processes.asked_stacks import WatchedMember
    from nbaccel.launching.processes.standstill import Hang, Standstill

__all__ = ["HangWatch"]

_NOTICE_S = 30.0
_CERTAIN_S = 10.0  # time that ranks wait in vain, without computing in its second half


class HangWatch:
    """Watches the ranks of one run for hangs.

    Args:
        store_path: The file in which the ranks meet.
        limit_s: Seconds after which a hang ends the run; None for never.
    """

    def __init__(
        self,
        page: ControlPage,
        members: Sequence[WatchedMember],
        store_path: str,
        limit_s: float | None,
        notice: Callable[[str], None],
        now: float,
        ends_waiting: bool = False,
    ) -> None:
        self._ends_waiting = ends_waiting
        self._page = page
        self._members = members
        self._store_path = store_path
        self._limit_s = limit_s
        self._notice = notice
        self._beats: list[tuple[int, int]] = []
        self._calls: list[int] = []
        self._gone: list[int] = []
        self._since = now
        self._standstill: Standstill | None = None

    def tick(self, now: float) -> Hang | None:
        """Check the ranks; return the hang that is to end the run, if there is one."""
        beats = [self._page.beat(member.rank) for member in self._members]
        gone = [member.rank for member in self._members if not member.is_working]
        calls = [self._page.calls(member.rank) for member in self._members]  # apart: fewer of them are no one's fault
        # One that came to its end had been working.
        if beats != self._beats or calls != self._calls or gone != self._gone or len(gone) == len(beats):
            self._beats, self._calls, self._gone, self._since = beats, calls, gone, now
            self._standstill = None
            return None
        quiet = now - self._since
        if self._standstill is None:
            if quiet < min(_CERTAIN_S / 2, _NOTICE_S, self._limit_s or _NOTICE_S):
                return None
            self._standstill = self._stand()
        found = self._standstill.look(now, quiet)
        if self._standstill.is_busy:
            self._since, self._standstill = now, None
        return found

    def _stand(self) -> Standstill:
        from nbaccel.launching.processes.standstill import Standstill, StandstillLimits

        limits = StandstillLimits(_NOTICE_S, _CERTAIN_S, self._limit_s, self._ends_waiting)
        return Standstill(self._members, self._beats, self._gone, self._store_path, limits, self._notice, self._since)

    def excuse(self, seconds: float) -> None:
        """Exclude the last `seconds`, in which the ranks waited for a person."""
        self._since += seconds

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `tick` may have something to do, besides the half second of telemetry."""
        return None if self._standstill is None else self._standstill.due_in(now)
