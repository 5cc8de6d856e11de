"""Signals in a rank: they act in the user's code, and leave the runtime around it alone. Used by the runtime.

Python's and the kernel's handlers came with the fork; `restore_signals` takes them away.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["ChildHandler", "Interrupt", "restore_signals"]


class Interrupt:
    """SIGINT becomes KeyboardInterrupt in the user's code, and nothing after it.

    One that comes before is kept for the user's code: the kernel sends it once, and setting up can take seconds.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_come = False
        self._error: Exception | None = None
        signal.signal(signal.SIGINT, self._handle)

    def raise_in_main(self, error: Exception) -> None:
        """Raise `error` in the user's code, where the main thread may be waiting. Called by other threads.

        Nothing happens while the user's code does not run, or has a handler of its own for SIGINT.
        """
        if self.is_open and signal.getsignal(signal.SIGINT) == self._handle:
            self._error = error
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, number: int, frame: Any) -> None:
        error, self._error = self._error, None
        if error is not None:
            if self.is_open:
                raise error
            return
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


class ChildHandler:
    """What the user's code has SIGCHLD do is done in the user's code alone.

    torch's handler raises, for a DataLoader's worker that died, wherever the program is: a report would be cut off.
    """

    def __init__(self) -> None:
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> None:
        signal.signal(signal.SIGCHLD, self._handler)

    def __exit__(self, *exc: object) -> None:
        self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL  # None: it came from C


def restore_signals() -> None:
    """A signal does what it does to any program."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
