"""Requests of a person or of the system to a run: interrupts, SIGTERM, answers to a debugger. Runs in the kernel.

`Interrupts` only counts them, and wakes the loop that waits for them; `Supervisor._loop` decides what they mean: the
first one asks the ranks to finish their step, the second ends them. It comes from the keyboard, a button,
another thread or a `Pollable`, a task that the kernel's thread checks while it watches a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbaccel.launching.processes.handle import WorkerHandle

__all__ = [
    "DebuggerPrompt",
    "Interrupts",
    "Pollable",
    "stopped_before_termination",
    "uninterrupted",
]


class Interrupts:
    """Counts interrupts; readable by a selector when there are new ones.

    Attributes:
        count: The number of interrupts that have been read.
        raised: An exception that asked for the end of the run, if any.

    Example:
        >>> interrupts = Interrupts()
        >>> interrupts.interrupt(); interrupts.interrupt()
        >>> interrupts.read()
        >>> interrupts.count
        2
        >>> interrupts.close(); interrupts.interrupt()
    """

    def __init__(self) -> None:
        self.count = 0
        self.raised: BaseException | None = None
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        return self._here.fileno()

    @property
    def fds(self) -> tuple[int, int]:
        return self._here.fileno(), self._there.fileno()

    def interrupt(self) -> None:
        """Count one more; from any thread or a signal handler; without effect after `close`."""
        with contextlib.suppress(OSError):
            self._there.send(b"!")

    def read(self) -> None:
        """Add the interrupts that have come to `count`."""
        with contextlib.suppress(BlockingIOError):
            self.count += len(self._here.recv(64))

    def close(self) -> None:
        self._here.close()
        self._there.close()

    def end_by(self, error: BaseException) -> None:
        """Interrupt because of `error`, which belongs to the caller of the run; a second one is raised at once."""
        if self.raised is not None:
            raise error
        self.raised = error
        self.interrupt()

    @contextlib.contextmanager
    def of_the_keyboard(self) -> Iterator[None]:
        """Count SIGINT as an interrupt instead of an exception. Only the main thread can be interrupted.

        Other handlers of the notebook's are called, and what they raise (a time limit by an alarm) ends the run as a
        interrupt does, see `raised`: otherwise it would end the loop that brings back what the ranks have.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: Any) -> None:
            self.interrupt()

        others = _handlers()

        def call(number: int, frame: Any) -> None:
            try:
                others[number](number, frame)
            except BaseException as error:
                self.end_by(error)

        previous = _handle(signal.SIGINT, interrupt)
        try:
            with _replaced(others, call):
                yield
        finally:
            _handle(signal.SIGINT, signal.SIG_DFL if previous is None else previous)  # None: it came from C


_OTHER_SIGNALS = tuple(signal.valid_signals() - {signal.SIGINT, signal.SIGTERM})
_in_c = getattr(signal, "_signal", signal)
"""The functions in C: those of `signal` look for a name of each handler, which takes forty times as long for sixty."""

_handler_of, _handle = _in_c.getsignal, _in_c.signal


def _handlers() -> dict[int, Callable[[int, Any], Any]]:
    """Return the handlers of signals that are Python functions, without those that have another meaning in a run."""
    found = {number: _handler_of(number) for number in _OTHER_SIGNALS}
    return {number: handler for number, handler in found.items() if callable(handler)}


@contextlib.contextmanager
def _replaced(handlers: Mapping[int, Any], by: Callable[[int, Any], None]) -> Iterator[None]:
    """Replace handlers of signals in the block; one that the block sets itself stays."""
    for number in handlers:
        signal.signal(number, by)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is by:
                signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt, and every other signal with a handler, back until the block is done. For the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: Any) -> None:
        came.append(number)

    others = _handlers()
    previous = signal.signal(signal.SIGINT, hold)
    try:
        with _replaced(others, hold):
            yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)  # None: it came from C
    for number in dict.fromkeys(came):
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        others[number](number, sys._getframe())


@contextmanager
def stopped_before_termination(saves_itself: Callable[[], bool]) -> Iterator[None]:
    """Stop a run that saves itself, as by an interrupt, before SIGTERM ends the kernel.

    Runs in the kernel's main thread, the only one that handles signals; in another thread it does nothing.

    Args:
        saves_itself: Called when the signal comes; returns whether the run saves itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _handler_of(signal.SIGTERM)
    has_come = False

    def end(number: int, frame: Any) -> None:
        nonlocal has_come
        if saves_itself() and not has_come:
            has_come = True
            os.kill(os.getpid(), signal.SIGINT)
        else:
            pass_on()

    def pass_on() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        os.kill(os.getpid(), signal.SIGTERM)

    _handle(signal.SIGTERM, end)
    try:
        yield
    finally:
        _handle(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        if has_come:
            pass_on()


class Pollable:
    """Base class of tasks that the kernel's thread checks while it watches a run; it does nothing.

    A subclass says when it is due, and is called then; it must not wait. It can end the run as the user's interrupt
    does.
    """

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `tick` may have something to do; None while only the run's own events matter."""
        return None

    def begins(self, interrupt: Callable[[], None]) -> None:
        """Prepare for the packing of the names that the ranks need; called before it, in runs that pack.

        Args:
            interrupt: A function for any thread that ends the packing, and nothing after it.
        """

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        """Do what is due; called whenever the run's loop is awake, never before the ranks have been started.

        Args:
            interrupt: A function that counts as one interrupt by the user. It may be kept, and called from any thread
                at any time; once the run is over it does nothing.
        """

    def interrupted(self, times: int) -> None:
        """Take note that the run has been asked to end `times` times by now, by anyone."""


_NEWS = (
    "rank {rank} is in the debugger, and the others wait for it: c goes on, q ends the run. Limits of time do not "
    "count this; a collective of the others gives up when its own timeout is over, by default 30 minutes."
)


class DebuggerPrompt:
    """Passes questions of a rank's debugger to the person at the notebook, for one run.

    Runs in the kernel's main thread, and uses the kernel's own `input`, so the person sees what the front end offers
    for it. The ranks wait meanwhile, and so does the loop that watches them: the limits of the run do not count that
    time.

    Args:
        notice: Shows one line of the project to the user.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._has_told = False

    def answer(self, member: WorkerHandle, prompt: str, *, is_open: bool, interrupt: Callable[[], None]) -> float:
        """Ask, and send the answer to the rank; return the seconds that it took.

        Args:
            is_open: The run goes on; otherwise no question is asked, and the rank is told so.
            interrupt: Called when the user interrupts instead of answering.
        """
        began = time.monotonic()
        typed: str | None = None
        if is_open:
            try:
                typed = _typed(f"[rank {member.rank}] {prompt}")
            except (KeyboardInterrupt, EOFError):
                interrupt()
        with contextlib.suppress(OSError):  # a rank that died meanwhile needs no answer
            member.channel.send({"op": "answer", "text": typed, "is_over": not is_open})
        return time.monotonic() - began

    def announce(self, member: WorkerHandle) -> None:
        """Explain once what a debugger means for the run."""
        if not self._has_told:
            self._has_told = True
            self._notice(_NEWS.format(rank=member.rank))


def _typed(prompt: str) -> str:
    """Return the user's input. Meanwhile SIGINT raises again, because nothing else would end this wait."""
    previous = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
