"""DeathWatch: a thread of every rank that ends the rank's session when the kernel is gone. Runs in ranks.

It waits on the kernel's pidfd. A pipe would not do: its other end can be held open by other children of the kernel,
so that end-of-file never comes. The parent-death signal would not do either: it fires when the forking *thread*
ends, and it spares the rank's own children.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from nbaccel.launch.guardian import kill_session

__all__ = ["start_death_watch"]


def start_death_watch(kernel_pidfd: int, channel_fd: int) -> None:
    """Kill this process, its session and its descendants when the kernel has died or let go of this rank.

    channel_fd: the rank's end of its channel; the kernel keeps the other end open as long as it knows of the rank.
    """
    own_channel = os.dup(channel_fd)  # the number may be closed and used again

    def wait() -> None:
        poll = select.poll()
        poll.register(kernel_pidfd, select.POLLIN)
        poll.register(own_channel, 0)  # hang-up is always reported
        poll.poll()
        me = os.getpid()
        kill_session(me, spare=me)
        os.kill(me, signal.SIGKILL)

    threading.Thread(target=wait, name="nbaccel-death-watch", daemon=True).start()
