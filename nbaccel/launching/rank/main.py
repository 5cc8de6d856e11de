"""The runtime of one rank: from the moment its process exists until `os._exit`. Runs in ranks, never returns.

Forked ranks and ranks of the zygote have the same runtime. The order of the prologue matters: the death watch
comes before anything that can hang, CPU threads before anything that can compute, the streams before anything that can
print, and all of it before the parts (`rank/parts`), which have their own order. No exception may leave `run_rank`:
above it is the kernel's own message loop.

Reasons: docs/design/starting-ranks.md
"""

from __future__ import annotations

import bdb
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from nbaccel.base.aborting import DEVICE_ERRORS
from nbaccel.base.events import Loss, TrainingMode, outlet
from nbaccel.errors import RunStopped
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import StepGate
from nbaccel.launching.ipc.peer_watch import PeerWatch
from nbaccel.launching.ipc.rank_part import RankTask
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.spec import Task, TaskWatch, WorkerBoot, load_named, set_up
from nbaccel.launching.rank.connections import explain
from nbaccel.launching.rank.debugger import debugging
from nbaccel.launching.rank.inherited import LostThreads, put_aside
from nbaccel.launching.rank.jupyter import adopt_notebook, flush_figures, reload_modules
from nbaccel.launching.rank.lifetime import DeathWatch, ExitFunctions, OwnHoldings, SaveGrace
from nbaccel.launching.rank.parts import RankParts
from nbaccel.launching.rank.process_setup import (
    LOOPBACK,
    ChildHandler,
    DefaultSignals,
    ForkCheck,
    Interrupt,
    SpareDescriptors,
    StacksOnRequest,
    Variables,
    raise_oom_score,
)
from nbaccel.launching.rank.reporter import Reporter
from nbaccel.launching.rank.stack_snapshot import CallLog
from nbaccel.launching.rank.streams import RankStreams
from nbaccel.launching.rank.task_report import TaskReport

if TYPE_CHECKING:
    from nbaccel.launching.ipc.shared_namespace import SharedNamespace

__all__ = [
    "Rank",
    "run_rank",
]

_BROKEN = 70
"""Exit code of a rank whose runtime itself failed (EX_SOFTWARE of sysexits.h)."""


