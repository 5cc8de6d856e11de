"""What follows the death of a rank: the end of the run, or a new process for this rank alone. Runs in the kernel.

A rank dies when its process ends without a report: by a signal, by the system's out-of-memory killer, or by an exit in
the middle of its work. In a training its peers wait for it in the next collective, so the run ends (`EndOfRun`). In a
run of ranks that do not need each other (`RunEnd.restarts_ranks`) the rank is started again while the others work
(`RestartRanks`); the supervisor asks these objects, and acts. A rank that raises an exception has not died.
"""

from __future__ import annotations

import contextlib
import os

from nbaccel.base.events import CallTimedOut, Event, ItemsDone
from nbaccel.launching.ipc.reports import signal_name
from nbaccel.launching.processes.workers import WorkerGroup

__all__ = [
    "MOST_RESTARTS",
    "EndOfRun",
    "RestartRanks",
    "restart_line",
]

MOST_RESTARTS = 3
"""Number of times that one rank is started again without having finished an item in between.

A process that dies of one item gets it three times; then the item counts as failed, and the fourth process goes on.
"""


class EndOfRun:
    """Ends the run at the first death; the base class of `RestartRanks`."""

    restarts = False
    """True if some deaths do not end the run."""

    def feed(self, rank: int, at: float, event: Event) -> None:
        """Ignore the reports of the ranks."""

    def tick(self, now: float) -> None:
        """Do nothing."""

    def allows_restart(self, rank: int) -> bool:
        """Return whether `rank`, whose process is dead and has reported nothing more, is started again."""
        return False

    @property
    def why_not(self) -> str:
        """Return why the latest rank was not started again, as a sentence; empty if that needs no explanation."""
        return ""


class RestartRanks(EndOfRun):
    """Starts a rank that died again, at most three times without progress in between, unless ranks have met.

    Progress is an `ItemsDone` of the rank's present process that counts at least one item, or word of it that a time
    limit on calls has ended the process before, which isolates the item that hangs. It is a listener of the run: the
    supervisor has it fed with all records of the dead process before it asks.

    Ranks that have formed a process group cannot lose one of them: a new process could not enter the group, and the
    others would wait for it. The file in which they meet shows it. A rank announces itself there before it looks at
    the mark on the page, and the kernel sets the mark before it looks at the file: one of the two notices the other.
    """

    restarts = True

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._page = worker_group.page
        self._store_path = worker_group.store_path
        self._restarts: dict[int, int] = {}
        self._why_not = ""

    def feed(self, rank: int, at: float, event: Event) -> None:
        """Note the progress of a rank."""
        if isinstance(event, CallTimedOut):
            self._restarts.pop(rank, None)
        if isinstance(event, ItemsDone) and event.done + event.failed > 0:
            self._restarts.pop(rank, None)

    def allows_restart(self, rank: int) -> bool:
        self._page.has_lost_a_rank = True
        if self._page.world_size == 1:
            with contextlib.suppress(FileNotFoundError):  # it has met nobody but itself
                os.unlink(self._store_path)
        if os.path.exists(self._store_path):
            self._why_not = (
                "Its ranks have formed a process group, so none of them can be started again alone: leave collectives "
                "out, among them prepare and main_process_first."
            )
            return False
        count = self._restarts.get(rank, 0)
        if count >= MOST_RESTARTS:
            self._why_not = f"It was started again {count} times, and finished no item in between."
            return False
        self._restarts[rank] = count + 1
        return True

    @property
    def why_not(self) -> str:
        return self._why_not


def restart_line(rank: int, exit_code: int) -> str:
    """Return the line about a rank that is started again.

    Example:
        >>> restart_line(1, -9)
        'rank 1 was killed by SIGKILL; started again, its items go to the others meanwhile'
    """
    how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return f"rank {rank} {how}; started again, its items go to the others meanwhile"
