"""Series: one quantity over the steps of a run, for every rank, in bounded memory. Pure.

Values are kept exactly until a rank has more than `capacity` of them. Then each two neighbours become one bucket that
holds their number, mean, smallest and largest value, and so on. A spike is never lost, and memory does not grow with
the number of steps. All ranks have buckets of the same width, so that a mean over ranks combines the same steps. It
draws nothing.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import truediv

__all__ = [
    "Line",
    "Series",
    "are_equal",
]

_NO_BUCKET = -(1 << 62)
"""Key that belongs to no bucket; it is below that of any step."""


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one curve, one for each bucket, oldest first.

    Args:
        step: The first step of the bucket.
        mean, low, high: Those of its finite values; equal if it holds one value.
    """

    step: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.step)


def are_equal(lines: Iterable[Line]) -> bool:
    """Return whether all `lines` are the same curve, for example if every rank logs a gathered value.

    Example:
        >>> are_equal([]), are_equal([Line((0,), (1.0,), (1.0,), (1.0,)), Line()])
        (True, False)
    """
    first, *others = list(lines) or [Line()]
    return all(line == first for line in others)


_Columns = tuple["array[int]", "array[int]", "array[float]", "array[float]", "array[float]"]
_Row = tuple[int, int, float, float, float]
"""First step, number of values, their sum, the smallest, the largest."""


def _empty_columns() -> _Columns:
    return array("q"), array("q"), array("d"), array("d"), array("d")


class _Track:
    """The buckets of one rank: closed ones in columns, the newest in plain attributes, because it is written most.

    Attributes:
        lowest, highest: Those of all closed buckets; frames ask for them too often to search the columns.
    """

    __slots__ = ("_columns", "count", "high", "highest", "key", "low", "lowest", "step", "total")

    def __init__(self) -> None:
        self._columns = _empty_columns()
        self.key = _NO_BUCKET
        self.step = self.count = 0
        self.total = self.low = self.high = 0.0
        self.lowest, self.highest = math.inf, -math.inf

    def __len__(self) -> int:
        return len(self._columns[0]) + (self.key != _NO_BUCKET)

    def open(self, key: int, step: int, value: float) -> None:
        self.close()
        self.key, self.step, self.count = key, step, 1
        self.total = self.low = self.high = value

    def close(self) -> None:
        if self.key != _NO_BUCKET:
            self._append((self.step, self.count, self.total, self.low, self.high))
            self.key = _NO_BUCKET

    def _append(self, row: _Row) -> None:
        steps, counts, totals, lows, highs = self._columns
        steps.append(row[0])
        counts.append(row[1])
        totals.append(row[2])
        lows.append(row[3])
        highs.append(row[4])
        self._widen(row[3], row[4])

    def _widen(self, low: float, high: float) -> None:
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)

    def span(self) -> tuple[int, int]:
        """Return the first steps of the oldest and of the newest bucket."""
        steps = self._columns[0]
        return (steps[0] if steps else self.step), (steps[-1] if self.key == _NO_BUCKET else self.step)

    def extremes(self) -> tuple[float, float]:
        """Return the smallest and the largest value so far; there must be at least one."""
        if self.key == _NO_BUCKET:
            return self.lowest, self.highest
        return min(self.lowest, self.low), max(self.highest, self.high)

    def insert(self, shift: int, step: int, value: float) -> None:
        """Insert a value that is older than the newest bucket: into the bucket of its step, or into a new one."""
        steps, counts, totals, lows, highs = self._columns
        self._widen(value, value)
        key = step >> shift
        at = bisect_left(steps, key << shift)
        if at < len(steps) and steps[at] >> shift == key:
            steps[at] = min(steps[at], step)
            counts[at] += 1
            totals[at] += value
            lows[at] = min(lows[at], value)
            highs[at] = max(highs[at], value)
            return
        steps.insert(at, step)
        counts.insert(at, 1)
        totals.insert(at, value)
        lows.insert(at, value)
        highs.insert(at, value)

    def merge(self, shift: int) -> None:
        """Merge buckets that fall into one bucket of ``2 ** shift`` steps."""
        rows = list(self.rows())
        self._columns = _empty_columns()
        self.key = _NO_BUCKET
        for step, count, total, low, high in rows:
            if step >> shift == self.key:
                self.count += count
                self.total += total
                self.low = min(self.low, low)
                self.high = max(self.high, high)
            else:
                self.close()
                self.key = step >> shift
                self.step, self.count, self.total, self.low, self.high = step, count, total, low, high

    def coarser(self, shift: int) -> _Track:
        """Return a copy in buckets of ``2 ** shift`` steps.

        It uses slices: a frame has no time to read every bucket.
        """
        steps, counts, totals, lows, highs = self._columns
        if self.key != _NO_BUCKET:
            steps, counts = steps + array("q", [self.step]), counts + array("q", [self.count])
            totals, lows, highs = (
                column + array("d", [value])
                for column, value in ((totals, self.total), (lows, self.low), (highs, self.high))
            )
        copy, at = _Track(), 0
        while at < len(steps):
            end = bisect_left(steps, ((steps[at] >> shift) + 1) << shift, at)
            part = slice(at, end)
            copy._append((steps[at], sum(counts[part]), sum(totals[part]), min(lows[part]), max(highs[part])))
            at = end
        return copy

    def rows(self) -> Iterable[_Row]:
        yield from zip(*self._columns, strict=True)
        if self.key != _NO_BUCKET:
            yield self.step, self.count, self.total, self.low, self.high


