"""RankProcess: the kernel's handle on one process that it started, directly or through the zygote."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

__all__ = ["RankProcess"]


class RankProcess:
    """A started rank: its pid, a pidfd that becomes readable when it ends, and a function for its exit code.

    collect: blocks until the exit code is known; called once, after the pidfd has become readable.
    """

    def __init__(self, pid: int, pidfd: int, collect: Callable[[], int]) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._collect = collect
        self.exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send a signal to this very process; its number cannot have been reused, since it is not reaped yet."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Return the exit code, negative for a signal, and release the process number.

        The code is 0 if other code has collected it (SIGCHLD is ignored in this process, or a library waits for any
        child): it is lost then, as it is for `subprocess`.
        """
        if self.exit_code is None:
            try:
                self.exit_code = self._collect()
            except ChildProcessError:
                self.exit_code = 0
            os.close(self.pidfd)
        return self.exit_code
