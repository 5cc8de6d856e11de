"""Alarm: lets a time limit end the packing of the user's objects, before ranks have begun. Runs in the kernel."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nbaccel.launching.processes.interaction import Pollable

__all__ = ["endable"]

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