def run_rank(
    rank: Rank,
    make_task: Callable[[], Task],
    close_fds: Sequence[int],
    is_fork: bool,
    lost_threads: Sequence[threading.Thread] = (),
    kept: Sequence[Any] = (),
) -> NoReturn:
    """Run a rank until the end of the process.

    Args:
        rank: The rank that this process becomes.
        make_task: Builds the task; called after the prologue, so that user code in it already runs in the rank's
            environment.
        close_fds: Descriptors of the kernel that this process holds copies of.
        is_fork: Whether this process is a copy of the kernel (else of the zygote).
        lost_threads: Threads of the kernel that user code may wait for, and that do not exist here.
        kept: Objects of the kernel that would close or delete something if this process released them.
    """
    code = _BROKEN
    # A forked child that returns from here runs the kernel's loop: https://github.com/jupyter/notebook/issues/3106.
    try:
        os.setsid()
        rank.install(close_fds)
        LostThreads(rank.rank, lost_threads, rank.interrupt.raise_in_main).start()
        code = rank.live(make_task, is_fork)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Rank:
    """One rank. In a fork it is made in the kernel, where that copies no pages; then come `install` and `live`.

    Args:
        boot: The facts of the rank.
        written: Files of the kernel that are open for writing, and that the task may write to.
        variables: Environment variables besides those of `boot`.
    """

    def __init__(
        self, boot: WorkerBoot, written: Sequence[Any] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self.boot = boot
        self.rank = boot.world.rank
        self.parts = RankParts(boot, written)
        self.page = page = self.parts.page
        self.interrupt = Interrupt()
        self._written = written
        self._streams = RankStreams(boot)
        meets = {} if boot.address else LOOPBACK
        own = {**boot.environ, **(variables or {}), "OMP_NUM_THREADS": str(boot.threads)}
        self._variables = Variables(own, DEVICE_ERRORS | meets)
        self._fork_check = ForkCheck()
        self._exit_worker = ExitFunctions()
        self._signals = DefaultSignals()
        self._children = ChildHandler()
        self._spare_files = SpareDescriptors()
        self._stacks = StacksOnRequest(boot.store_path, self.rank)
        self._watch = DeathWatch(boot.kernel_pidfd, boot.channel_fd, self._stacks)
        self._peers = PeerWatch(page, self.rank)
        self._gate = StepGate(page, self.rank)
        calls, grace = CallLog(self._peers), SaveGrace(page, self.rank, self._watch)
        self._ring = RingWriter(boot.ring_fd)
        self.reporter = Reporter(self._ring, self._gate, calls, grace)
        self.reporter.route(TrainingMode, self.parts.learns_mode)
        self._watch.when_it_lasts = self.reporter.read
        self._holdings = OwnHoldings()
        self._report = TaskReport(boot.world, self.parts, calls, self._holdings)
        self._task_watch: TaskWatch | None = None
        self._excluded_ranks: Sequence[int] = ()
        self._renewal: tuple[int, int] | None = None

    def release(self) -> None:
        """Release the memory that this process shares with the rank. Called in the kernel, after the fork."""
        self._ring.close()
        self.page.unmap()

    def install(self, close_fds: Sequence[int]) -> None:
        """Make this process the rank.

        Args:
            close_fds: Descriptors of the kernel that this process holds copies of.
        """
        self._stacks.install()
        self._watch.start()
        raise_oom_score()
        self.pid = os.getpid()
        self.channel = Channel.from_fd(self.boot.channel_fd)
        self._variables.install()
        _limit_threads(self.boot.threads)
        old_streams = self._streams.install(self.channel)
        for fd in close_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        adopt_notebook(self.rank, self._streams.publish, old_streams)
        self._kept = put_aside(self.rank), old_streams
        self._exit_worker.install()
        self._signals.restore()
        self.interrupt.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self.reporter.begin()
        self.parts.install()
        self._holdings.begin()
        self._spare_files.keep()  # after that: a report is sent without them

    def live(self, make_task: Callable[[], Task], is_fork: bool) -> int:
        """Run the task and report, again while the kernel has more tasks; then end the rank; return the exit code."""
        if is_fork and (why := self._fork_check.why_it_fails()) is not None:
            self.channel.send({"op": "bad_fork", "why": why})  # nothing of the user's has run yet
            return 0
        self.interrupt.watch(partial(self.page.set_handler, self.rank))
        with outlet(self.reporter):
            status, home = self._work(make_task, self.boot.setup)
            while (order := self._await_order()) is not None:
                status, _ = self._work(partial(_task_sent, *order, home))
        return self._exit_worker(status)

    def _work(self, make_task: Callable[[], Task], setup: str | None = None) -> tuple[str, SharedNamespace | None]:
        """Return how the task ended, and its home."""
        status = "ok"
        error: BaseException | None = None
        trace: TracebackType | None = None
        task: Task | None = None
        try:
            task = make_task()
            if self._task_watch is None:
                self._task_watch = set_up(setup, task)
            with debugging(task.debugged, self.rank, self._streams.ask, self._streams.tell) as debugger:
                try:
                    self._run(task)
                except bdb.BdbQuit:
                    raise
                except Exception as failure:
                    debugger.post_mortem(failure)
                    raise
        except (RunStopped, KeyboardInterrupt, bdb.BdbQuit) as stop:
            status, trace = "stopped", stop.__traceback__
        except SystemExit as exit_:
            status, error, trace = "exited", exit_, exit_.__traceback__
        except BaseException as failure:
            status, error, trace = "failed", failure, failure.__traceback__
        if os.getpid() != self.pid:
            _end_as_a_child(status, error)
        self._spare_files.release()
        if status != "failed":
            with contextlib.suppress(Exception):
                flush_figures()
        for file in self._written:  # what a rank has in its buffers ends with it
            with contextlib.suppress(Exception):
                file.flush()
        self.reporter.flush()
        self.page.finish(self.rank)
        self._report.send(self.channel, status, error, trace, task)
        # A traceback refers to this frame: a name for it here would keep the user's frames, and their objects, alive.
        error = trace = None
        self._spare_files.keep()
        return status, None if task is None else task.home

    def _run(self, task: Task) -> None:
        try:
            with self._children, self.interrupt:
                self.parts.begin(RankTask(task, self._task_watch, self._excluded_ranks, self._renewal))
                task.begin(self.rank)
                task.run()
                self.parts.end()
        except BaseException as error:
            self.parts.stop(error)
            explain(error)
            raise

    def _await_order(self) -> tuple[dict[str, Any], int] | None:
        """Return the kernel's next task, or None to end.

        It comes when the kernel has the reports of all ranks, or at once to a rank that holds nothing of use to others
        (`OwnHoldings`). Another one that ended at once would close its connections under peers that are still forming
        the group. The wait also ends when the kernel's end of the channel closes, or by the death watch.
        """
        with self._watch.at_rest():
            self.reporter.rest()
            while (frame := self.channel.receive()) is not None:
                message, fds = frame
                if message.get("op") == "exit":
                    return None
                if message.get("op") == "task":
                    break
        if frame is None:
            return None
        self.reporter.wake()
        self.interrupt.forget()
        self._gate.begin()
        self._excluded_ranks = message["excluded_ranks"]
        self._renewal = message["renewal"]
        self._peers.begin(message["excluded_ranks"])
        self.reporter.route(Loss, self._peers.refuse_backward if message["excluded_ranks"] else None)
        return message, fds[0]


def _task_sent(message: dict[str, Any], payload_fd: int, home: SharedNamespace | None) -> Task:
    """Return a task that was sent to a persistent rank."""
    reload_modules()
    try:
        task: Task = load_named(message["task"]).unpack(payload_fd, home)
    finally:
        os.close(payload_fd)
    return task


def _end_as_a_child(status: str, error: BaseException | None) -> NoReturn:
    """End a child that the user's code forked and that returned into the runtime, as it would end anywhere.

    It reports nothing to the kernel, because the rank reports for itself.
    """
    code = 1 if status == "failed" else 0
    if isinstance(error, SystemExit) and error.code is not None:
        code = error.code if isinstance(error.code, int) else 1
    with contextlib.suppress(BaseException):
        if status == "failed" and error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _limit_threads(threads: int) -> None:
    """Limit the CPU threads, before any computation: ranks that each use all cores slow each other down."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
