"""DeathWatch: a thread of every rank that ends the rank's session when the kernel is gone. Runs in ranks.

It waits on the kernel's pidfd. A pipe would not be enough: other children of the kernel can hold its other end open, so
that end-of-file never comes. The parent-death signal would not be enough either: it fires when the forking *thread*
ends, and it does not reach the rank's own children.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbaccel.launch.guardian import kill_session

__all__ = ["DeathWatch"]

_DYING_MS = 1000
"""Milliseconds to wait for the pidfd: a killed process closes its sockets before its pidfd reports its end."""


class DeathWatch:
    """Kills this process, its session and its descendants when the kernel has died or released this rank.

    channel_fd: the rank's end of its channel; the kernel keeps the other end open as long as it needs the rank.
    when_kernel_died: called by the thread before that, if the kernel is dead; it returns when the rank may be killed.
    """

    def __init__(self, kernel_pidfd: int, channel_fd: int) -> None:
        self.when_kernel_died: Callable[[], None] = _nothing
        self._is_at_rest = False
        self._kernel_pidfd = kernel_pidfd
        self._channel_fd = os.dup(channel_fd)  # the number may be closed and used again

    def start(self) -> None:
        threading.Thread(target=self._run, name="nbaccel-death-watch", daemon=True).start()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Mark the rank as idle, with nothing to save: it ends at once if the kernel dies."""
        self._is_at_rest = True
        try:
            yield
        finally:
            self._is_at_rest = False

    def _run(self) -> None:
        kernel = select.poll()
        kernel.register(self._kernel_pidfd, select.POLLIN)
        both = select.poll()
        both.register(self._kernel_pidfd, select.POLLIN)
        both.register(self._channel_fd, 0)  # hang-up is always reported
        both.poll()
        act = _nothing if self._is_at_rest else self.when_kernel_died
        if kernel.poll(_DYING_MS if act is not _nothing else 0):
            act()
        me = os.getpid()
        kill_session(me, spare=me)
        os.kill(me, signal.SIGKILL)


def _nothing() -> None:
    """Do nothing: a rank that does not save itself has nothing to do."""