class Series:
    """A quantity that ranks report step by step.

    Args:
        capacity: Number of buckets that a rank may have; beyond it they are merged.

    Attributes:
        last, newest: By rank, the latest value, finite or not, and its step.
        not_finite: By rank, the first step with a value that was not finite.

    Example:
        >>> loss = Series(capacity=4)
        >>> for step in range(8):
        ...     loss.add(0, step, 9.0 if step == 5 else 1.0)
        >>> loss.line(0)
        Line(step=(0, 2, 4, 6), mean=(1.0, 1.0, 5.0, 1.0), low=(1.0, 1.0, 1.0, 1.0), high=(1.0, 1.0, 9.0, 1.0))
    """

    __slots__ = ("_shift", "_tracks", "capacity", "last", "newest", "not_finite")

    def __init__(self, capacity: int = 512) -> None:
        self.capacity = capacity
        self.last: dict[int, float] = {}
        self.newest: dict[int, int] = {}
        self.not_finite: dict[int, int] = {}
        self._tracks: dict[int, _Track] = {}
        self._shift = 0

    def add(self, rank: int, step: int, value: float) -> None:
        """Add one value of `rank` at `step`, usually not before the step of its last one."""
        self.last[rank] = value
        self.newest[rank] = step
        if value - value != 0:  # infinite or no number
            self.not_finite.setdefault(rank, step)
            return
        track = self._tracks.get(rank)
        if track is None:
            track = self._tracks[rank] = _Track()
        key = step >> self._shift
        if key == track.key:
            track.count += 1
            track.total += value
            if value < track.low:
                track.low = value
            elif value > track.high:
                track.high = value
            if step < track.step:
                track.step = step
        elif key > track.key:
            track.open(key, step, value)
            if len(track) > self.capacity:
                self._halve()
        else:
            track.insert(self._shift, step, value)
            if len(track) > self.capacity:
                self._halve()

    def _halve(self) -> None:
        while self.longest > self.capacity:
            self._shift += 1
            for track in self._tracks.values():
                track.merge(self._shift)

    def shrink(self, capacity: int) -> None:
        """Reduce the number of buckets to `capacity`."""
        self.capacity = capacity
        if self._tracks:
            self._halve()

    def coarser(self, most: int) -> Series:
        """Return the present curves with at most `most` buckets for each rank; later values do not change them.

        Example:
            >>> loss = Series()
            >>> for step in range(8):
            ...     loss.add(0, step, float(step))
            >>> loss.coarser(3).line(0).mean
            (1.5, 5.5)
        """
        copy = Series(most)
        copy.last, copy.newest, copy.not_finite = dict(self.last), dict(self.newest), dict(self.not_finite)
        copy._shift = self._shift
        if self.longest > most:
            spans = [track.span() for track in self._tracks.values()]
            first, last = min(first for first, _ in spans), max(last for _, last in spans)
            while (last >> copy._shift) - (first >> copy._shift) >= most:
                copy._shift += 1
        copy._tracks = {rank: track.coarser(copy._shift) for rank, track in self._tracks.items()}
        return copy

    @classmethod
    def of(cls, line: Line, latest: float, newest: int) -> Series:
        """Return a series whose only rank, 0, has the curve `line`.

        Args:
            latest, newest: Its latest value, and the step of that.

        Example:
            >>> Series.of(Line((0, 2), (1.0, 0.5), (1.0, 0.5), (1.0, 0.5)), 0.5, 2).mean().mean
            (1.0, 0.5)
        """
        series, track = cls(max(1, len(line))), _Track()
        for step, mean, low, high in zip(line.step, line.mean, line.low, line.high, strict=True):
            track._append((step, 1, mean, low, high))
        series.last[0], series.newest[0] = latest, newest
        if line:
            series._tracks[0] = track
        if not math.isfinite(latest):
            series.not_finite[0] = newest
        return series

    @property
    def longest(self) -> int:
        return max(map(len, self._tracks.values()), default=0)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have reported, in order."""
        return sorted(self.last)

    @property
    def buckets(self) -> int:
        """Return the number of buckets of all ranks together."""
        return sum(map(len, self._tracks.values()))

    def line(self, rank: int) -> Line:
        """Return the curve of one rank."""
        track = self._tracks.get(rank)
        rows = [] if track is None else [(s, total / n, low, high) for s, n, total, low, high in track.rows()]
        return Line(*map(tuple, zip(*rows, strict=True))) if rows else Line()

    def mean(self) -> Line:
        """Return the mean over ranks, at the buckets that all of them have; at those of any rank if they share none.

        `low` and `high` are the smallest and the largest value of any rank.
        """
        if len(self._tracks) == 1:
            return self.line(next(iter(self._tracks)))
        buckets: dict[int, list[_Row]] = {}
        for track in self._tracks.values():
            for row in track.rows():
                buckets.setdefault(row[0] >> self._shift, []).append(row)
        shared = {key: rows for key, rows in buckets.items() if len(rows) == len(self._tracks)} or buckets
        points = [_mean_of(shared[key]) for key in sorted(shared)]
        return Line(*map(tuple, zip(*points, strict=True))) if points else Line()

    @property
    def latest(self) -> float:
        """Return the mean of the latest values of all ranks; NaN before the first, and if one is not finite."""
        values = self.last.values()
        return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else math.nan

    @property
    def lowest(self) -> float:
        """Return the smallest finite value of any rank so far; NaN if there is none."""
        return min((track.extremes()[0] for track in self._tracks.values()), default=math.nan)

    @property
    def highest(self) -> float:
        """Return the largest finite value of any rank so far; NaN if there is none."""
        return max((track.extremes()[1] for track in self._tracks.values()), default=math.nan)


def _mean_of(rows: list[_Row]) -> tuple[int, float, float, float]:
    steps, counts, totals, lows, highs = zip(*rows, strict=True)
    return min(steps), math.fsum(map(truediv, totals, counts)) / len(rows), min(lows), max(highs)
