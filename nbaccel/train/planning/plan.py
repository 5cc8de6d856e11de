"""Plan: chooses the next batch size to try, and when to stop. Pure arithmetic; runs nothing, knows no memory or ranks.

Memory of a training step is a straight line over the batch size, ``used(n) = a + b * n``, with steps and a little
noise on top. Two tiny trials show the line, the third jumps close to the size where it reaches 1, and each further
one corrects. A size that was not run is never the result.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "Trial"]

FIRST = 2
"""Not 1: batch norm over features refuses a single sample, and kernels for vectors are not those for matrices."""

TOLERANCE = 0.03
"""A size this close to the largest one is good enough: a smaller gain is not worth a trial."""

HEADROOM = 0.985
"""Share of the predicted maximum to aim at: allocators round up, and a trial that fails teaches less."""

LESSON = 0.97
"""Factor of the headroom for each trial that did not fit although the line predicted it."""

LONGEST_JUMP = 16
"""A line through two points is used up to this many times the largest size that was run."""

BLIND_JUMP = 4
"""The jump where there is no line: memory cannot be measured, or has not grown with the batch yet."""

EXACT_BELOW = 64
"""Size below which one sample is more than 1.5 % of the batch: a trial may be spent on the very last sample."""

DOUBT = 0.9
"""That trial is left out unless the line predicts at least this fraction of one more sample."""

MULTIPLE = 8
"""Sizes that suit matrix units (NVIDIA's guide to mixed precision); used where they cost less than `TOLERANCE`."""

MOST_TRIALS = 12


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one trial.

    size: samples in its batch.
    fits: it ran, within the limit.
    used: the peak of what grows with the batch, as a share of the limit; None where it could not be measured.
    """

    size: int
    fits: bool
    used: float | None = None


class Plan:
    """Search for the largest size that fits, at most `cap`.

    Its state is `trials`. Everything else follows from them, so ranks that note the same trials choose the same sizes.

    >>> plan = Plan(cap=4096)
    >>> while (size := plan.next_size()) is not None:
    ...     plan.note(Trial(size, fits=size <= 1000, used=0.2 + 0.0008 * size))
    >>> plan.best, [trial.size for trial in plan.trials]
    (984, [2, 3, 48, 768, 984])
    """

    def __init__(self, cap: int) -> None:
        """cap: the largest useful size, at least 1."""
        if cap < 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        self.cap = cap
        self.trials: list[Trial] = []
        self._last: int | None = None  # the size of the last trial, once it is chosen

    @property
    def best(self) -> int:
        """The largest size that fitted; 0 before one has."""
        return max((trial.size for trial in self.trials if trial.fits), default=0)

    @property
    def too_large(self) -> int:
        """The smallest size that is known not to fit, or not to be wanted."""
        return min((trial.size for trial in self.trials if not trial.fits), default=self.cap + 1)

    def note(self, trial: Trial) -> None:
        """Add the result of the trial of `next_size`."""
        self.trials.append(trial)

    def next_size(self) -> int | None:
        """Return the next size to try, between `best` and `too_large` exclusive; None when the search is over."""
        best, too_large = self.best, self.too_large
        if too_large - best <= 1 or self._last is not None or len(self.trials) >= MOST_TRIALS:
            return None
        if not best:
            return too_large // 2 if self._has_failed else min(FIRST, self.cap)
        if not self._has_failed and best == FIRST:
            return best + 1
        reach = self._reach()
        if self._is_close_enough(reach):
            self._last = self._last_one(reach)
            return self._last
        return min(max(self._guess(reach), best + 1), too_large - 1)

    @property
    def _has_failed(self) -> bool:
        return any(not trial.fits for trial in self.trials)

    def _reach(self) -> float | None:
        """Return where the line through the measurements reaches the limit; None where there is no rising line."""
        points = sorted((trial.size, trial.used) for trial in self.trials if trial.fits and trial.used is not None)
        if len(points) < 2:
            return None
        size, used = points[-1]
        # The nearest point that is far enough away for noise not to tilt the line, otherwise the farthest one.
        apart = [point for point in points[:-1] if point[0] <= 0.8 * size]
        other_size, other_used = apart[-1] if apart else points[0]
        slope = (used - other_used) / (size - other_size)
        return size + (1 - used) / slope if slope > 0 else None

    def _is_close_enough(self, reach: float | None) -> bool:
        enough = self.best * (1 + TOLERANCE)
        if self._has_failed and self.too_large - 1 <= enough:
            return True
        return reach is not None and min(int(reach), self.cap) <= enough

    def _last_one(self, reach: float | None) -> int | None:
        """Return one trial for the last sample or two, where those are worth it and the line does not decide."""
        best = self.best
        if best >= EXACT_BELOW or (reach is not None and reach < best + DOUBT):
            return None
        return min(max(best + 1, int(reach or 0)), self.too_large - 1)

    def _guess(self, reach: float | None) -> int:
        best, too_large = self.best, self.too_large
        if not self._has_failed:
            if reach is None:
                return best * BLIND_JUMP
            return _rounded(min(HEADROOM * reach, best * LONGEST_JUMP, self.cap), at_least=(1 - TOLERANCE) * reach)
        failures = sum(not trial.fits for trial in self.trials)
        middle = (best + too_large) // 2
        # A line that was wrong is used again only when a later trial has given it a new point.
        if reach is None or not self.trials[-1].fits or not best < reach < too_large:
            return middle
        aim = max(HEADROOM * LESSON**failures * reach, (best + reach) / 2)
        return _rounded(aim, at_least=(1 - TOLERANCE) * reach)


def _rounded(size: float, at_least: float) -> int:
    """Return `size` as a whole number: a multiple of eight, unless that would be less than `at_least`."""
    rounded = int(size) // MULTIPLE * MULTIPLE
    return rounded if rounded >= at_least else int(size)
