"""Witness: records the progress of a run, for the case that it runs out of memory.

Runs in the kernel; one for each attempt.

It receives the ranks' events, which outlive the ranks. `restarting` decides what follows from them.
"""

from __future__ import annotations

from nbaccel.events import Checkpoint, Event, LoopEntered, Memory, Opened, OutOfMemory, Progress

__all__ = ["Witness"]


class Witness:
    """Records the loop of each rank, its latest memory use, and the files that the run has written.

    opened: trackers and checkpoints, by the names that a person would look for.
    checkpoint: the newest complete one; empty for none.  announces_epochs: the program can begin in a later epoch.
    smallest: samples of the micro-batch that `forward_backward` could not make smaller; 0 if that never happened.
    """

    def __init__(self) -> None:
        self._loops: dict[int, LoopEntered] = {}
        self._memory: dict[int, Memory] = {}
        self.opened: list[str] = []
        self.checkpoint = ""
        self.announces_epochs = False
        self.smallest = 0

    def feed(self, rank: int, at: float, event: Event) -> None:
        if isinstance(event, LoopEntered):
            self._loops[rank] = event
        elif isinstance(event, Memory):
            self._memory[rank] = event
        elif isinstance(event, Opened):
            self._note(event.what)
        elif isinstance(event, Checkpoint):
            self.checkpoint = event.path
            self._note(f"checkpoint {event.path}")
        elif isinstance(event, Progress):
            self.announces_epochs |= event.epochs is not None
        elif isinstance(event, OutOfMemory) and not event.next_size:
            self.smallest = max(self.smallest, event.micro_batch_size)  # 0 from an optimizer

    def tick(self, now: float) -> None:
        """Do nothing."""

    def _note(self, what: str) -> None:
        if what not in self.opened:
            self.opened.append(what)

    def loop(self, rank: int) -> LoopEntered | None:
        """Return the loop over a prepared loader that `rank` was in, or ended last; None before the first one."""
        return self._loops.get(rank)

    def memory(self, rank: int) -> Memory | None:
        """Return the latest memory report of `rank`."""
        return self._memory.get(rank)
