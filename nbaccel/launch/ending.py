"""Endings: the shutdown policies of a running worker group, one class for each. They run in the kernel.

An ending is asked again and again (`advance`) until the processes are gone. It signals and releases ranks by their
reports and by the time they have had. It never waits itself.

 Running    nothing to do until every rank has reported; then all are released together
 Stopping   the user asked, or the time limit came: finish the step, keep the results
 Aborting   a rank failed: the others cannot go on; BreakingHang: no rank makes progress
 Untangling a rank failed, and the ranks are persistent: all of them are to become idle again, if they can
 Killing    the user asked twice: now
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbaccel.launch.member import Member
from nbaccel.launch.wire.control import SAVE_GRACE_S, ControlPage

__all__ = [
    "FINISHING",
    "NOTICE_AFTER_S",
    "Aborting",
    "BreakingHang",
    "Ending",
    "Killing",
    "Running",
    "Stopping",
    "Untangling",
    "finishing_s",
]

FINISHING = "finishing the step, press again to stop now"
NOTICE_AFTER_S = 0.5
"""Seconds after which a user is told that the interrupt has not ended the run yet."""

TICK_S = 0.02
_NO_STEP_S = 1.0  # a rank outside of any step may still be about to reach one
_PATIENCE_S = 5.0
_FIRST_STEP_S = 30.0  # no step has been timed yet, and the first one compiles and allocates
_AFTER_RESULTS_S = 1.0  # the results are here: a rank that does not react only delays the end
_TERM_TO_KILL_S = 0.5
_FAREWELL_S = 12.0  # the rank allows itself 10
_PEERS_S = 0.7
_HUNG_S = 2.0
_CUT_S = 0.5  # ranks that react to an interrupt return sooner, and no wait has to be ended
_CUT_TAKES_S = 10.0  # an abort of NCCL, and before it the time for the device; mostly 4 s
_FREEING_TAKES_S = 20.0  # the same if no rank has failed: 8 s for the device
_ALIKE_S = 0.1  # ranks run one program: most often the others are about to fail too, and report more
_RESULTS_S = 120.0  # the work is done and its results are being packed, which takes a second or more for each GB


def finishing_s(is_stepping: bool, last_step_s: float) -> float:
    """Return the seconds that a program may go on after the first interrupt: to finish its step, or to reach one.

    last_step_s: duration of its last whole step; 0 if there was none.

    >>> finishing_s(True, 4.0), finishing_s(True, 0.0), finishing_s(False, 4.0)
    (8.0, 30.0, 1.0)
    """
    if not is_stepping:
        return _NO_STEP_S
    return max(_PATIENCE_S, 2 * last_step_s) if last_step_s else _FIRST_STEP_S


class Ending:
    """Releases ranks once all have reported; the base class of the other policies."""

    def __init__(self, members: Sequence[Member], now: float) -> None:
        self.members = members
        self.began = now

    def advance(self, now: float) -> None:
        """Do what is due at `now`."""
        if not any(member.is_working for member in self.members):
            for member in self.members:
                member.release(now)
        self._bury_the_slow(now)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `advance` may have something to do; None while only events matter."""
        return TICK_S * 5 if any(member.released_at for member in self.members) else None

    def _bury_the_slow(self, now: float) -> None:
        for member in self.members:
            if member.released_at is not None and not member.has_ended and now > member.released_at + _FAREWELL_S:
                member.kill()


class Running(Ending):
    """Shutdown policy of a run that nothing has ended yet."""


class Killing(Ending):
    """Sends SIGTERM at once, and SIGKILL half a second later."""

    def __init__(self, members: Sequence[Member], now: float) -> None:
        super().__init__(members, now)
        for member in members:
            if not member.has_ended:
                member.terminate()

    def advance(self, now: float) -> None:
        if now > self.began + _TERM_TO_KILL_S:
            for member in self.members:
                if not member.has_ended:
                    member.kill()

    def due_in(self, now: float) -> float | None:
        return TICK_S


class Aborting(Ending):
    """Ends the run after a rank failed.

    The failed rank may leave at once, so that peers inside a collective with it notice.

    The others get a moment in which they may fail too, and are then interrupted. Rank 0 gets some time to hand over its
    results if they are wanted. A rank that waits in its device for the failed one does not react to an interrupt, and a
    rank that has reacted would read its results behind that wait; so the page asks for that wait to be ended.
    """

    _has_cut = False

    def __init__(self, members: Sequence[Member], now: float, page: ControlPage, wants_results: bool) -> None:
        super().__init__(members, now)
        self._page = page
        self._patience_s = _PEERS_S if wants_results and members[0].is_working else _PEERS_S / 4

    def advance(self, now: float) -> None:
        if not self._has_cut and now > self.began + _CUT_S and any(member.is_working for member in self.members):
            self._has_cut = self._page.is_cut = True
            if any(self._page.hears_cuts(member.rank) for member in self.members):
                self._patience_s += _CUT_TAKES_S
        for member in self.members:
            if not member.is_working:
                member.release(now)
            elif now > self.began + _ALIKE_S:
                member.interrupt()
        for member in self.members:
            patience_s = _RESULTS_S if self._page.has_finished(member.rank) else self._patience_s
            if member.is_working and now > self.began + patience_s:
                member.kill()
        self._bury_the_slow(now)

    def due_in(self, now: float) -> float | None:
        return TICK_S


