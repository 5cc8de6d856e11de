"""The runtime of one rank: from the moment its process exists until `os._exit`. Runs in ranks, never returns.

One runtime for forked ranks and ranks of the zygote. The order of the prologue matters: the death watch comes
before anything that can hang, CPU threads before anything that can compute, the streams before anything that can
print. Nothing may unwind past `run_rank`: above it is the kernel's own message loop.
"""

from __future__ import annotations

import atexit
import bdb
import contextlib
import fcntl
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from nbaccel.errors import NoInput, RunStopped
from nbaccel.events import Loss, outlet
from nbaccel.launch.home import Home
from nbaccel.launch.rank.calls import CallLog
from nbaccel.launch.rank.debugger import RunIsOver, debugging
from nbaccel.launch.rank.foreign import attach_to_foreign_trainers
from nbaccel.launch.rank.grace import SaveGrace
from nbaccel.launch.rank.jupyter import PROMPT, adopt_notebook, flush_figures
from nbaccel.launch.rank.look import left_behind, scenes
from nbaccel.launch.rank.oomscore import volunteer
from nbaccel.launch.rank.rendezvous import meet_in_file
from nbaccel.launch.rank.reporter import Reporter
from nbaccel.launch.rank.stacks import tell_on_signal
from nbaccel.launch.rank.watch import DeathWatch
from nbaccel.launch.rank.wrappers import undressed
from nbaccel.launch.report import describe
from nbaccel.launch.snapshot import Snapshot
from nbaccel.launch.spec import RankBoot, Results, Task, load_named
from nbaccel.launch.wire.channel import Channel
from nbaccel.launch.wire.control import ControlPage, PeerWatch, StepGate
from nbaccel.launch.wire.parcel import pack_what_can_travel
from nbaccel.launch.wire.ring import RingWriter

__all__ = ["BROKEN", "run_rank"]

BROKEN = 70
"""Exit code of a rank whose runtime itself failed (EX_SOFTWARE of sysexits.h)."""

_FAREWELL_S = 10.0
_PIPE_BYTES = 1 << 20


