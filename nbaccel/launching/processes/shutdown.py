"""Shutdown policies of a running worker group that is to end. Run in the kernel, which loads them then.

A policy is asked again and again (`advance`) until the processes are gone. It signals and releases ranks by their
reports and by the time they have had. It never waits itself. `StopAtStep` takes over from `KeepRunning` when the user
has asked, or a time limit has come; `Abort` when a rank has failed, `BreakHang` when no rank makes progress;
`RecoverPersistent` in these two cases if the ranks are persistent: all of them are to become idle again, if they can;
`Kill` when the user has asked twice. A time limit ends the run as the user's interrupt does: all ranks leave before the
same step, and those that save themselves do.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from nbaccel.launching.ipc.control import SAVE_GRACE_S, ControlPage
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.keep_running import TICK_S, KeepRunning, ShutdownPolicy

__all__ = [
    "FINISHING",
    "FINISHING_CALLS",
    "HANDED_OVER",
    "Abort",
    "BreakHang",
    "HandOver",
    "Kill",
    "RecoverPersistent",
    "StopAtStep",
    "finishing_s",
]

FINISHING = "finishing the step, press again to stop now"
FINISHING_CALLS = "finishing the calls under way, press again to stop now"
HANDED_OVER = "the program's own handler of interrupts is called in all ranks, before the same step; press again to end"
_NO_STEP_S = 1.0  # a rank outside of any step may still be about to reach one
_PATIENCE_S = 5.0  # from an interrupt until a rank is terminated that is in no step, and neither saves nor packs
_FIRST_STEP_S = 30.0  # no step has been timed yet, and the first one compiles and allocates
_AFTER_RESULTS_S = 1.0  # the results are here: a rank that does not react only delays the end
_TERM_TO_KILL_S = 0.5
_PEERS_S = 0.7  # from the failure of a rank until the others are killed, if rank 0 owes results; else a quarter
_ROWS_S = 5.0  # of values that are sharded, the results are the rows of all ranks
_HUNG_S = 2.0  # from the interrupt of ranks that hang until they are killed
_LET_GO_S = 3.0  # from the end of a rank's process until one that waited for it in a connection has reported
_CUT_S = 0.5  # ranks that react to an interrupt return sooner, and no wait has to be ended
_CUT_TAKES_S = 10.0  # an abort of NCCL, and before it the time for the device; mostly 4 s
_FREEING_TAKES_S = 20.0  # the same if no rank has failed: 8 s for the device
_ALIKE_S = 0.1  # ranks run one program: most often the others are about to fail too, and report more
_RESULTS_S = 120.0  # the work is done and its results are being packed, which takes a second or more for each GB


def finishing_s(is_stepping: bool, last_step_s: float) -> float:
    """Return the seconds that a program may go on after the first interrupt: to finish its step, or to reach one.

    Args:
        last_step_s: Duration of its last whole step; 0 if there was none.

    Example:
        >>> finishing_s(True, 4.0), finishing_s(True, 0.0), finishing_s(False, 4.0)
        (8.0, 30.0, 1.0)
    """
    if not is_stepping:
        return _NO_STEP_S
    return max(_PATIENCE_S, 2 * last_step_s) if last_step_s else _FIRST_STEP_S


class HandOver(KeepRunning):
    """Has all ranks call their program's own handler of SIGINT before the same step; the run goes on.

    If no rank is in a step after a second, all of them get the signal itself.
    """

    def __init__(self, members: Sequence[WorkerHandle], now: float, page: ControlPage) -> None:
        super().__init__(members, now)
        self._page = page
        self._is_over = False
        page.stop(hands_over=True)

    def advance(self, now: float) -> None:
        self._page.answer()
        if not self._is_over:
            waiting = [each for each in self.members if each.is_working and not self._page.has_heard(each.rank)]
            positions = [self._page.read(each.rank) for each in waiting]
            if now > self.began + _NO_STEP_S and not any(each.in_step or each.parked for each in positions):
                for member in waiting:
                    self._page.hear(member.rank)
                    member.process.signal(signal.SIGINT)
                waiting = []
            if not waiting:
                self._is_over = True
                self._page.resume()
        super().advance(now)

    def due_in(self, now: float) -> float | None:
        return super().due_in(now) if self._is_over else TICK_S


class Kill(ShutdownPolicy):
    """Sends SIGTERM at once, and SIGKILL half a second later."""

    breaks_off = True
    kills = True

    def __init__(self, members: Sequence[WorkerHandle], now: float) -> None:
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


class Abort(ShutdownPolicy):
    """Ends the run after a rank failed.

    The failed rank may leave at once, so that peers inside a collective with it notice.

    The others get a moment in which they may fail too, and are then interrupted. Rank 0 gets some time to hand over its
    results if they are wanted. The seconds in which a rank waits for a processor are not counted: which ranks are said
    to have failed does not depend on what else the machine does. A rank that writes a checkpoint finishes it first: it
    would be lost. A rank that waits in its device for the failed one does not react to an interrupt, and a rank that
    has reacted would read its results behind that wait; so the page asks for that wait to be ended.
    """

    breaks_off = True
    _has_cut = False

    def __init__(self, members: Sequence[WorkerHandle], now: float, page: ControlPage, wants_results: bool) -> None:
        super().__init__(members, now)
        self._page = page
        self._patience_s = _PEERS_S if wants_results and members[0].is_working else _PEERS_S / 4
        if wants_results and any(_steps_shards(member) for member in members):
            self._patience_s = _ROWS_S
        self._queued_s = [member.process.queued_s() for member in members]

    def advance(self, now: float) -> None:
        if not self._has_cut and now > self.began + _CUT_S and any(member.is_working for member in self.members):
            self._has_cut = self._page.is_cut = True
            if any(self._page.hears_cuts(member.rank) for member in self.members):
                self._patience_s += _CUT_TAKES_S
        for member, queued_s in zip(self.members, self._queued_s, strict=True):
            if not member.is_working:
                member.release(now)
                continue
            if self._page.is_writing(member.rank) and now < self.began + _RESULTS_S:
                continue
            had_s = now - self.began - (member.process.queued_s() - queued_s)
            if had_s > _ALIKE_S:
                member.interrupt()
            if had_s > (_RESULTS_S if self._page.has_finished(member.rank) else self._patience_s):
                member.kill()
        self._reap_the_slow(now)

    def due_in(self, now: float) -> float | None:
        return TICK_S


def _steps_shards(member: WorkerHandle) -> bool:
    """Return whether a rank has reported, and has trained a sharded model."""
    return member.report is not None and member.report.facts.get("rows", {}).get("steps", 0) > 0


class BreakHang(Abort):
    """Interrupts all ranks because none makes progress. A rank that waits in a collective checks twice a second."""

    def __init__(self, members: Sequence[WorkerHandle], now: float, page: ControlPage) -> None:
        super().__init__(members, now, page, wants_results=False)
        self._patience_s = _HUNG_S


class RecoverPersistent(BreakHang):
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


class StopAtStep(ShutdownPolicy):
    """Ends all ranks at the same step boundary; those outside of a step are interrupted after a second.

    Ranks without such steps may be interrupted one exchange apart. The page tells a rank that waits in its device for a
    peer that has left to end that wait if it takes long: when all remaining ranks have left their steps, or before the
    rank is terminated. A wait in a connection for a rank that works no more ends with that rank's process: so before a
    rank is terminated, which loses what it has trained, those that have reported are let go.
    """

    stops_at_step = True

    def __init__(self, members: Sequence[WorkerHandle], now: float, page: ControlPage) -> None:
        super().__init__(members, now)
        self._page = page
        self._terminated: dict[int, float] = {}
        self._results_at: float | None = None
        self._slack_s, self._slack_from = math.inf, now
        self._cut_at: float | None = None
        self._let_go_at: float | None = None
        page.stop()

    @property
    def notice(self) -> str:
        """Return the line about what the ranks are finishing; empty if that is nothing."""
        busy = [each.rank for each in self.members if each.is_working and self._page.read(each.rank).in_step]
        if not busy:
            return ""
        return FINISHING_CALLS if all(map(self._page.is_calling, busy)) else FINISHING

    def advance(self, now: float) -> None:
        self._page.answer()
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

    def _has_left_its_steps(self, member: WorkerHandle) -> bool:
        has_heard = member.was_interrupted and not self._is_stepping(member)
        return self._page.has_finished(member.rank) or has_heard

    def _is_stepping(self, member: WorkerHandle) -> bool:
        position = self._page.read(member.rank)
        return position.in_step or position.parked or self._page.is_saving(member.rank)

    def _cut(self, now: float) -> None:
        if self._cut_at is None:
            self._cut_at = now
            self._page.frees_hung = True

    def _end(self, member: WorkerHandle, now: float) -> None:
        somebody_saves = any(self._page.is_saving(each.rank) for each in self.members)
        if self._cut_at is None and self._page.hears_cuts(member.rank) and not somebody_saves:
            self._cut(now)
        elif self._let_go_at is None and (gone := self._gone_before(member)):
            self._let_go_at = now
            for each in gone:
                each.stays = False
                each.release(now)
        elif self._let_go_at is not None and now < self._let_go_at + _LET_GO_S:
            pass
        elif member.rank not in self._terminated:
            self._terminated[member.rank] = now
            member.terminate()
        elif now > self._terminated[member.rank] + _TERM_TO_KILL_S:
            member.kill()

    def _gone_before(self, member: WorkerHandle) -> list[WorkerHandle]:
        """Return the ranks that `member` may wait for in vain. Rank 0 is not ended for another one that stays."""
        if member.stays and member is not self.members[0]:
            return []
        return [each for each in self.members if not each.is_working and each.takes_part and not each.has_ended]