class BreakingHang(Aborting):
    """Interrupts all ranks because none makes progress. A rank that waits in a collective checks twice a second."""

    def __init__(self, members: Sequence[Member], now: float, page: ControlPage) -> None:
        super().__init__(members, now, page, wants_results=False)
        self._patience_s = _HUNG_S


class Untangling(BreakingHang):
    """Brings persistent ranks back after a failure or a hang. Rank 0 is kept if possible: it holds what was trained.

    A rank that waits inside torch for the failed one does not react to an interrupt. If it waits in its device, that
    wait is ended. If it is rank 0, the ranks that are done end, which breaks its wait in a connection; if it is another
    rank, it is ended.
    """

    _lets_go = False

    def advance(self, now: float) -> None:
        first, *others = self.members
        patience_s = _HUNG_S / 2 + (_CUT_TAKES_S if self._page.hears_cuts(first.rank) else 0)
        if first.is_working and not self._lets_go and now > self.began + patience_s:
            self._lets_go = True
            self._patience_s += _PATIENCE_S
            for member in others:
                if not member.is_working:
                    member.stays = False
        super().advance(now)


class Stopping(Ending):
    """Ends all ranks at the same step boundary; those outside of a step are interrupted after a second.

    Ranks without such steps may be interrupted one exchange apart. The page tells a rank that waits in its device for a
    peer that has left to end that wait if it takes long: when all remaining ranks have left their steps, or before the
    rank is terminated.
    """

    def __init__(self, members: Sequence[Member], now: float, page: ControlPage) -> None:
        super().__init__(members, now)
        self._page = page
        self._terminated: dict[int, float] = {}
        self._results_at: float | None = None
        self._slack_s, self._slack_from = math.inf, now
        self._cut_at: float | None = None
        page.stop()

    @property
    def is_finishing_a_step(self) -> bool:
        return any(member.is_working and self._page.read(member.rank).in_step for member in self.members)

    def advance(self, now: float) -> None:
        if self._results_at is None and not self.members[0].is_working:
            self._results_at = now
        for member in self.members:
            if not member.is_working:
                continue
            position = self._page.read(member.rank)
            is_stepping = self._is_stepping(member)
            if not is_stepping and now > self.began + _NO_STEP_S:
                member.interrupt()  # means nothing to a rank that has finished
            patience_s = _PATIENCE_S
            if self._page.has_finished(member.rank):
                patience_s = _RESULTS_S
            elif self._page.is_saving(member.rank):
                patience_s = SAVE_GRACE_S
            elif is_stepping:
                patience_s = finishing_s(is_stepping, position.last_step_s)
            elif self._results_at is not None and member.was_interrupted:
                patience_s = max(_NO_STEP_S, self._results_at - self.began) + _AFTER_RESULTS_S
            is_needed = self._results_at is None or member.stays
            if self._cut_at is not None and is_needed and self._page.hears_cuts(member.rank):
                patience_s = max(patience_s, self._cut_at - self.began + _FREEING_TAKES_S)
            if now > self.began + patience_s:
                self._end(member, now)
        self._cut_waits_in_vain(now)
        super().advance(now)

    def due_in(self, now: float) -> float | None:
        return TICK_S

    def _cut_waits_in_vain(self, now: float) -> None:
        """End waits in the device when all working ranks have left their steps and had time to finish computing.

        A rank that has reported takes part in no more exchanges. While all ranks work, they are most likely just slow.
        """
        taking_part = [member for member in self.members if member.takes_part]
        working = [member for member in taking_part if member.is_working]
        if len(taking_part) == 1 or not working or not all(map(self._has_left_its_steps, working)):
            slack_s = math.inf
        else:
            has_one_left = len(working) < len(taking_part)
            slack_s = (_HUNG_S if working[0].stays else _CUT_S) if has_one_left else _FIRST_STEP_S
        if slack_s != self._slack_s:
            self._slack_s, self._slack_from = slack_s, now
        slowest_s = max((self._page.read(member.rank).last_step_s for member in working), default=0.0)
        if now > self._slack_from + slack_s + slowest_s:
            self._cut(now)

    def _has_left_its_steps(self, member: Member) -> bool:
        has_heard = member.was_interrupted and not self._is_stepping(member)
        return self._page.has_finished(member.rank) or has_heard

    def _is_stepping(self, member: Member) -> bool:
        position = self._page.read(member.rank)
        return position.in_step or position.parked or self._page.is_saving(member.rank)

    def _cut(self, now: float) -> None:
        if self._cut_at is None:
            self._cut_at = now
            self._page.frees_hung = True

    def _end(self, member: Member, now: float) -> None:
        somebody_saves = any(self._page.is_saving(each.rank) for each in self.members)
        if self._cut_at is None and self._page.hears_cuts(member.rank) and not somebody_saves:
            self._cut(now)
        elif member.rank not in self._terminated:
            self._terminated[member.rank] = now
            member.terminate()
        elif now > self._terminated[member.rank] + _TERM_TO_KILL_S:
            member.kill()
