"""Record of one rank of a running group, and the handle on the rank's process. Used in the kernel.

A `WorkerProcess` is a process that the kernel started, directly or through the zygote.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.reaper import segments_of
from nbaccel.launching.ipc.reports import RankReport

__all__ = [
    "WorkerHandle",
    "WorkerProcess",
]


class WorkerHandle:
    """One rank of a group: its process, its channel and its reports so far.

    Args:
        stays: It waits for another task after this one, instead of being released.
    """

    def __init__(self, rank: int, process: WorkerProcess, channel: Channel, stays: bool = False) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.report: RankReport | None = None
        self.displays: dict[int, dict[str, Any]] = {}  # rich messages whose mark has not been read yet
        self.has_ended = False  # its process is over, though perhaps not reaped yet
        self.was_killed = False  # by the kernel
        self.was_interrupted = False  # by the kernel, with SIGINT
        self.is_looked_at = False  # it failed, and has not reported yet: the user is in its debugger
        self.lost = ""  # why the machine that it ran on was given up
        self.released_at: float | None = None
        self.segments: set[str] = set()  # NCCL's shared memory, which it can no longer free itself
        self.stays = stays
        self.takes_part = True

    def begin(self, takes_part: bool) -> None:
        """Begin another run of a persistent rank."""
        self.takes_part = takes_part
        self.report = None if takes_part else RankReport.of_an_outsider()
        self.was_interrupted = False
        self.is_looked_at = False

    @property
    def is_through(self) -> bool:
        """Return whether the run expects nothing more of the rank."""
        return self.has_ended or (self.stays and self.report is not None)

    @property
    def is_working(self) -> bool:
        """Return whether the rank is still busy with the user's code, as far as the kernel knows."""
        return self.report is None and not self.has_ended

    def interrupt(self) -> None:
        if self.is_working and not self.was_interrupted:
            self.was_interrupted = True
            self.process.signal(signal.SIGINT)

    def terminate(self) -> None:
        self._ends_by(signal.SIGTERM)

    def kill(self) -> None:
        self._ends_by(signal.SIGKILL)

    def _ends_by(self, number: signal.Signals) -> None:
        self.was_killed = True
        self.segments |= segments_of([self.process.pid])
        self.process.signal(number)

    def release(self, now: float) -> None:
        """Let a rank that has reported end."""
        if self.released_at is None and not self.has_ended and not self.stays:
            self.released_at = now
            with contextlib.suppress(OSError):
                self.channel.send({"op": "exit"})


class WorkerProcess:
    """A started rank: its pid, a pidfd that becomes readable when it ends, and a function for its exit code.

    Args:
        collect: Blocks until the exit code is known; called once, after the pidfd has become readable.
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

    def queued_s(self) -> float:
        """Return the seconds that its main thread has waited for a processor; 0 where the system does not count them.

        Source: the second number of /proc/PID/schedstat, https://docs.kernel.org/scheduler/sched-stats.html.
        """
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

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
