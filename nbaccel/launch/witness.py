"""Witness: what a run was doing, for the case that memory runs out in it. Runs in the kernel; one for each attempt.

It hears the ranks' events, which outlive the ranks. What follows from them is `restarting`'s business.
"""

from __future__ import annotations

from nbaccel.events import Checkpoint, Event, LoopEntered, Memory, Opened, OutOfMemory, Progress

__all__ = ["Witness"]


class Witness:
    """Keeps the loop each rank is in, what it held at last, and what the run has written.

    opened: trackers and checkpoints, as a person would look for them.
    checkpoint: the newest complete one; empty for none.  announces_epochs: the program can begin in a later epoch.
    smallest: samples of a micro-batch that `forward_backward` had no smaller one for; 0 where it never came to that.
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
        """Nothing to do in between."""

    def _note(self, what: str) -> None:
        if what not in self.opened:
            self.opened.append(what)

    def loop(self, rank: int) -> LoopEntered | None:
        """The loop over a prepared loader that `rank` was in, or had ended last; None before the first one."""
        return self._loops.get(rank)

    def memory(self, rank: int) -> Memory | None:
        """What `rank` held when it was last looked at."""
        return self._memory.get(rank)
