"""KeepRunning: the shutdown policy of a run that nothing has ended yet, and the limits that will. Run in the kernel.

Every run has these; the policies that take over are in `shutdown`.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.spec import ProgramLimit
from nbaccel.launching.processes.handle import WorkerHandle

__all__ = ["NOTICE_AFTER_S", "TICK_S", "KeepRunning", "ShutdownPolicy", "TimeLimits"]

NOTICE_AFTER_S = 0.5
"""Seconds after which a user is told that the interrupt has not ended the run yet."""

TICK_S = 0.02
_EXIT_S = 12.0  # the rank allows itself 10


class ShutdownPolicy:
    """Releases ranks once all have reported, or none needs them any more; the base class of the other policies.

    Attributes:
        keeps_running: Nothing has begun to end the run.
        stops_at_step: The ranks leave before the same step.
        breaks_off: What the ranks have not finished is given up.
        kills: No rank is waited for.
    """

    keeps_running = False
    stops_at_step = False
    breaks_off = False
    kills = False

    def __init__(self, members: Sequence[WorkerHandle], now: float) -> None:
        self.members = members
        self.began = now

    @property
    def notice(self) -> str:
        """Return the line about what the ranks are finishing; empty if that is nothing."""
        return ""

    def advance(self, now: float) -> None:
        """Do what is due at `now`."""
        is_over = not any(member.is_working for member in self.members)
        for member in self.members:
            if is_over or (member.report is not None and member.report.holds_nothing):
                member.release(now)
        self._reap_the_slow(now)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `advance` may have something to do; None while only events matter."""
        return TICK_S * 5 if any(member.released_at for member in self.members) else None

    def _reap_the_slow(self, now: float) -> None:
        for member in self.members:
            if member.released_at is not None and not member.has_ended and now > member.released_at + _EXIT_S:
                member.kill()


class KeepRunning(ShutdownPolicy):
    """Shutdown policy of a run that nothing has ended yet: it holds until every rank has reported."""

    keeps_running = True


class TimeLimits:
    """The limits of one run, the earliest of which ends it.

    Args:
        launch_s: That of the launch, counted from `began`.
        program: A limit that an earlier attempt of the run had set.
    """

    def __init__(
        self, page: ControlPage, began: float, launch_s: float | None = None, program: ProgramLimit | None = None
    ) -> None:
        self._page = page
        self._launch_at = None if launch_s is None else began + launch_s
        self._earlier = program
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """Exclude the seconds that a debugger prompt was open."""
        self._excused_s += seconds

    @property
    def program(self) -> ProgramLimit | None:
        """Return the earliest limit that the program has set, if any."""
        if not (limits := self._page.time_limits()):
            return self._earlier
        told = [ProgramLimit(*limit) for limit in limits]
        return min([*told, *([] if self._earlier is None else [self._earlier])], key=lambda each: each.at)

    @property
    def ends_at(self) -> float | None:
        """Return the time at which the run is to end, by the present limits; None without a limit."""
        program = self.program
        ends = [at for at in (self._launch_at, None if program is None else program.at) if at is not None]
        return min(ends) + self._excused_s if ends else None

    @property
    def is_programs(self) -> bool:
        """Return whether the program's limit is the earliest."""
        program = self.program
        return program is not None and (self._launch_at is None or program.at < self._launch_at)
