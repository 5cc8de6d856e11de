"""Signals in a rank: they act in the user's code, and not in the runtime around it. Used by the runtime.

The fork inherited the handlers of Python and of the kernel; `restore_signals` removes them.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["ChildHandler", "Interrupt", "restore_signals"]


class Interrupt:
    """Turns SIGINT into KeyboardInterrupt in the user's code, and ignores it after that.

    A SIGINT that comes before is kept for the user's code: the kernel sends it once, and setting up can take seconds.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_come = False
        self._error: Exception | None = None
        signal.signal(signal.SIGINT, self._handle)

    def raise_in_main(self, error: Exception) -> None:
        """Raise `error` in the user's code, where the main thread may be waiting. Called by other threads.

        Nothing happens while the user's code does not run, or if it has its own handler for SIGINT.
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
        """Forget an interrupt: one that came for a task has nothing to do with the next."""
        self._has_come = False

    def __enter__(self) -> None:
        self.is_open = not self._has_come
        if self._has_come:
            raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        self.is_open = False


class ChildHandler:
    """Runs the user's handler of SIGCHLD in the user's code alone.

    torch's handler raises, for a DataLoader's worker that died, at any point of the program: a report would be cut off.
    """

    def __init__(self) -> None:
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> None:
        signal.signal(signal.SIGCHLD, self._handler)

    def __exit__(self, *exc: object) -> None:
        self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL  # None: set by C code


def restore_signals() -> None:
    """Restore the default actions of signals."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
