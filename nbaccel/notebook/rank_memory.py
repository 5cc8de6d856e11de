"""The latest memory report of each rank, for `%accelerate memory`. Runs in the kernel."""

from __future__ import annotations

from nbaccel.base.events import Event, Listener, Memory

__all__ = ["RankMemory"]


class RankMemory(Listener):
    """The latest memory report of each rank of the present run, or else of the last one."""

    def __init__(self) -> None:
        self.latest: dict[int, Memory] = {}
        self.cell = ""

    def begin(self, cell: str) -> None:
        """Begin a new run, of `cell`: the ranks of the previous one do not count any more."""
        self.latest = {}
        self.cell = cell

    def feed(self, rank: int, at: float, event: Event) -> None:
        if isinstance(event, Memory):
            self.latest[rank] = event

    def tick(self, now: float) -> None:
        """Do nothing."""
