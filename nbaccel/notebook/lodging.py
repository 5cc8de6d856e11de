"""Lodging: the persistent ranks that run one cell. Runs in the kernel; the ranks themselves are `Residents`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from nbaccel.launch.outcome import Outcome
from nbaccel.launch.residents import Residents
from nbaccel.launch.spec import LaunchSpec
from nbaccel.launch.verdict import ranks_in_words
from nbaccel.launch.watching import Watching

__all__ = ["Lodging", "clock", "number_of_ranks"]


@dataclass(frozen=True, slots=True)
class Lodging:
    """The persistent ranks of one cell: all of them, or some. It runs a spec as a `Launcher` would.

    title: the cell in words.  outsiders: ranks that take no part.
    """

    residents: Residents
    title: str
    outsiders: Collection[int] = ()

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.residents.spec.world_size) if rank not in self.outsiders]

    def run(self, spec: LaunchSpec, watching: Watching) -> Outcome:
        """Run the spec, see `Residents.run`."""
        return self.residents.run(
            spec.task,
            watching,
            title=self.title,
            outsiders=self.outsiders,
            timeout_s=spec.timeout_s,
            hang_timeout_s=spec.hang_timeout_s,
        )

    def __str__(self) -> str:
        """Return the line that is printed before the run."""
        size = self.residents.spec.world_size
        who = f"{ranks_in_words(self.ranks)} of {size}" if self.outsiders else number_of_ranks(size)
        return f"{who} that {'stays' if len(self.ranks) == 1 else 'stay'} since {clock(self.residents.since)}"


def clock(at: float) -> str:
    """Format a time of `time.time` as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def number_of_ranks(count: int) -> str:
    """Format a number of ranks.

    >>> number_of_ranks(1), number_of_ranks(2)
    ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' * (count > 1)}"
