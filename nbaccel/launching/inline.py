"""Run one rank in the kernel's own process, where forks are impossible or data too large to copy. Runs in the kernel.

The thread that makes the reports of the rank also reads them and draws the panel, between two reports: another thread
could show nothing without disturbing the user's own output. A loop that reports nothing is not followed. Everything
that was set for the run is restored after it, also after an error or an interrupt. `InlineStop` lets the user's
interrupts stop the run, in the main thread.
"""

from __future__ import annotations

import multiprocessing.context
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from nbaccel.base.events import (
    CallEntered,
    CallsEnded,
    Event,
    Listener,
    Sink,
    StepEntered,
    StepsEnded,
    TrainingMode,
    outlet,
)
from nbaccel.base.task_end import finish_stopped_task, finish_task
from nbaccel.display.run_view import RunView
from nbaccel.errors import RunStopped
from nbaccel.features import named
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.ipc.import_hooks_meanwhile import when_found_meanwhile
from nbaccel.launching.ipc.rank_part import watch_of_flags
from nbaccel.launching.ipc.reports import StackSnapshot
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.spec import LaunchSpec, Task, TaskWatch, set_up
from nbaccel.launching.ipc.telemetry import Rings, Telemetry
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.libraries import actions_of
from nbaccel.launching.processes.keep_running import NOTICE_AFTER_S, TICK_S
from nbaccel.launching.processes.shutdown import FINISHING, FINISHING_CALLS, finishing_s
from nbaccel.launching.rank.reporter import Reporter
from nbaccel.launching.rank.stack_snapshot import scenes
from nbaccel.output.screens import ConsoleScreen

__all__ = [
    "InlineStop",
    "ends_its_group",
    "post_mortem_here",
    "run_inline",
    "until_its_end",
]


def run_inline(spec: LaunchSpec, listeners: Sequence[Listener] = ()) -> None:
    """Run the task in this process; its error is raised.

    The environment is restored afterwards. Device memory that the task took stays with the kernel.

    Args:
        listeners: What receives its reports, as those of rank 0.

    Raises:
        KeyboardInterrupt: The user has stopped it, see `InlineStop`.
        RunStopped: It reached a time limit of its own.
    """
    stop, flags = InlineStop(_say), watch_of_flags() if spec.task.flags else None
    learns_mode, watching = (None, nullcontext()) if flags is None else (flags.take, flags.watching(spec.task))
    with stop.heard(), _environment(spec.environ_of(0)), _workers_are_forked(), _heard(listeners, stop, learns_mode):
        watch = set_up(spec.setup, spec.task)
        reports = _foreign_trainers_report(lambda: stop.has_acted)
        try:
            with reports, stop.acts(), watching, _loops_changed(spec, watch):
                spec.task.run()
        except BaseException:
            if _is_alone():  # no peer that does not come
                finish_stopped_task()
            raise
        finish_task()


_INLINE = "inline runs with "


@contextmanager
def _foreign_trainers_report(has_stopped: Callable[[], bool]) -> Iterator[None]:
    """Make the trainers that the block uses report, as they do in ranks.

    Args:
        has_stopped: Returns whether an interrupt of the user's has acted in the block.
    """
    with ExitStack() as undo:
        asks = [(name, partial(actions_of, f"{_INLINE}{name}", undo, has_stopped, name)) for name in named(_INLINE)]
        undo.enter_context(when_found_meanwhile(asks))
        yield


@contextmanager
def _loops_changed(spec: LaunchSpec, watch: TaskWatch | None) -> Iterator[None]:
    """Let `watch` change loops in the block as flags ask, or count the steps of one that is saved. Watch no other."""
    if watch is None or not (spec.settings.changes_loops or spec.task.saves_itself):
        yield
        return
    watch.begin(spec.task.namespace)
    try:
        yield
        watch.end()
    finally:
        watch.stop()


@contextmanager
def ends_its_group(launcher: Launcher) -> Iterator[None]:
    """End the default process group that the block has formed and left, so that the next block may form its own.

    A group that existed before is kept, and so is the group of a process that torchrun, or another launcher, has
    started: it is one of several.

    Args:
        launcher: The launcher, which keeps a reference to the group. Gloo's threads may still hold it, and its
            destructor, which is called with the last reference, would wait for them.
    """
    before = _default_group()
    try:
        yield
    finally:
        left = _default_group()
        if left is not None and left is not before and left.size() == 1:
            launcher.ended_group = left
            sys.modules["torch.distributed"].destroy_process_group()


