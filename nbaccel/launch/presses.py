"""Presses: counts requests to end a run, from the keyboard, a button or another thread. Runs in the kernel.

The first press asks the ranks to finish their step, the second ends them; the group decides that. This module only
counts presses, and wakes the loop that waits for them.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Presses", "uninterrupted"]


class Presses:
    """Counts presses; readable by a selector when there are new ones.

    count: the number of presses that have been read.

    >>> presses = Presses()
    >>> presses.press(); presses.press()
    >>> presses.read()
    >>> presses.count
    2
    >>> presses.close(); presses.press()
    """

    def __init__(self) -> None:
        self.count = 0
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        return self._here.fileno()

    @property
    def fds(self) -> tuple[int, int]:
        return self._here.fileno(), self._there.fileno()

    def press(self) -> None:
        """Count one more press; from any thread or a signal handler; without effect after `close`."""
        with contextlib.suppress(OSError):
            self._there.send(b"!")

    def read(self) -> None:
        """Add the presses that have come to `count`."""
        with contextlib.suppress(BlockingIOError):
            self.count += len(self._here.recv(64))

    def close(self) -> None:
        self._here.close()
        self._there.close()

    @contextlib.contextmanager
    def of_the_keyboard(self) -> Iterator[None]:
        """Turn SIGINT into a press instead of an exception. Only the main thread can be interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def press(number: int, frame: Any) -> None:
            self.press()

        previous = signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)  # None: it came from C


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt back until the block is done. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    presses: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)  # None: it came from C
    if presses:
        raise KeyboardInterrupt
