"""Endable: what the kernel does with the user's objects before a run can be ended, and a time limit must end, too.

Runs in the kernel. Packing runs code of the user's (``__reduce__``, ``__getstate__``), which may take long or for ever.
The ranks have not begun then, so an interrupt ends it as it ends any cell. Here the time limit becomes an interrupt,
and so does the wish of those that watch the run from beside: one in the background is packed in a thread of its own.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nbaccel.launch.beside import Beside

__all__ = ["endable"]

_AGAIN_S = 0.2
"""Until the next interrupt, where the user's code has caught the one before."""


@contextmanager
def endable(seconds: float | None, beside: Sequence[Beside] = ()) -> Iterator[None]:
    """Interrupt the block where it takes longer than `seconds` (None for no limit), or when one of `beside` wants it.

    In the main thread by SIGINT, which ends a `sleep` as well; in another one before its next line of Python.

    Raises:
        TimeoutError: it took longer; with the text of the KeyboardInterrupt that the block ended with.

    >>> with endable(60):
    ...     sum(range(10))
    45
    """
    if seconds is None and not beside:
        yield
        return
    alarm = _Alarm(seconds)
    for each in beside:
        each.begins(alarm.press)
    try:
        alarm.start()
        yield
    except KeyboardInterrupt as interrupt:
        if not alarm.has_rung:
            raise
        where = f": {interrupt}" if str(interrupt) else ""
        raise TimeoutError(f"the time limit of {seconds:g} s was over before a rank had its work{where}") from None
    finally:
        while not alarm.is_off:
            try:
                alarm.stop()
            except KeyboardInterrupt:  # between two lines of ours; when it rings, the next time is 0.2 s away
                alarm.note_interrupt()
        if alarm.is_interrupted:  # the user's, who must not have to press twice
            raise KeyboardInterrupt


class _Alarm:
    """Interrupts the thread that made it, again and again, from `seconds` or a press on until the block is left.

    has_rung: the seconds were over first.  is_off: it does not ring any more.
    is_interrupted: somebody else has interrupted this thread while the block was being left.
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
        """An interrupt that is on its way comes to nothing: the handler looks, and a thread's is caught here.

        It is not taken back: CPython up to 3.12 would keep looking for it, in every thread and for ever, and one that
        is being profiled or debugged would not get on at all.
        """
        self._is_over.set()
        self._is_awake.set()
        with self._lock:
            pass  # nothing is sent from here on
        if not self._is_main:
            with suppress(KeyboardInterrupt):
                for _ in range(100):  # it comes when a loop goes round
                    pass
        with suppress(RuntimeError):  # it was not started
            self._thread.join()
        if self._is_main:
            with suppress(TypeError):  # it came from C
                signal.signal(signal.SIGINT, self._previous)
        self.is_off = True

    def press(self) -> None:
        """From any thread; once the block is left it does nothing."""
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
        """Keep in mind an interrupt that comes while the block is left, unless it may be one of this alarm's own."""
        self.is_interrupted = self.is_interrupted or not self._has_sent
