"""The runtime of one rank: from the moment its process exists until `os._exit`. Runs in ranks, never returns.

Forked ranks and ranks of the zygote have the same runtime. The order of the prologue matters: the file shield comes
before the first thread, the death watch before anything that can hang, CPU threads before anything that can compute,
the streams before anything that can print. No exception may leave `run_rank`: above it is the kernel's own message
loop.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from nbaccel.base.aborting import forget_left_exchange, leave_device_errors_to_the_program, renew
from nbaccel.base.events import Loss, outlet
from nbaccel.base.settings import RunSettings
from nbaccel.errors import PeerFailed, RunStopped
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import ControlPage, StepGate
from nbaccel.launching.ipc.peer_watch import PeerWatch
from nbaccel.launching.ipc.reports import StackSnapshot, describe
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.spec import Results, SharedNamespace, Task, TaskWatch, WorkerBoot, load_named
from nbaccel.launching.libraries import attach_to_foreign_trainers
from nbaccel.launching.libraries.existing_world import join_existing_world
from nbaccel.launching.libraries.nested_launchers import refuse_launchers
from nbaccel.launching.libraries.one_file import write_one_file
from nbaccel.launching.libraries.one_output import MetricsOfRanks, ProgressBars, refuse_logins, write_one_run
from nbaccel.launching.libraries.one_process import forget_one_process, let_the_local_rank_be_the_only_card
from nbaccel.launching.rank.connections import explain
from nbaccel.launching.rank.debugger import debugging
from nbaccel.launching.rank.inherited import LostThreads, put_aside
from nbaccel.launching.rank.jupyter import adopt_notebook, flush_figures, reload_modules
from nbaccel.launching.rank.lifetime import SPOILT, CutWatch, DeathWatch, ExitFunctions, SaveGrace
from nbaccel.launching.rank.process_setup import (
    ChildHandler,
    Interrupt,
    SpareDescriptors,
    keep_ended_groups,
    meet_in_file,
    raise_oom_score,
    restore_signals,
    tell_on_signal,
    why_this_fork_fails,
)
from nbaccel.launching.rank.rank_part import RankPart, parts_of
from nbaccel.launching.rank.reporter import Reporter
from nbaccel.launching.rank.separate_trainings import OneTraining
from nbaccel.launching.rank.sharded_results import ShardedResults
from nbaccel.launching.rank.stack_snapshot import CallLog, is_data, left_behind, scenes
from nbaccel.launching.rank.streams import RankStreams
from nbaccel.launching.rank.whole_models import WholeModels
from nbaccel.namespace.inventory import ObjectPlace
from nbaccel.namespace.kind import Change
from nbaccel.namespace.parameters import parameters_of
from nbaccel.namespace.payload import pack_what_can_travel
from nbaccel.namespace.wrappers import plain

__all__ = [
    "run_rank",
]

_BROKEN = 70
"""Exit code of a rank whose runtime itself failed (EX_SOFTWARE of sysexits.h)."""


def run_rank(
    boot: WorkerBoot,
    make_task: Callable[[], Task],
    close_fds: Sequence[int],
    is_fork: bool,
    lost_threads: Sequence[threading.Thread] = (),
    written: Sequence[Any] = (),
) -> NoReturn:
    """Run rank `boot.world.rank` until the end of the process.

    make_task: builds the task; called after the prologue, so that user code in it already runs in the rank's
    environment.
    close_fds: descriptors of the kernel that this process holds copies of.
    is_fork: this process is a copy of the kernel (else of the zygote).
    lost_threads: threads of the kernel that user code may wait for, and that do not exist here.
    written: files of the kernel that are open for writing, and that the task may write to.
    """
    code = _BROKEN
    # A forked child that returns from here runs the kernel's loop: https://github.com/jupyter/notebook/issues/3106.
    try:
        os.setsid()
        parts = parts_of(boot.parts)
        for part in parts:
            make_task = part.enter(make_task)
        watch = DeathWatch(boot.kernel_pidfd, boot.channel_fd)
        watch.start()
        raise_oom_score()
        rank = _Rank(boot, parts, close_fds, is_fork, watch, written)  # kept by name: freed, its open socket would warn
        LostThreads(boot.world.rank, lost_threads, rank.interrupt.raise_in_main).start()
        code = rank.live(make_task)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Rank:
    """One rank: prologue in `__init__`, then `live`."""

    def __init__(
        self,
        boot: WorkerBoot,
        parts: Sequence[RankPart],
        close_fds: Sequence[int],
        is_fork: bool,
        watch: DeathWatch,
        written: Sequence[Any],
    ) -> None:
        self.boot = boot
        self.pid = os.getpid()
        self.rank = boot.world.rank
        self.channel = Channel.from_fd(boot.channel_fd)
        for name, value in boot.environ.items():  # `update` copies many pages of the kernel's, of abstract classes
            os.environ[name] = value
        leave_device_errors_to_the_program()  # whichever code forms a group
        _limit_threads(boot.threads)
        self._streams = RankStreams(boot, self.channel)
        for fd in close_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        adopt_notebook(self.rank, self._streams.publish, self._streams.old_streams)
        self._kept, self._written = put_aside(self.rank), written
        self._exit_worker = ExitFunctions()
        restore_signals()
        self.interrupt = Interrupt()
        self._children = ChildHandler()
        self._spare_files = SpareDescriptors()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._stacks = tell_on_signal(boot.store_path, self.rank)
        self.page = ControlPage(boot.page_fd, boot.world.world_size)
        meet_in_file(boot.store_path, boot.world, self._refuse_to_meet)
        refuse_launchers(boot.world)
        forget_one_process(boot.world)
        join_existing_world(boot.world)
        keep_ended_groups()
        if boot.sees_one_card:
            let_the_local_rank_be_the_only_card(boot.world)
        refuse_logins(self.rank)
        self._peers = PeerWatch(self.page, self.rank)
        self._cut = CutWatch(self.page, self.rank)
        self._renewal: tuple[int, int] | None = None
        self.calls = CallLog(self._peers)
        self._one_training = OneTraining(self.page, boot.world, self._collectives)
        self._whole_models = WholeModels(boot.world, self._one_training.wrappers)
        self._leaving = ShardedResults(boot.world.world_size)
        self._leaving.watch()
        self._one_bar = ProgressBars(boot.world)
        self._lone_metrics = MetricsOfRanks()
        self._gate = StepGate(self.page, self.rank)
        ring = RingWriter(boot.ring_fd)
        self.reporter = Reporter(ring, self._gate, self.calls, SaveGrace(self.page, self.rank, watch))
        attach_to_foreign_trainers()
        for part in parts:  # before `write_one_file`, which looks at who calls what it puts around `torch.save`
            part.install()
        if boot.world.is_distributed and not RunSettings.from_env(boot.environ).independent:
            self._one_training.watch()
            self._whole_models.watch()
            self._one_bar.watch()
            self._lone_metrics.watch()
            write_one_run(boot.world, boot.store_path)
            write_one_file(boot.world, boot.store_path, written)
        self.is_fork = is_fork
        self._watch = watch
        self._task_watch: TaskWatch | None = None
        self._excluded_ranks: Sequence[int] = ()

    def _refuse_to_meet(self) -> None:
        """Refuse a process group after a rank has died, in a run whose ranks are started again one by one."""
        if self.page.has_lost_a_rank and self.boot.world.is_distributed:
            raise PeerFailed(
                f"rank {self.rank} of {self.boot.world.world_size} was about to form a process group, and a rank of "
                "this run has died and was started again: ranks that are started again one by one cannot all meet. "
                "Leave collectives out, among them prepare and main_process_first, or do that work before."
            )

    def live(self, make_task: Callable[[], Task]) -> int:
        """Run the task and report, again while the kernel has more tasks; then end the rank; return the exit code."""
        if self.is_fork and (why := why_this_fork_fails()) is not None:
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
            if setup is not None:
                self._task_watch = load_named(setup)(task.namespace)
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
        self._report(status, error, task, _snapshot(task, trace, self.calls))
        # A traceback refers to this frame: a name for it here would keep the user's frames, and their objects, alive.
        error = trace = None
        self._spare_files.keep()
        return status, None if task is None else task.home

    def _run(self, task: Task) -> None:
        watch = None if self._excluded_ranks else self._task_watch
        try:
            with self._children, self.interrupt:
                self._begin_with_groups(task)
                if watch is not None:
                    watch.begin(task.namespace)
                self._one_training.begin(self._excluded_ranks, watch)
                self._whole_models.begin()
                self._one_bar.begin(task.knows_ranks)
                self._lone_metrics.begin(task.knows_ranks, watch)
                task.begin(self.rank)
                task.run()
                if watch is not None:
                    watch.end()
                self._one_training.end()
        except BaseException as error:
            self._cut.note(error)
            explain(error)
            if watch is not None:
                watch.stop()
            raise

    def _begin_with_groups(self, task: Task) -> None:
        """Form groups anew that were aborted, and begin to watch for the flag to abort them.

        The kernel has compared how many collectives each rank has entered: nobody waits for the rest of one.
        """
        forget_left_exchange()
        if self._renewal is not None:
            renew(*self._renewal)
        self._cut.begin(stays=task.home is not None)
        self._cut.enter()

    def _of_batches(self, names: Collection[str], namespace: dict[str, Any] | None) -> list[str]:
        """Return those of `names` whose values the program made for one batch."""
        found: list[str] = []
        if self._task_watch is not None and namespace is not None:
            for name in names:
                with contextlib.suppress(Exception):  # a class of the user's may raise anything
                    if self._task_watch.is_of_batch(parameters_of(plain(namespace[name]))):
                        found.append(name)
        return found

    def _report(self, status: str, error: BaseException | None, task: Task | None, snapshot: StackSnapshot) -> None:
        """Report to the kernel, and send the results. task: None if it could not even be built."""
        chain = [] if error is None else describe(error)  # first, because it reads how full the memory was
        cut = None if task is None else self._cut.look(has_failed=status in ("failed", "exited"))
        results = Results() if task is None else self._results_of(task)
        namespace = None if task is None else task.namespace
        by_reference = {} if task is None else task.by_reference()
        values = {f"out:{name}": value for name, value in results.values.items()}
        changes = {f"change:{number}": change for number, change in enumerate(results.changes)}
        home = None if task is None else task.home
        payload, refused = pack_what_can_travel(
            values | changes | ({} if error is None else {"error": error}),
            by_reference=by_reference,
            namespace=namespace,
            as_written=True,
            places=results.places,
            may_lack=values.keys() if results.may_lack else (),
            sharded=self._leaving.tensors(results),
        )
        stayed = {_place_of_change(key, changes): why for key, why in refused.items() if key.startswith("change:")}
        missing = dict(results.missing) | {
            name.removeprefix("out:"): reason
            for name, reason in refused.items()
            if name.startswith("out:") and name.removeprefix("out:") not in results.optional
        }
        lacks = {name.removeprefix("out:"): list(parts) for name, parts in payload.lacks.items()}
        sys.stdout.flush()
        sys.stderr.flush()
        message: dict[str, Any] = {
            "op": "done",
            "status": status,
            "missing": missing,
            "facts": {
                **results.facts,
                "stayed": stayed,
                "lacks": lacks,
                "rows": self._leaving.report(SPOILT if self._cut.is_spoilt else ""),
                "of_batches": self._of_batches(results.facts.get("checksums", {}), namespace),
                "fails_on_parts": status == "failed"
                and self._task_watch is not None
                and self._task_watch.fails_on_parts,
                **self._one_training.facts(),
            },
            "exit_code": error.code if isinstance(error, SystemExit) else None,
            "chain": chain,
            "snapshot": snapshot.to_json(),
            "names": [] if home is None else list(home.namespace),
            "sequence": _sequence_number(),
            "cut": cut,
        }
        self.channel.send(message, [payload.fd])
        os.close(payload.fd)

    def _results_of(self, task: Task) -> Results:
        if not self._cut.is_spoilt:
            return _results_of(task, self.rank)
        if not self._cut.is_readable:
            return Results(missing={"the results": SPOILT})
        return _only_names(_results_of(task, self.rank), SPOILT)

    def _collectives(self) -> int:
        """Return the number of collectives that this rank has entered: nbaccel's and those of torch's default group."""
        return self.page.collectives(self.rank) + (_sequence_number() or 0)

    def _await_order(self) -> tuple[dict[str, Any], int] | None:
        """Return the kernel's next task, or None to end.

        It comes when the kernel has the reports of all ranks. A rank that ended at once would close its connections
        under peers that are still forming the group. The wait also ends when the kernel's end of the channel closes, or
        by the death watch.
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