def run_rank(boot: RankBoot, make_task: Callable[[], Task], close_fds: Sequence[int], is_fork: bool) -> NoReturn:
    """Be rank `boot.world.rank` until the end of the process.

    make_task: builds the task; called after the prologue, so that user code in it is already at home.
    close_fds: descriptors of the kernel that this process holds copies of.
    is_fork: this process is a copy of the kernel (else of the zygote).
    """
    code = BROKEN
    try:
        os.setsid()
        watch = DeathWatch(boot.kernel_pidfd, boot.channel_fd)
        watch.start()
        volunteer()
        rank = _Rank(boot, close_fds, is_fork, watch)  # kept by name: dropped, its open socket would complain
        code = rank.live(make_task)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Interrupt:
    """SIGINT becomes KeyboardInterrupt in the user's code, and nothing after it.

    One that comes before is kept for the user's code: the kernel sends it once, and setting up can take seconds.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_come = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self._has_come = True
        if self.is_open:
            raise KeyboardInterrupt

    def forget(self) -> None:
        """What came for one task has nothing to do with the next."""
        self._has_come = False

    def __enter__(self) -> None:
        self.is_open = not self._has_come
        if self._has_come:
            raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        self.is_open = False


class _ChildHandler:
    """What the user's code has SIGCHLD do is done in the user's code alone.

    torch's handler raises, for a DataLoader's worker that died, wherever the program is: a report would be cut off.
    """

    def __init__(self) -> None:
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> None:
        signal.signal(signal.SIGCHLD, self._handler)

    def __exit__(self, *exc: object) -> None:
        self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL  # None: it came from C


class _SpareFiles:
    """Descriptors kept back, so that a rank whose program has opened all that it may can still report."""

    _MOST = 6

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.keep()

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._fds) < self._MOST:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class _Rank:
    """One rank: prologue in `__init__`, then `live`."""

    def __init__(self, boot: RankBoot, close_fds: Sequence[int], is_fork: bool, watch: DeathWatch) -> None:
        self.boot = boot
        self.pid = os.getpid()
        self.rank = boot.world.rank
        self.channel = Channel.from_fd(boot.channel_fd)
        self._message_id = 0
        self._publishing = threading.Lock()
        self._asking = threading.Lock()
        os.environ.update(boot.environ)
        _limit_threads(boot.threads)
        old_streams = self._replace_streams()
        for fd in close_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        adopt_notebook(self.rank, self._publish, old_streams)
        atexit._clear()  # the kernel's handlers are the kernel's to run
        _restore_signals()
        self.interrupt = _Interrupt()
        self._children = _ChildHandler()
        self._spare_files = _SpareFiles()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._stacks = tell_on_signal(boot.store_path, self.rank)
        meet_in_file(boot.store_path, boot.world)
        self.page = ControlPage(boot.page_fd, boot.world.world_size)
        self._peers = PeerWatch(self.page, self.rank)
        self.calls = CallLog(self._peers)
        self._gate = StepGate(self.page, self.rank)
        ring = RingWriter(boot.ring_fd)
        self.reporter = Reporter(ring, self._gate, self.calls, SaveGrace(self.page, self.rank, watch))
        attach_to_foreign_trainers()
        self.is_fork = is_fork
        self._watch = watch

    def live(self, make_task: Callable[[], Task]) -> int:
        """Run the task and report, again while the kernel has more; then say farewell; returns the exit code."""
        if self.is_fork and _cuda_is_broken():
            # The kernel touched CUDA in a way that only a child can see. Nothing of the user's has run yet.
            self.channel.send({"op": "bad_fork"})
            return 0
        with outlet(self.reporter):
            status, home = self._work(make_task, self.boot.setup)
            while (order := self._await_order()) is not None:
                status, _ = self._work(partial(_guest, *order, home))
        return self._farewell(status)

    def _work(self, make_task: Callable[[], Task], setup: str | None = None) -> tuple[str, Home | None]:
        """How the task ended, and where it ran."""
        status = "ok"
        error: BaseException | None = None
        trace: TracebackType | None = None
        task: Task | None = None
        try:
            task = make_task()
            if setup is not None:
                load_named(setup)(task.namespace)
            with debugging(task.debugged, self.rank, self._ask, self._tell) as debugger:
                try:
                    with self._children, self.interrupt:
                        task.run()
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
        self.reporter.flush()
        self.page.finish(self.rank)
        self._report(status, error, task, _snapshot(task, trace, self.calls))
        # A traceback knows this frame: names that lead back to it would keep the user's frames, with all they hold.
        error = trace = None
        self._spare_files.keep()
        return status, None if task is None else task.home

    def _report(self, status: str, error: BaseException | None, task: Task | None, snapshot: Snapshot) -> None:
        """Tell the kernel how it went, and send what goes back. task: None if it could not even be built."""
        results = Results() if task is None else _results_of(task, self.rank)
        namespace = None if task is None else task.namespace
        anchors = {} if task is None else task.anchors()
        values = {f"out:{name}": value for name, value in results.values.items()}
        if error is not None:
            values["error"] = error
        home = None if task is None else task.home
        with contextlib.nullcontext() if home is None else undressed(results.values.values()):
            parcel, refused = pack_what_can_travel(values, anchors=anchors, namespace=namespace)
        missing = dict(results.missing) | {
            name.removeprefix("out:"): reason
            for name, reason in refused.items()
            if name != "error" and name.removeprefix("out:") not in results.optional
        }
        sys.stdout.flush()
        sys.stderr.flush()
        message: dict[str, Any] = {
            "op": "done",
            "status": status,
            "missing": missing,
            "facts": dict(results.facts),
            "exit_code": error.code if isinstance(error, SystemExit) else None,
            "chain": [] if error is None else describe(error),
            "snapshot": snapshot.to_json(),
            "names": [] if home is None else list(home.namespace),
            "sequence": _sequence_number(),
        }
        self.channel.send(message, [parcel.fd])
        os.close(parcel.fd)

    def _await_order(self) -> tuple[dict[str, Any], int] | None:
        """The kernel's word: the next task, or None to leave.

        It comes when the kernel has heard from every rank. One that left at once would close its connections under
        peers that are still forming the group. Ended also by the kernel's end of the channel closing, or by the death
        watch.
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
        self._peers.begin(message["outsiders"])
        self.reporter.route(Loss, self._peers.refuse_backward if message["outsiders"] else None)
        return message, fds[0]

    def _farewell(self, status: str) -> int:
        """The rank's own atexit handlers, threads and children get 10 s; then the process ends whatever they do."""
        code = 0 if status in ("ok", "stopped") else 1

        def cut() -> None:
            time.sleep(_FAREWELL_S)
            os._exit(code)

        threading.Thread(target=cut, name="nbaccel-farewell", daemon=True).start()
        if code:
            # Handlers that ask how the process ended (wandb does) look here.
            sys.last_type, sys.last_value = RuntimeError, RuntimeError("the rank failed")
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads, as the interpreter would
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            multiprocessing_util = sys.modules.get("multiprocessing.util")
            if multiprocessing_util is not None:
                multiprocessing_util._exit_function()
        return code

    def _replace_streams(self) -> tuple[Any, Any]:
        """fd 0 is empty, fd 1 and 2 are pipes to the kernel; sys.stdout and sys.stderr write there line by line."""
        for fd in (self.boot.stdout_fd, self.boot.stderr_fd):
            with contextlib.suppress(OSError):  # over the system's limit for pipes: the default size works too
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # A copy of our own for marks: user code may point fd 1 elsewhere.
        self._mark_fd = fcntl.fcntl(self.boot.stdout_fd, fcntl.F_DUPFD_CLOEXEC, 3)
        empty = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((empty, 0), (self.boot.stdout_fd, 1), (self.boot.stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        old = (sys.stdout, sys.stderr)
        sys.stdout = sys.__stdout__ = _text_stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _text_stream(2)  # type: ignore[misc]
        return old

    def _publish(self, message: dict[str, Any]) -> None:
        """Send a rich message, and mark in the output pipe where it belongs among the lines."""
        with self._publishing, contextlib.suppress(OSError):
            self._message_id += 1
            sys.stdout.flush()
            sys.stderr.flush()
            self.channel.send({"op": "display", "id": self._message_id, "message": message})
            os.write(self._mark_fd, mark(self.boot.run_nonce, self._message_id))

    def _ask(self, prompt: str) -> str:
        """What a person types at `prompt`, which is shown behind all that this rank has printed."""
        if os.getpid() != self.pid:
            raise NoInput(
                f"a child process of rank {self.rank} asked for keyboard input, which the rank alone can do: a loader "
                "with num_workers=0 reads its data in the rank, and can be debugged there."
            )
        with self._asking:
            self._publish({"kind": PROMPT, "prompt": prompt})
            frame = self.channel.receive()
        if frame is None or frame[0]["op"] != "answer" or frame[0]["is_over"]:
            raise RunIsOver
        if (typed := frame[0]["text"]) is None:
            raise bdb.BdbQuit
        return str(typed)

    def _tell(self, op: str) -> None:
        """Said at once, before the report: that it comes late, or that peers are about to miss this rank."""
        with contextlib.suppress(OSError):
            self.channel.send({"op": op})


def _guest(message: dict[str, Any], parcel_fd: int, home: Home | None) -> Task:
    """A task that came to a rank that stays."""
    try:
        task: Task = load_named(message["task"]).unpack(parcel_fd, home)
    finally:
        os.close(parcel_fd)
    return task


def _sequence_number() -> int | None:
    """How many collectives torch has issued in the default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        return int(distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return None


def mark(nonce: str, message_id: int) -> bytes:
    """The bytes that stand for rich message `message_id` in a rank's output pipe."""
    return f"\x1e{nonce}:{message_id}\x1e".encode()


def _end_as_a_child(status: str, error: BaseException | None) -> NoReturn:
    """The end of a child that the user's code forked and that came back to us: it ends as it would anywhere.

    It tells the kernel nothing, for the rank speaks for itself.
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


def _snapshot(task: Task | None, trace: TracebackType | None, calls: CallLog) -> Snapshot:
    """Where the user's code ended.  trace: of what ended it; None if it came to its own end."""
    try:
        top = task.left_behind() if task is not None else ("", {})
        return Snapshot(left_behind(*top) if trace is None else scenes(trace, *top), calls.last())
    except Exception:  # it explains how a run ended, and must not change that
        return Snapshot()


def _results_of(task: Task, rank: int) -> Results:
    try:
        return task.results(rank)
    except Exception as error:
        return Results(missing={"the results": f"collecting them failed: {type(error).__name__}: {error}"})


def _text_stream(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _limit_threads(threads: int) -> None:
    """Before any computation: ranks that each use all cores are slower than ranks that share them."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _restore_signals() -> None:
    """Python's and the kernel's handlers mean nothing here: a signal does what it does to any program."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _cuda_is_broken() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())