def _default_group() -> Any:
    """Return torch's default process group; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _is_alone() -> bool:
    group = _default_group()
    return group is None or group.size() == 1


def post_mortem_here(title: str, error: BaseException, task: Task) -> PostMortem | None:
    """Return the record of a run in this process that `error` has just ended, while the user's names still exist.

    None if that is the planned end at a limit of its own, or where the record cannot be made: a post-mortem must not
    change how the run ends.

    Args:
        title: The run in words.
    """
    if isinstance(error, RunStopped):
        return None
    try:
        snapshot = StackSnapshot(scenes(error.__traceback__, *task.left_behind()))
        return PostMortem.of_this_process(title, error, snapshot)
    except Exception:  # raised by code of the user's own classes
        return None


def _say(line: str) -> None:
    ConsoleScreen().write("stderr", f"{line}\n")


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# Python 3.14's default cannot send what cannot be pickled: https://github.com/python/cpython/pull/125750.
@contextmanager
def _workers_are_forked() -> Iterator[None]:
    """Let loaders fork their workers, as they do in ranks, where Python would start them by a fork server.

    From Python 3.14 on that is Linux's default, and its workers cannot import a class that the notebook defines. A
    method that the user chose is kept, and so is macOS's default, where a forked process can do little.
    """
    default: Any = multiprocessing.context._default_context
    pythons, actual = default._default_context, default._actual_context
    if pythons.get_start_method() != "forkserver" or actual not in (None, pythons):
        yield
        return
    forked = default.get_context("fork")
    default._default_context, default._actual_context = forked, None
    try:
        yield
    finally:
        default._default_context = pythons
        if default._actual_context in (None, forked):  # else the cell chose one
            default._actual_context = actual


@contextmanager
def _heard(listeners: Sequence[Listener], steps: Sink, learns_mode: Sink | None) -> Iterator[None]:
    """Feed `listeners` with the reports of this process while the block runs, in the calling thread.

    Args:
        steps: What receives each report first, and may raise.
        learns_mode: What is told how the program trains; None if nothing wants to know.
    """
    rings = Rings()
    telemetry = Telemetry(rings, listeners, _say)
    fd = rings.add()
    ring = RingWriter(fd)
    os.close(fd)

    def unheard(event: Event) -> None:
        """Ignore the event: there is no peer to watch, and no kernel to outlive."""

    reporter = Reporter(ring, gate=steps, watch=unheard, grace=unheard)
    reporter.route(TrainingMode, learns_mode)
    reporter.start()
    own_thread = threading.get_ident()

    def hear(event: Event) -> None:
        reporter(event)
        if threading.get_ident() == own_thread:
            telemetry.tick(time.monotonic())

    try:
        with outlet(hear):
            yield
    finally:
        reporter.close()
        telemetry.read(time.monotonic(), is_last=True)
        rings.close()
        ring.close()


class InlineStop:
    """A sink of step events that raises `RunStopped` when an interrupt stops the run, and the handler of SIGINT.

    As for ranks (`StopAtStep`): the first interrupt lets the program finish its step and stop before the next one; a
    program outside of any step is interrupted after a second, and a step that takes too long is interrupted too. The
    second interrupt acts at once.

    Interrupts act in the user's code alone, the block of `acts`. An interrupt that comes while the run is set up or
    cleaned up is kept until that is done. A program that catches its `KeyboardInterrupt` goes on, as it would without
    this class, and the next interrupt acts at once.

    Only the main thread can be interrupted. A handler that other code has installed, or an ignored SIGINT, is left as
    it is.

    Args:
        notice: A function that shows one line of the project to the user; called by another thread.

    Attributes:
        has_acted: Whether an interrupt was raised in the user's code.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.has_acted = False
        self._notice = notice
        self._thread = threading.get_ident()
        self._count = 0
        self._is_open = False  # the user's code runs
        self._stop: RunStopped | None = None
        self._has_asked = False  # a map was asked to leave before its next call
        self._in_step = False
        self._is_calling = False  # in calls of a map rather than in a step
        self._entered_at = 0.0
        self._last_step_s = 0.0
        self._previous: Any = None
        self._is_over = False
        # Its `put` may be called by a handler that has interrupted another `put`; that of an Event may not.
        self._words: queue.SimpleQueue[bool] = queue.SimpleQueue()  # true for the first interrupt, false for the end

    # --- a sink for the steps of the run ---------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if threading.get_ident() != self._thread:  # an event of a thread that the program has started
            return
        if isinstance(event, StepEntered):
            self._enter(event.step)
        elif isinstance(event, CallEntered):
            self._enter_call(event)
        elif isinstance(event, StepsEnded | CallsEnded):
            self._in_step = self._is_calling = False
            self._entered_at = 0.0

    def _enter(self, step: int) -> None:
        if self._count and not self.has_acted:
            self.has_acted = True
            self._words.put(False)
            self._stop = RunStopped(f"stopped before step {step}")
            raise self._stop
        now = time.monotonic()
        self._last_step_s = now - self._entered_at if self._entered_at else 0.0
        self._in_step, self._entered_at = True, now

    def _enter_call(self, event: CallEntered) -> None:
        now = time.monotonic()
        took_s = now - self._entered_at if self._entered_at else 0.0
        self._last_step_s = max(self._last_step_s, took_s)  # the next call may have more items than the last one
        self._in_step = self._is_calling = True
        self._entered_at = now
        if self._count and not self.has_acted:
            self._has_asked = True
            self._words.put(False)
            event.stop()

    # --- interrupts ------------------------------------------------------------------------------------------------

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Receive interrupts while the block runs.

        Raises:
            KeyboardInterrupt: An interrupt came that did not reach the user's code.
        """
        previous = signal.getsignal(signal.SIGINT)
        is_ours = isinstance(getattr(previous, "__self__", None), InlineStop)  # the handler of a run around this one
        if threading.current_thread() is not threading.main_thread() or not (
            is_ours or previous is signal.default_int_handler
        ):
            yield
            return
        watch = threading.Thread(target=self._see_to_it, name="nbaccel-interrupt", daemon=True)
        self._previous = previous
        signal.signal(signal.SIGINT, self._handle)
        try:
            watch.start()
            yield
        finally:
            self._words.put(False)
            if watch.ident is not None:
                watch.join()
            if signal.getsignal(signal.SIGINT) == self._handle:  # else the user's code has installed another for good
                signal.signal(signal.SIGINT, previous)
            self._is_over = True
        if self._count and not self.has_acted:
            raise KeyboardInterrupt("the run was interrupted")

    @contextmanager
    def acts(self) -> Iterator[None]:
        """Mark the block as the user's code.

        Raises:
            KeyboardInterrupt: An interrupt has stopped it, at a step or anywhere.
        """
        self._is_open = True
        try:
            if self._count:
                self._act()
            yield
        except RunStopped as stop:
            if stop is not self._stop and not self._has_asked:
                raise
            self.has_acted = True
            interrupt = KeyboardInterrupt(f"the run was interrupted, and {stop}")
            raise interrupt.with_traceback(stop.__traceback__) from None
        finally:
            self._is_open = False

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_over:  # the user's code had saved this handler and restored it later
            signal.signal(number, self._previous)
            signal.raise_signal(number)
            return
        self._count += 1
        if not self._is_open:
            return
        if self._count > 1:
            self._act()
        self._words.put(True)

    def _act(self) -> None:
        self.has_acted = True
        self._words.put(False)
        raise KeyboardInterrupt("the run was interrupted")

    # --- in a thread of its own ------------------------------------------------------------------------------------

    def _see_to_it(self) -> None:
        """Wait for the first interrupt; repeat it for a program that does not reach a step in time."""
        if not self._words.get():
            return
        began, is_told = time.monotonic(), False
        while (now := time.monotonic()) < began + finishing_s(self._in_step, self._last_step_s):
            if self._in_step and not is_told and now > began + NOTICE_AFTER_S:
                is_told = True
                self._notice(FINISHING_CALLS if self._is_calling else FINISHING)
            try:
                self._words.get(timeout=TICK_S)
                return
            except queue.Empty:
                continue
        if signal.getsignal(signal.SIGINT) == self._handle:  # else the present handler has not received the first one
            signal.pthread_kill(self._thread, signal.SIGINT)


@contextmanager
def until_its_end(view: RunView) -> Iterator[None]:
    """Mark the block as the run that `view` shows, in this process."""
    try:
        yield
    except BaseException as error:
        word = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        if isinstance(error, SystemExit) and not error.code:
            word = "done"
        view.end(word, view.elapsed_s, error)
        raise
    view.end("done", view.elapsed_s)
