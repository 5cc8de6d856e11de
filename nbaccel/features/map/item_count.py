"""ItemCount: the items that the ranks of a map have finished, their speed, and the time left. Pure; in the kernel.

Each rank reports the items of its present process (`ItemsDone`); those of processes that died are added to them. Items
that an earlier run has finished count as done, and not for the speed. Items that another notebook finishes in the same
map count for both: ranks see them when they claim, so they are as late as a call is long, and as the other's claims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.events import ItemsDone
from nbaccel.base.quantities import duration, plural, rate
from nbaccel.display.course import Pace

__all__ = [
    "ItemCount",
    "roughly",
]

_MINUTE_S, _HOUR_S = 60, 3600


@dataclass(slots=True)
class _OfRank:
    """Items of one rank: those of its present process, and of those before."""

    present: ItemsDone = field(default_factory=ItemsDone)
    earlier_done: int = 0
    earlier_failed: int = 0

    @property
    def done(self) -> int:
        return self.earlier_done + self.present.done

    @property
    def failed(self) -> int:
        return self.earlier_failed + self.present.failed


class ItemCount:
    """Items of a map.

    Args:
        total: None for a stream, whose length is unknown.
        before: Those that an earlier run has finished.

    Example:
        >>> items = ItemCount(total=100)
        >>> items.take(0, 0.0, ItemsDone(done=0)); items.take(0, 10.0, ItemsDone(done=24, failed=1))
        >>> items.words(), items.times()
        (['25 of 100 items', '25 %', '1 failed'], ['2.5 items/s', 'about 30 s left'])
    """

    def __init__(self, total: int | None = None, before: int = 0) -> None:
        self.total = total
        self.before = before
        self._ranks: dict[int, _OfRank] = {}
        self._paces: dict[int, Pace] = {}
        self._pace = Pace()

    def take(self, rank: int, at_s: float, event: ItemsDone) -> None:
        """Take a report of `rank`."""
        self._of(rank).present = event
        self._paces.setdefault(rank, Pace()).add(at_s, self.finished_by(rank))
        self._pace.add(at_s, self.done)

    def restart(self, rank: int) -> None:
        """Record that the process of `rank` has died: the next one counts from 0."""
        of_rank = self._of(rank)
        of_rank.earlier_done, of_rank.earlier_failed = of_rank.done, of_rank.failed
        of_rank.present = ItemsDone(everywhere=of_rank.present.everywhere)

    def _of(self, rank: int) -> _OfRank:
        return self._ranks.setdefault(rank, _OfRank())

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """Return the items that this run has finished, with or without an answer."""
        return sum(each.done + each.failed for each in self._ranks.values())

    @property
    def done(self) -> int:
        """Return the items that anyone has finished."""
        seen = max((each.present.everywhere for each in self._ranks.values()), default=0)
        done = max(self.before + self.finished, seen)
        return done if self.total is None else min(done, self.total)

    @property
    def failed(self) -> int:
        """Return the items that this run has given up."""
        return sum(each.failed for each in self._ranks.values())

    @property
    def part(self) -> float | None:
        """Return the finished fraction of all items, 0 to 1; None for a stream."""
        if self.total is None:
            return None
        return self.done / self.total if self.total else 1.0

    def finished_by(self, rank: int) -> int:
        of_rank = self._ranks.get(rank, _OfRank())
        return of_rank.done + of_rank.failed

    def failed_of(self, rank: int) -> int:
        return self._ranks.get(rank, _OfRank()).failed

    def per_s(self, rank: int | None = None) -> float | None:
        """Return items per second of a rank, or of everyone, over the last 15 seconds; None before that is known."""
        pace = self._pace if rank is None else self._paces.get(rank)
        return None if pace is None else pace.steps_per_s

    @property
    def left_s(self) -> float | None:
        """Return the seconds that the remaining items take at this speed; None if that is unknown."""
        per_s = self.per_s()
        if self.total is None or per_s is None:
            return None
        return (self.total - self.done) / per_s

    def words(self) -> list[str]:
        """Return the progress in words; items that failed in an earlier run are not counted as failed."""
        if self.total is None:
            words = [plural(self.done, "item")]
        else:
            words = [f"{self.done:,} of {plural(self.total, 'item')}", f"{(self.part or 0) * 100:.0f} %"]
        return [*words, *([f"{self.failed:,} failed"] if self.failed else [])]

    def times(self) -> list[str]:
        """Return the speed and the time left, as far as they are known."""
        words = [] if (per_s := self.per_s()) is None else [rate(per_s, "items")]
        return words if (left_s := self.left_s) is None else [*words, f"about {roughly(left_s)} left"]

    def words_of(self, rank: int) -> list[str]:
        """Return the items of a rank, their speed, and how many failed."""
        words = [plural(self.finished_by(rank), "item")]
        words += [] if (per_s := self.per_s(rank)) is None else [rate(per_s, "items")]
        return [*words, *([f"{failed:,} failed"] if (failed := self.failed_of(rank)) else [])]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "total": self.total,
            "before": self.before,
            "done": self.done,
            "finished": self.finished,
            "failed": self.failed,
            "ranks": {rank: {"done": each.done, "failed": each.failed} for rank, each in sorted(self._ranks.items())},
        }


def roughly(seconds: float) -> str:
    """Format an estimated time.

    Example:
        >>> roughly(12.3), roughly(100), roughly(3725), roughly(90_000)
        ('12 s', '2 min', '1 h 02 min', '25 h')
    """
    if seconds < 1.5 * _MINUTE_S:
        return duration(round(seconds))
    if seconds < _HOUR_S:
        return f"{round(seconds / _MINUTE_S)} min"
    minutes = round(seconds / _MINUTE_S)
    return duration(minutes * _MINUTE_S) if seconds < 10 * _HOUR_S else f"{round(seconds / _HOUR_S)} h"
