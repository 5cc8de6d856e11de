"""Shutdown policies of a running worker group, and the time limits that end a run. Run in the kernel.

A policy is asked again and again (`advance`) until the processes are gone. It signals and releases ranks by their
reports and by the time they have had. It never waits itself. `KeepRunning` holds until every rank has reported, and
releases all together. Other policies take over: `StopAtStep` when the user has asked, or a time limit has come; `Abort`
when a rank has failed, `BreakHang` when no rank makes progress; `RecoverPersistent` in these two cases if the ranks are
persistent: all of them are to become idle again, if they can; `Kill` when the user has asked twice. A time limit ends
the run as the user's interrupt does: all ranks leave before the same step, and those that save themselves do. `endable`
lets a limit end the packing of the user's objects too, before ranks have begun.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nbaccel.launching.ipc.control import SAVE_GRACE_S, ControlPage
from nbaccel.launching.ipc.spec import ProgramLimit
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.interaction import Pollable

__all__ = [
    "FINISHING",
    "FINISHING_CALLS",
    "HANDED_OVER",
    "NOTICE_AFTER_S",
    "Abort",
    "BreakHang",
    "HandOver",
    "KeepRunning",
    "Kill",
    "RecoverPersistent",
    "ShutdownPolicy",
    "StopAtStep",
    "TimeLimits",
    "endable",
    "finishing_s",
]

FINISHING = "finishing the step, press again to stop now"
FINISHING_CALLS = "finishing the calls under way, press again to stop now"
HANDED_OVER = "the program's own handler of interrupts is called in all ranks, before the same step; press again to end"
NOTICE_AFTER_S = 0.5
"""Seconds after which a user is told that the interrupt has not ended the run yet."""

TICK_S = 0.02
_NO_STEP_S = 1.0  # a rank outside of any step may still be about to reach one
_PATIENCE_S = 5.0  # from an interrupt until a rank is terminated that is in no step, and neither saves nor packs
_FIRST_STEP_S = 30.0  # no step has been timed yet, and the first one compiles and allocates
_AFTER_RESULTS_S = 1.0  # the results are here: a rank that does not react only delays the end
_TERM_TO_KILL_S = 0.5
_EXIT_S = 12.0  # the rank allows itself 10
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


class ShutdownPolicy:
    """Releases ranks once all have reported, or none needs them any more; the base class of the other policies."""

    def __init__(self, members: Sequence[WorkerHandle], now: float) -> None:
        self.members = members
        self.began = now

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
    """Shutdown policy of a run that nothing has ended yet."""


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
        told = [ProgramLimit(*limit) for limit in self._page.time_limits()]
        return min([*told, *([] if self._earlier is None else [self._earlier])], default=None, key=lambda each: each.at)

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


_AGAIN_S = 0.2
"""Seconds until the next interrupt, if the user's code has caught the one before."""


@contextmanager
def endable(seconds: float | None, beside: Sequence[Pollable] = ()) -> Iterator[None]:
    """Interrupt the block if it takes longer than `seconds` (None for no limit), or when one of `beside` asks for it.

    It is used while the user's objects are packed. Packing runs code of the user (``__reduce__``, ``__getstate__``),
    which may take long or never return. The ranks have not begun then, so an interrupt ends it as it ends any cell. The
    time limit becomes an interrupt, and so do the requests of those that watch the run from beside: a run in the
    background is packed in its own thread.

    The main thread is interrupted by SIGINT, which also ends a `sleep`; another thread before its next line of Python.

    Raises:
        TimeoutError: The block took longer; with the text of the KeyboardInterrupt that ended it.

    Example:
        >>> with endable(60):
        ...     sum(range(10))
        45
    """
    if seconds is None and not beside:
        yield
        return
    alarm = _Alarm(seconds)
    for each in beside:
        each.begins(alarm.interrupt)
    told = ""
    try:
        alarm.start()
        yield
    except KeyboardInterrupt as interrupt:
        told = str(interrupt)
        if not alarm.has_rung:
            raise
        where = f": {told}" if told else ""
        raise TimeoutError(f"the time limit of {seconds:g} s was over before a rank had its work{where}") from None
    finally:
        while not alarm.is_off:
            try:
                alarm.stop()
            except KeyboardInterrupt:  # between two of these lines; the alarm's next interrupt is 0.2 s away
                alarm.note_interrupt()
        if alarm.is_interrupted:  # it was the user's, who must not have to interrupt twice
            raise KeyboardInterrupt(told)


class _Alarm:
    """Interrupts the thread that made it repeatedly, from `seconds` or an interrupt on until the block is left.

    Attributes:
        has_rung: The time was over before any interrupt.
        is_off: It sends no more interrupts.
        is_interrupted: Another source has interrupted this thread while the block was being left.
    """

    def __init__(self, seconds: float | None) -> None:
        self.has_rung = False
        self.is_off = False
        self.is_interrupted = False
        self._has_sent = False
        self._is_pressed = False
        self._is_awake = threading.Event()
        self._seconds = seconds
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._ident = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._previous: Any = None
        self._thread = threading.Thread(target=self._watch, name="nbaccel-limit", daemon=True)

    def start(self) -> None:
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._interrupted)
        self._thread.start()

    def stop(self) -> None:
        """Send no more interrupts, and absorb one on its way: the handler ignores it, a thread's is caught here.

        It is not taken back: CPython up to 3.12 would keep looking for it, in every thread and for ever, and a thread
        that is being profiled or debugged would make no progress at all.
        """
        self._is_over.set()
        self._is_awake.set()
        with self._lock:
            pass  # nothing is sent from here on
        if not self._is_main:
            with suppress(KeyboardInterrupt):
                for _ in range(100):  # it arrives at a jump back in a loop
                    pass
        with suppress(RuntimeError):  # it was not started
            self._thread.join()
        if self._is_main:
            with suppress(TypeError):  # the previous handler was set by C code
                signal.signal(signal.SIGINT, self._previous)
        self.is_off = True

    def interrupt(self) -> None:
        """Ask for the interrupt, from any thread; once the block is left it does nothing."""
        self._is_pressed = True
        self._is_awake.set()

    def _watch(self) -> None:
        self._is_awake.wait(self._seconds)
        while not self._is_over.is_set():
            with self._lock:
                if self._is_over.is_set():
                    return
                self.has_rung = self.has_rung or not self._is_pressed
                self._has_sent = True
                if self._is_main:
                    signal.pthread_kill(self._ident, signal.SIGINT)
                else:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._ident), ctypes.py_object(KeyboardInterrupt)
                    )
            self._is_over.wait(_AGAIN_S)

    def _interrupted(self, number: int, frame: Any) -> None:
        if not self._is_over.is_set():
            raise KeyboardInterrupt
        self.note_interrupt()

    def note_interrupt(self) -> None:
        """Remember an interrupt that comes while the block is left, unless it may be one of this alarm's own."""
        self.is_interrupted = self.is_interrupted or not self._has_sent
