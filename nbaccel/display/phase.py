"""PhaseRecord: one part of a run with curves of its own, such as a fold, or the whole run. Pure, runs in the kernel."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from nbaccel.base.events import Loss, Progress
from nbaccel.display.course import Bar, Course, Left, StepCount
from nbaccel.display.series import Series

__all__ = [
    "LOSS",
    "PhaseRecord",
]

LOSS = "loss"
_SEEN_APART_S = 0.75
"""Ranks report four times per second, and reports are read twice."""

_RECENT = 1024
"""Number of losses that are kept to recognise a logged one.

It is read up to half a second later, hundreds of steps of a small model.
"""
_NEAREST = 64
"""Number of these that are compared up to rounding, one by one."""


@dataclass(slots=True)
class PhaseRecord:
    """The record of one phase.

    Args:
        name: Given by the user; empty for a run without phases.
        began_s: In seconds since the run began.
        loss: The losses given to `backward`; None before the first.
        metrics: The logged values, by name.
        logs_another_loss: A logged "loss" was not the one that `backward` was given.
        recent: By rank, the latest losses of backward.
        unmatched: By rank, the latest logged "loss" that was none of them.
        waiting: Logged losses that may be the mean of values that some ranks have not reported yet; each with its rank
            and the number of backwards that rank had run.
        courses: The progress of each rank that reported.
        counts: The steps of each.
        bar: The fraction done, by the leader.
        entered: When each rank named this phase, in seconds since the run began.
    """

    name: str = ""
    began_s: float = 0.0
    loss: Series | None = None
    metrics: dict[str, Series] = field(default_factory=dict)
    logs_another_loss: bool = False
    recent: dict[int, _Recent] = field(default_factory=dict)
    unmatched: dict[int, float] = field(default_factory=dict)
    waiting: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    courses: dict[int, Course] = field(default_factory=dict)
    counts: dict[int, StepCount] = field(default_factory=dict)
    bar: Bar = field(default_factory=Bar)
    entered: dict[int, float] = field(default_factory=dict)

    # --- feeding -----------------------------------------------------------------------------------------------

    def take(self, rank: int, at_s: float, event: Progress, began_s: float | None) -> None:
        """Take a report of `rank` about a loop that began at `began_s`, if that is known."""
        course = self.courses.setdefault(rank, Course())
        course.take(at_s, event, began_s)
        self.counts.setdefault(rank, StepCount()).take(event)
        if rank == self.leader:
            self.bar.follow(course)

    def resume(self, rank: int) -> None:
        """Note that `rank` goes on from a checkpoint."""
        if rank in self.counts:
            self.counts[rank].resume()

    def count_loss(self, rank: int, event: Loss) -> None:
        """Record one backward of `rank`."""
        count = self.counts.get(rank)
        if count is None:
            count = self.counts[rank] = StepCount()
        count.take_loss(event)
        recent = self.recent.get(rank)
        if recent is None:
            recent = self.recent[rank] = _Recent()
        recent.add(event.value)
        if rank in self.unmatched and _are_same(self.unmatched[rank], event.value):
            del self.unmatched[rank]

    def compare_logged_loss(self, rank: int, value: float) -> None:
        """Compare `value`, which `rank` logged as "loss", with the losses of backward.

        A value that is logged as a tensor is read some steps later, so its backward may have been reported long before
        it, or be reported after it.
        """
        recent = self.recent.get(rank)
        if recent is None or not recent.has(value):
            self.waiting.append((rank, 0 if recent is None else recent.count, value))

    def _judge_logged_losses(self) -> None:
        """Decide about the losses that waited. Ranks are read one after the other, so call it between two rounds."""
        if not self.waiting:
            return
        heard = min((recent.count for recent in self.recent.values()), default=0)
        means = self._means(heard)
        while self.waiting and (self.waiting[0][1] <= heard or self.logs_another_loss):
            rank, _, value = self.waiting.popleft()
            if _is_among(value, means) or (rank in self.recent and self.recent[rank].has(value)):
                continue
            if rank in self.unmatched and not _is_among(self.unmatched[rank], means):
                self.logs_another_loss = True
            self.unmatched[rank] = value
        for rank in [rank for rank, value in self.unmatched.items() if _is_among(value, means)]:
            del self.unmatched[rank]

    def _means(self, heard: int) -> list[float]:
        """Return the means over ranks of their latest losses, sorted: the values that ``log(average=True)`` reports."""
        if len(self.recent) < 2:
            return []
        first = max(recent.first for recent in self.recent.values())
        columns = [islice(recent, first - recent.first, heard - recent.first) for recent in self.recent.values()]
        return sorted(mean for each in zip(*columns, strict=True) if not math.isnan(mean := sum(each) / len(each)))

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was recorded yet."""
        return not (self.loss or self.metrics or self.courses)

    @property
    def curves(self) -> list[Series]:
        """Return all curves that are kept, shown or not."""
        return [*([] if self.loss is None else [self.loss]), *self.metrics.values()]

    @property
    def series(self) -> dict[str, Series]:
        """Return all curves by name. "loss" is that of every backward, if there is one.

        A logged "loss" that is another number, such as an average over steps or the loss of other data, is listed as
        "logged loss". It is left out if it only repeats the loss of backward, of this rank or as the mean of all, in
        every step or in some.
        """
        if self.loss is None:
            return dict(self.metrics)
        others = dict(self.metrics)
        logged = others.pop(LOSS, None)
        self._judge_logged_losses()
        if logged is not None and (self.logs_another_loss or self.unmatched):
            others = {f"logged {LOSS}": logged, **others}
        return {LOSS: self.loss, **others}

    def thinned(self, points: int) -> PhaseRecord:
        """Return the same phase of a run that is over, with at most `points` points for each curve and rank."""
        curves = {name: series.coarser(points) for name, series in self.series.items()}
        loss = curves.pop(LOSS, None) if self.loss is not None else None
        return replace(self, loss=loss, metrics=curves, recent={}, unmatched={}, waiting=deque(), courses=self.courses)

    @property
    def leader(self) -> int | None:
        """Return the lowest rank that trains, or the lowest of all if none does; it stands for all of them."""
        training = [rank for rank, course in self.courses.items() if course.training is not None]
        return min(training or self.courses, default=None)

    @property
    def _course(self) -> Course | None:
        leader = self.leader
        return None if leader is None else self.courses[leader]

    @property
    def training(self) -> Progress | None:
        """Return the state of the training; while nothing else is known, that of a loop that may turn out to train."""
        course = self._course
        return None if course is None else course.training or course.guess

    @property
    def trainings(self) -> int:
        """Return the number of trainings so far, the present one included."""
        course = self._course
        return 0 if course is None else course.trainings

    @property
    def evaluation(self) -> Progress | None:
        """Return the state of the running evaluation, in the lowest rank that has one."""
        going_on = {rank: course.evaluation for rank, course in self.courses.items() if course.evaluation is not None}
        return going_on[min(going_on)] if going_on else None

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that every rank has reported in this phase."""
        if self.counts:
            return min(count.done for count in self.counts.values())
        return max((max(series.newest.values()) + 1 for series in self.series.values() if series.newest), default=0)

    @property
    def first(self) -> int | None:
        """Return the steps that the program had done before this phase began; None if no rank has reported it."""
        return min((count.first for count in self.counts.values() if count.first is not None), default=None)

    @property
    def steps_per_s(self) -> float | None:
        """Return steps per second of training in its last 15 seconds, without evaluations."""
        course = self._course
        return None if course is None else course.pace.steps_per_s

    @property
    def epoch_s(self) -> float | None:
        """Return the seconds of training that an epoch takes at the present pace; None if that is unknown."""
        course = self._course
        return None if course is None else course.epoch_s

    @property
    def samples_per_s(self) -> float | None:
        """Return the samples per second that all ranks train on together, by the sizes of their loaders' batches."""
        epoch_s = self.epoch_s
        trained = [course.training for course in self.courses.values() if course.training is not None]
        if not epoch_s or not trained:
            return None
        samples = [(training.samples or 0) * (training.batches or 0) for training in trained]
        return sum(samples) / epoch_s if all(samples) else None

    def lag(self, rank: int) -> int:
        """Return the steps by which a rank is ahead of the leader; negative if it is behind.

        Ranks report at different moments: steps that the leader does in between are no lag, within half of their number
        and one step; nor are those of less time than the reports need, which ranks in step with each other show. While
        the pace is unknown the lag is 0: the first reports bring all steps at once, of one rank after the other.
        """
        pace, course, other = self.steps_per_s, self._course, self.courses.get(rank)
        if pace is None or course is None or other is None or course.training is None or other.training is None:
            return 0
        meanwhile = (other.said_at - course.said_at) * pace
        ahead = other.training.step - course.training.step - meanwhile
        return round(ahead) if abs(ahead) > 1 + abs(meanwhile) / 2 and abs(ahead) > pace * _SEEN_APART_S else 0

    @property
    def left(self) -> Left | None:
        """Return the time left; None if it is unknown."""
        course = self._course
        return None if course is None else course.left