def _sequence_number() -> int | None:
    """Return the number of collectives that torch has issued in the default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group = distributed.distributed_c10d._get_default_group()
    kinds = {pair.rpartition(":")[2] for pair in distributed.get_backend_config().split(",")}
    # With "cpu:gloo,cuda:nccl" the group itself counts only one backend.
    counted = [group] if len(kinds) == 1 else [group._get_backend(device) for device in group._device_types]
    try:
        return sum(int(one._get_sequence_number_for_group()) for one in counted)
    except RuntimeError:  # a backend that does not count
        return None


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


def _snapshot(task: Task | None, trace: TracebackType | None, calls: CallLog) -> StackSnapshot:
    """Return where the user's code ended.  trace: of the exception that ended it; None if it finished."""
    try:
        top = task.left_behind() if task is not None else ("", {})
        return StackSnapshot(left_behind(*top) if trace is None else scenes(trace, *top), calls.last())
    except Exception:  # a snapshot must not change how the run ends
        return StackSnapshot()


def _place_of_change(refused: str, changes: Mapping[str, Change]) -> str:
    """Return the place of a change, or of an entry of one, that could not be packed."""
    key, _, entry = refused.removeprefix("change:").partition(":")
    place = ObjectPlace(*changes[f"change:{key}"].token)
    return str(ObjectPlace(place.name, (*place.steps, ("value", entry)))) if entry else str(place)


def _results_of(task: Task, rank: int) -> Results:
    try:
        return task.results(rank)
    except Exception as error:
        return Results(missing={"the results": f"collecting them failed: {type(error).__name__}: {error}"})


def _only_names(results: Results, why: str) -> Results:
    """Report the results as missing, with the reason; drop their facts, which describe the same values.

    Imports and functions that a cell has left are not listed.
    """
    was_asked_for = results.places is None
    wanted = {name: value for name, value in results.values.items() if name not in results.optional}
    names = [name for name, value in wanted.items() if was_asked_for or is_data(name, value)]
    names += [ObjectPlace(*change.token).name for change in results.changes]
    return Results(missing={**results.missing, **dict.fromkeys(names, why)})


def _limit_threads(threads: int) -> None:
    """Limit the CPU threads, before any computation: ranks that each use all cores slow each other down."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
