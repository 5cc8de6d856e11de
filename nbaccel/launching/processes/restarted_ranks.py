"""RestartRanks: a rank that died is started again while the others work. Runs in the kernel.

It is loaded for runs of ranks that do not need each other (`RunEnd.restarts_ranks`), such as maps.
"""

from __future__ import annotations

import contextlib
import os

from nbaccel.base.events import CallTimedOut, Event, ItemsDone
from nbaccel.launching.ipc.reports import signal_name
from nbaccel.launching.processes.rank_losses import EndOfRun
from nbaccel.launching.processes.workers import WorkerGroup

__all__ = ["MOST_RESTARTS", "RestartRanks"]


MOST_RESTARTS = 3
"""Number of times that one rank is started again without having finished an item in between.

A process that dies of one item gets it three times; then the item counts as failed, and the fourth process goes on.
"""


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

    def line(self, rank: int, exit_code: int) -> str:
        how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return f"rank {rank} {how}; started again, its items go to the others meanwhile"

    @property
    def why_not(self) -> str:
        return self._why_not