class _Recent:
    """The latest losses of one rank.

    Example:
        >>> recent = _Recent()
        >>> recent.add(0.5)
        >>> recent.has(0.5), recent.has(0.5 + 1e-9), recent.has(0.6)
        (True, True, False)
    """

    __slots__ = ("_counts", "_losses", "count")

    def __init__(self) -> None:
        self.count = 0  # number of all that were added
        self._losses: deque[float] = deque()
        self._counts: Counter[float] = Counter()

    @property
    def first(self) -> int:
        """Return the number of the oldest loss that is kept."""
        return self.count - len(self._losses)

    def __iter__(self) -> Iterator[float]:
        return iter(self._losses)

    def add(self, loss: float) -> None:
        self.count += 1
        self._losses.append(loss)
        self._counts[loss] += 1
        if len(self._losses) > _RECENT:
            oldest = self._losses.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def has(self, value: float) -> bool:
        return value in self._counts or any(_are_same(loss, value) for loss in islice(reversed(self._losses), _NEAREST))


def _is_among(value: float, numbers: list[float]) -> bool:
    """Return whether one of the sorted `numbers` is the same.

    Example:
        >>> _is_among(0.5 + 1e-9, [0.25, 0.5]), _is_among(0.4, [0.25, 0.5])
        (True, False)
    """
    at = bisect_left(numbers, value)
    return any(_are_same(value, near) for near in numbers[max(0, at - 1) : at + 1])


def _are_same(one: float, other: float) -> bool:
    """Return whether two numbers are equal in the precision of losses, or both are NaN."""
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
