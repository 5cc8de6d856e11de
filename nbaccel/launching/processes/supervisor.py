"""Supervise the worker processes of a `WorkerGroup` during one run. Runs in the kernel.

A selector waits for events (output, messages, ends of processes, the user's interrupt); nothing is polled while ranks
only work. Whatever ends the run, `Supervisor.as_coroutine` returns after every process of it is gone, except persistent
ranks. `FirstFailure` decides which rank's failure ended the run; `RunObservers` are told of everything.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from nbaccel.base.events import Listener, RankRestarted
from nbaccel.base.world import is_notebook_kernel
from nbaccel.launching.ipc.channel import PIPE_BYTES, PROMPT, MarkedPipe
from nbaccel.launching.ipc.control import SAVE_GRACE_S
from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.ipc.spec import RunEnd, Task
from nbaccel.launching.ipc.telemetry import Telemetry
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.hangs import HangWatch
from nbaccel.launching.processes.interaction import DebuggerPrompt, Interrupts, Pollable, stopped_before_termination
from nbaccel.launching.processes.keep_running import NOTICE_AFTER_S, KeepRunning, ShutdownPolicy, TimeLimits
from nbaccel.launching.processes.notebook_queues import NotebookQueues
from nbaccel.launching.processes.rank_losses import EndOfRun
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.run_coroutine import RunCoroutine, Wait, driven
from nbaccel.launching.processes.shutdown import (
    HANDED_OVER,
    Abort,
    BreakHang,
    HandOver,
    Kill,
    RecoverPersistent,
    StopAtStep,
)
from nbaccel.launching.processes.workers import WorkerGroup, files_being_written
from nbaccel.output.router import KEPT_BYTES, OutputRouter, Screen

if TYPE_CHECKING:
    from nbaccel.launching.processes.standstill import Hang

__all__ = [
    "BadFork",
    "FirstFailure",
    "RunObservers",
    "Supervisor",
    "open_log",
]

_DRAIN_S = 0.2


class BadFork(Exception):
    """The reason why forked ranks would fail, as half a sentence: a rank found it, and no code of the user has run."""


class Supervisor:
    """Supervises the ranks of a `WorkerGroup` during one run, and shuts down those that are not persistent.

    Args:
        task: The work of the ranks in this run.
        notice: Shows one line of the project to the user.
        listeners: Receive the reports of the ranks.
        beside: Other tasks to check during the run.
        hears_signals: Interrupts and SIGTERM concern this run; otherwise the caller of `as_coroutine` handles them, for
            several runs side by side.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        task: Task,
        end: RunEnd,
        router: OutputRouter,
        *,
        notice: Callable[[str], None],
        listeners: Sequence[Listener] = (),
        beside: Sequence[Pollable] = (),
        hears_signals: bool = True,
    ) -> None:
        self._worker_group = worker_group
        self._page = worker_group.page
        self._members = worker_group.members
        self._task = task
        self._end = end
        self._router = router
        self._notice = notice
        self._beside = beside
        self._selector = selectors.DefaultSelector()
        self._hears_signals = hears_signals
        self._interrupts = Interrupts()
        self._losses = _losses(worker_group) if end.restarts_ranks else EndOfRun()
        self._lost: list[WorkerHandle] = []  # ranks that may be started again
        self._telemetry = Telemetry(worker_group.rings, [self._losses, *listeners], notice)
        self._causes = FirstFailure(worker_group.members, task.debugged)
        self._open_files: list[str] = []
        self._why_fork_fails: str | None = None
        self._is_stop_wanted = False  # a rank asked for it
        self._is_timed_out = False
        self._handed_over = 0  # interrupts that the program has handled itself
        self._is_own_limit = False
        self._prompting = DebuggerPrompt(notice)
        self._has_quit = False  # a user quit the debugger of a rank
        self._is_running = True  # nothing has begun to end it
        self._hang: Hang | None = None
        self._stops_all = True  # no rank was gone when all were asked to leave before the same step
        self._is_over = False
        self._queues = NotebookQueues()
        self._has_grace = False  # whether the reaper lets the ranks outlive the kernel

    def as_coroutine(self, begin: Callable[[Collection[int]], None] | None = None) -> RunCoroutine[RankResults]:
        """Run to the end; afterwards no process of the run exists except persistent ranks, which are idle.

        It waits for nothing itself: it yields what it waits for, so that one thread can watch several runs. If it is
        closed before its end, the ranks are killed.

        Args:
            begin: Gives the ranks their work, if they are not started with it; it gets descriptors of the kernel that
                no rank may hold.

        Raises:
            BadFork: See there.
            CannotSend: A name cannot be sent to the ranks.
        """
        began = time.monotonic()
        with contextlib.ExitStack() as owned:
            owned.callback(self._interrupts.close)
            owned.callback(self._selector.close)
            self._selector.register(self._interrupts, selectors.EVENT_READ, self._interrupts.read)
            if self._hears_signals:
                owned.enter_context(self._interrupts.of_the_keyboard())
                owned.enter_context(stopped_before_termination(lambda: self._page.saves_itself))
            owned.callback(self._see_out, self._members)
            self._fds = [self._selector.fileno(), *self._interrupts.fds]
            if begin is None:
                self._worker_group.start(self._fds)
                self._telemetry.begin(time.monotonic())
            else:
                begin(self._fds)
            self._watch(range(len(self._members)))
            self._hangs = HangWatch(
                self._page,
                self._members,
                self._worker_group.store_path,
                self._end.hang_timeout_s,
                self._notice,
                began,
                self._end.ends_waiting,
            )
            self._limits = TimeLimits(self._page, began, self._end.timeout_s, self._end.program_limit)
            yield from self._loop(began)
            if self._why_fork_fails is not None:
                raise BadFork(self._why_fork_fails)
            return self._ended(time.monotonic() - began)

    def _watch(self, ranks: Collection[int]) -> None:
        for member in self._members:
            if member.has_ended or member.rank not in ranks:
                continue
            self._selector.register(member.process.pidfd, selectors.EVENT_READ, partial(self._on_end, member))
            self._selector.register(member.channel, selectors.EVENT_READ, partial(self._on_message, member))
        for pipe in self._worker_group.pipes:
            if pipe.is_open and pipe.rank in ranks:
                self._selector.register(pipe.fd, selectors.EVENT_READ, partial(self._on_output, pipe))

    # --- the loop ----------------------------------------------------------------------------------------------

    def _loop(self, began: float) -> RunCoroutine[None]:
        page = self._page
        ending: ShutdownPolicy = KeepRunning(self._members, began)
        interrupts = 0
        has_noticed = False
        while not all(member.is_through for member in self._members):
            try:
                yield Wait(self._selector, self._due_in(ending))
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                self._interrupts.end_by(error)
            for key, _ in self._selector.select(0):
                key.data()
            self._start_lost_ranks_again()
            now = time.monotonic()
            if self._has_quit and not ending.breaks_off:
                ending = self._breaking_off(now)
            elif self._interrupts.count > interrupts:
                interrupts = self._interrupts.count
                for each in self._beside:
                    each.interrupted(interrupts)
                ending = self._interrupted(ending, now)
            elif ending.keeps_running:
                if page.saves_itself and not self._has_grace:
                    self._has_grace = True
                    self._worker_group.guard(f"={SAVE_GRACE_S:g}")
                if page.stop_wanted and not self._is_stop_wanted:  # a rank was told to end
                    self._is_stop_wanted = True
                    self._interrupts.interrupt()
                if (limit_at := self._limits.ends_at) is not None and now > limit_at:
                    self._is_timed_out = True
                    self._is_own_limit = self._limits.is_programs
                    ending = self._stopping(now)
                elif self._why_fork_fails is not None:
                    ending = Kill(self._members, now)
                elif self._causes.are_known(now):
                    pids = [member.process.pid for member in self._members]
                    self._open_files = files_being_written(pids, self._worker_group.folder)
                    ending = self._breaking_off(time.monotonic())
                elif (hang := self._hangs.tick(now)) is not None:
                    self._hang = hang
                    ending = self._breaking_hang(now)
            if ending.stops_at_step and not has_noticed and now > ending.began + NOTICE_AFTER_S:
                has_noticed = True
                if notice := ending.notice:
                    self._notice(notice)
            self._is_running = ending.keeps_running
            ending.advance(now)
            self._queues.tick(now, self._members)
            self._router.tick()
            self._telemetry.tick(now)
            for each in self._beside:
                each.tick(now, self._interrupts.interrupt)

    def _interrupted(self, ending: ShutdownPolicy, now: float) -> ShutdownPolicy:
        """Return the policy after one more interrupt."""
        interrupts_so_far = self._interrupts.count - self._handed_over
        if interrupts_so_far == 1 and not self._handed_over and ending.keeps_running and self._has_handlers:
            self._handed_over = 1
            self._notice(HANDED_OVER)
            return HandOver(self._members, now, self._page)
        if ending.stops_at_step or interrupts_so_far > 1:
            # A `Kill` is kept: a new one at every interrupt would delay its SIGKILL.
            return ending if ending.kills else Kill(self._members, now)
        return self._stopping(now)

    def _stopping(self, now: float) -> ShutdownPolicy:
        """Return the policy that lets all ranks leave before the same step."""
        self._stops_all = all(member.is_working or not member.takes_part for member in self._members)
        return StopAtStep(self._members, now, self._page)

    @property
    def _has_handlers(self) -> bool:
        """Return whether the programs of all ranks handle interrupts, and this one is a person's."""
        working = [member.rank for member in self._members if member.is_working and member.takes_part]
        is_a_persons = self._interrupts.raised is None and not self._is_stop_wanted
        return is_a_persons and bool(working) and all(map(self._page.has_handler, working))

    def _breaking_off(self, now: float) -> ShutdownPolicy:
        """Return the policy for a rank that left in the middle of a run: the others cannot go on."""
        if self._end.stays:
            return RecoverPersistent(self._members, now, self._page)
        return Abort(self._members, now, self._page, self._end.wants_results)

    def _breaking_hang(self, now: float) -> ShutdownPolicy:
        """Return the policy for ranks of which none makes progress."""
        return (RecoverPersistent if self._end.stays else BreakHang)(self._members, now, self._page)

    def _due_in(self, ending: ShutdownPolicy) -> float | None:
        """Return the seconds until something is due; None while only events matter."""
        now = time.monotonic()
        limit_at = None if self._is_timed_out else self._limits.ends_at
        waits = [
            self._router.due_in(),
            self._telemetry.due_in(now),
            self._hangs.due_in(now),
            ending.due_in(now),
            None if limit_at is None else max(0.0, limit_at - now),
            self._causes.due_in(now),
            *(each.due_in(now) for each in self._beside),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def _on_output(self, pipe: MarkedPipe) -> None:
        data = pipe.read()
        if data is None:
            self._close_pipe(pipe)
            return
        for piece in data:
            if isinstance(piece, int):
                self._show(self._members[pipe.rank], piece)
            else:
                self._router.feed(pipe.rank, *piece)

    def _close_pipe(self, pipe: MarkedPipe) -> None:
        if not pipe.is_open:
            return
        self._selector.unregister(pipe.fd)
        pipe.close()
        if not any(other.is_open for other in self._worker_group.pipes if other.rank == pipe.rank):
            self._router.rank_done(pipe.rank)

    def _show(self, member: WorkerHandle, message_id: int) -> None:
        """Show a rich message at its mark.

        It was sent before the mark was written, so it has arrived or is about to.
        """
        if message_id not in member.displays:
            self._on_message(member)
        message = member.displays.pop(message_id, None)
        if message is None:
            return
        if message["kind"] == PROMPT:
            self._prompt(member, message["prompt"])
        else:
            self._router.publish(member.rank, message)

    def _prompt(self, member: WorkerHandle, prompt: str) -> None:
        """Pass a question of the rank's debugger to the user, unless the run is about to end."""
        self._interrupts.read()
        is_open = self._is_running and self._interrupts.count == 0
        if is_open:
            self._prompting.announce(member)
        self._router.settle(member.rank)
        seconds = self._prompting.answer(member, prompt, is_open=is_open, interrupt=self._interrupts.interrupt)
        self._limits.excuse(seconds)
        self._hangs.excuse(seconds)

    def _on_message(self, member: WorkerHandle) -> None:
        for message, fds in member.channel.drain():
            match message["op"]:
                case "display":
                    member.displays[message["id"]] = message["message"]
                case "bad_fork":
                    self._why_fork_fails = message["why"]
                case "quit":
                    self._has_quit = True
                case "post_mortem":
                    member.is_looked_at = True
                case "say":  # of a rank on another machine, by what connects it
                    self._notice(message["text"])
                case "lost":
                    member.lost = f"node {message['node']} {message['why']}"
                case "done":
                    member.report = RankReport.from_frame(message, fds)
                    if member.report.is_failure:
                        self._causes.add(member)
        if not member.channel.is_open:
            with contextlib.suppress(KeyError):
                self._selector.unregister(member.channel)

    def _on_end(self, member: WorkerHandle) -> None:
        """Record that the rank's process is over.

        It is not reaped, so that no other process gets its id, until all are.
        """
        self._selector.unregister(member.process.pidfd)
        self._on_message(member)
        member.has_ended = True
        if member.report is None and not member.was_killed and self._why_fork_fails is None:
            # Not here: other events of this rank may have been selected together with its end.
            (self._lost.append if self._losses.restarts and self._is_running else self._causes.add)(member)

    def _start_lost_ranks_again(self) -> None:
        """Start every rank again that has just died, unless its death ends the run."""
        while self._lost:
            member = self._lost.pop(0)
            self._worker_group.reap([member])
            self._drain({member.rank})
            now = time.monotonic()
            self._telemetry.read(now, ended=[member.rank])
            if not self._losses.allows_restart(member.rank):
                self._causes.add(member)
                continue
            if member.channel.is_open:
                self._selector.unregister(member.channel)
            self._worker_group.restart(member.rank, self._fds)
            self._telemetry.renew(member.rank)
            self._watch([member.rank])
            line = self._losses.line(member.rank, member.process.reap())
            self._notice(line)
            self._telemetry.tell(member.rank, now, RankRestarted(line))

    # --- the end -----------------------------------------------------------------------------------------------

    def _see_out(self, members: Sequence[WorkerHandle]) -> None:
        """End every process of `members`, whatever happened before, and show their remaining output."""
        if self._is_over:
            return
        self._is_over = True
        self._worker_group.reap(members)
        self._queues.close()
        if self._has_grace:
            self._worker_group.guard("=0")
        self._drain({member.rank for member in members})
        self._telemetry.read(time.monotonic(), is_last=True)
        for member in self._members:
            for message in member.displays.values():
                if message["kind"] != PROMPT:
                    self._router.publish(member.rank, message)
            member.displays.clear()

    def _drain(self, gone: Collection[int]) -> None:
        """Read what the pipes hold; a process that still holds a writing end, and writes nothing, gets a short time.

        Args:
            gone: Ranks whose pipes are not needed any more. The others have written all output of this run by now.
        """
        deadline = time.monotonic() + _DRAIN_S
        for pipe in self._worker_group.pipes:
            most = pipe.nbytes + PIPE_BYTES  # a child of the rank may write for ever
            while pipe.is_open and pipe.nbytes < most:
                before = time.monotonic()
                self._on_output(pipe)
                if pipe.is_open and pipe.was_empty:
                    if before > deadline or pipe.rank not in gone:
                        break
                    time.sleep(0.002)
            if pipe.rank in gone:
                self._close_pipe(pipe)

    @property
    def _steps(self) -> int | None:
        """Return the training steps that every rank has done; None if some rank did not come to the stop by itself."""
        came = self._stops_all and all(member.report is not None for member in self._members)
        return self._page.steps_before_stop if came else None

    def _ended(self, seconds: float) -> RankResults:
        self._see_out([member for member in self._members if member.has_ended or not member.stays])
        self._interrupts.read()
        # After a hang, later failures come from the interrupt.
        first = self._causes.first if self._hang is None else self._hang.rank
        return RankResults(
            task=self._task,
            reports=[member.report for member in self._members],
            exit_codes=self._worker_group.exit_codes,
            killed_by_us=[member.was_killed for member in self._members],
            lost=[member.lost for member in self._members],
            nodes=self._worker_group.nodes,
            first_failed=first,
            is_interrupted=self._interrupts.count > self._handed_over or self._has_quit,
            is_timed_out=self._is_timed_out,
            seconds=seconds,
            steps=self._steps,
            open_files=self._open_files,
            hang=self._hang,
            stays=self._end.stays,
            program_limit=self._limits.program,
            is_own_limit=self._is_own_limit,
            saves_itself=self._page.saves_itself,
            why_not_again=self._losses.why_not,
            raised=self._interrupts.raised,
            has_written=self._worker_group.has_written_files,
        )


def _losses(worker_group: WorkerGroup) -> EndOfRun:
    """Return what starts ranks again; it is loaded here, before the ranks."""
    from nbaccel.launching.processes.restarted_ranks import RestartRanks

    return RestartRanks(worker_group)


_SETTLE_S = 0.5  # peers notice a lost connection before the kernel notices its cause
_ALIKE_S = 5.0  # a debugged run is not in a hurry, and a busy machine is slow


class FirstFailure:
    """The failures of one run, in the order in which they were seen.

    A rank that fails breaks the connections of its peers, and their failures may be seen first. So a failure that may
    be a consequence is held back for a moment before the run is aborted.

    Args:
        debugged: The rank whose failure is to be debugged, if any.
    """

    def __init__(self, members: Sequence[WorkerHandle], debugged: int | None) -> None:
        self._members = members
        self._debugged = debugged
        self._failed: list[WorkerHandle] = []
        self._settled_at: float | None = None

    def add(self, member: WorkerHandle) -> None:
        """Record that `member` reported a failure, or ended without a report."""
        self._failed.append(member)
        # Ranks run one program: the debugged rank may be about to fail in the same way.
        alike_s = _ALIKE_S if self._debugged is not None and self._members[self._debugged].is_working else 0.0
        if self._settled_at is None:
            self._settled_at = time.monotonic() + max(alike_s, _SETTLE_S if _is_consequence(member) else 0.0)
        elif not _is_consequence(member):
            self._settled_at = time.monotonic() + alike_s

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the cause may be known; None while nothing failed."""
        return None if self._settled_at is None else max(0.0, self._settled_at - now)

    def are_known(self, now: float) -> bool:
        is_settled = self._settled_at is not None and now >= self._settled_at
        return is_settled and not any(member.is_looked_at and member.is_working for member in self._members)

    @property
    def first(self) -> int | None:
        """Return the rank whose failure was the cause, as far as it can be known."""
        causes = [member for member in self._failed if not _is_consequence(member)]
        return next((member.rank for member in [*causes, *self._failed]), None)


def _is_consequence(member: WorkerHandle) -> bool:
    return member.report is not None and member.report.is_consequence


@dataclass(frozen=True, slots=True)
class RunObservers:
    """The observers of a run; `watch` runs the loop that watches a run for them.

    Args:
        shown_ranks: Ranks whose output is shown; None for all.
        notice: Shows one line of the project to the user.
        listeners: Receive the reports of the ranks.
        beside: Checked while the ranks work, by the thread that waits for them.
        hears_signals: See `Supervisor`.
    """

    screen: Screen
    shown_ranks: Collection[int] | None = None
    notice: Callable[[str], None] | None = None
    listeners: Sequence[Listener] = ()
    beside: Sequence[Pollable] = ()
    hears_signals: bool = True

    def say(self, line: str) -> None:
        """Show one line of the project."""
        if self.notice is None:
            self.screen.write("stderr", f"{line}\n")
        else:
            self.notice(line)

    def watch(
        self,
        worker_group: WorkerGroup,
        task: Task,
        end: RunEnd,
        log: BinaryIO,
        recorder: Listener | None = None,
        begin: Callable[[Collection[int]], None] | None = None,
        excluded_ranks: Collection[int] = (),
    ) -> RankResults:
        """Watch one run of a `WorkerGroup`, from its beginning to its end; see `as_coroutine`."""
        return driven(self.as_coroutine(worker_group, task, end, log, recorder, begin, excluded_ranks))

    def as_coroutine(
        self,
        worker_group: WorkerGroup,
        task: Task,
        end: RunEnd,
        log: BinaryIO,
        recorder: Listener | None = None,
        begin: Callable[[Collection[int]], None] | None = None,
        excluded_ranks: Collection[int] = (),
    ) -> RunCoroutine[RankResults]:
        """Watch one run of a `WorkerGroup`, from its beginning to its end, beside others.

        Args:
            log: Gets all output.
            recorder: Gets each report before the listeners.
            begin: See `Supervisor.as_coroutine`.
            excluded_ranks: Ranks that take no part.
        """
        shown: Collection[int] | None = self.shown_ranks
        if excluded_ranks:
            insiders = [rank for rank in range(worker_group.world_size) if rank not in excluded_ranks]
            shown = [rank for rank in insiders if shown is None or rank in shown]
        heard = [*([] if recorder is None else [recorder]), *self.listeners]
        is_notebook = is_notebook_kernel()
        router = OutputRouter(
            worker_group.world_size,
            self.screen,
            shown_ranks=shown,
            log=log,
            kept_bytes=KEPT_BYTES if is_notebook else None,
            # The other stream is red there, and text of one stream cannot be written over a bar of the other.
            bars_on="stdout" if is_notebook else None,
        )
        with closing(router):
            supervisor = Supervisor(
                worker_group,
                task,
                end,
                router,
                notice=self.say,
                listeners=heard,
                beside=self.beside,
                hears_signals=self.hears_signals,
            )
            return (yield from supervisor.as_coroutine(begin))


def open_log(path: str) -> BinaryIO:
    """Open a new file that only its owner can read."""
    return open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600))
