"""Seconds of a round, from the few rounds that a dry run has had. Used in the kernel; pure arithmetic.

The first rounds have warm-up in them (memory is reserved, kernels are chosen, Python adapts its code), which is counted
once. On a CPU the second round of a first epoch still takes twice as long as that of the second epoch. Where batches
differ in size, a round takes a + b * size seconds, and the rounds of the whole run are at the mean size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RoundSeconds", "Sample", "round_seconds"]

_SPREAD_OF_ONE = 0.08
"""Relative standard error of a mean that a single round gave. It is assumed: a single value shows no spread."""

_MANY = 24
"""Samples of which the first half is warm-up: measured, rounds of an LSTM on two CPU ranks took 6.7 to 7.2 ms in the
first third of a second epoch, 6.0 in the next one, 5.2 and 4.6 in the last, and 4.9 in the epochs that followed."""

_NEEDED = 1.2
"""Ratio to the largest other size, from which on the first batch of a pass says how time grows."""

_DIFFERENT = 1.02
"""Ratio of the largest size to the smallest, from which on sizes differ."""

_REFINEMENTS = 4
"""Fits of a line, each of which takes its weights from the one before."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round, or one batch.

    Args:
        own_s: The seconds of the round without inner loops.
        waited_s: For its batch.
        size: The size of its batch; None unknown.
        is_first_of_pass: Its batch was the first of a pass, for which loaders take longer.
    """

    own_s: float
    waited_s: float = 0.0
    size: float | None = None
    is_first_of_pass: bool = False


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """The mean of a round of the whole run.

    Args:
        mean_s: With waiting.
        error_s: Standard error of the mean.
        warm_up_s: By which the first rounds took longer.
        least, most: Ratios of the fastest and of the slowest round to the mean.
    """

    mean_s: float
    error_s: float = 0.0
    warm_up_s: float = 0.0
    least: float = 1.0
    most: float = 1.0


def round_seconds(
    samples: Sequence[Sample], mean_size: float | None, workers: int = 0, made_s: float | None = None, warming: int = 1
) -> RoundSeconds:
    """Return the seconds of a round from `samples`, in the order in which they came.

    Args:
        mean_size: The mean size of all batches of the loader; None unknown.
        workers: Processes that make batches meanwhile.
        made_s: Seconds in which one worker makes a batch; None unknown.
        warming: The number of first samples that have warm-up; the first half of many; they count like others if fewer
            than two would be left.
    """
    if not samples:
        return RoundSeconds(0.0)
    if len(samples) >= _MANY:
        warming = max(warming, len(samples) // 2)
    warming = warming if len(samples) - warming >= 2 else 0
    later = samples[warming:]
    line = _line([(each.size, each.own_s) for each in _typical(later)], mean_size)
    own_s = line.at(mean_size)
    warm_up_s = max(0.0, sum(each.own_s - line.at(each.size) for each in samples[:warming]))
    waiting = [each for each in later if not each.is_first_of_pass] or later
    if workers and made_s is not None:
        waited_s, error_s = max(0.0, made_s / workers - own_s), 0.0
    elif workers:
        waited_s, error_s = sum(each.waited_s for each in waiting) / len(waiting), 0.0
    else:
        waits = _line([(each.size, each.waited_s) for each in waiting], mean_size)
        waited_s = waits.at(mean_size)
        error_s = waited_s * waits.relative_error
    mean_s = own_s + waited_s
    ratios = [(each.own_s + each.waited_s) / expected for each in later if (expected := line.at(each.size) + waited_s)]
    return RoundSeconds(
        mean_s,
        math.hypot(own_s * line.relative_error, error_s),
        warm_up_s,
        min([1.0, *ratios]) / (1 + _SPREAD_OF_ONE),
        max([1.0, *ratios]) * (1 + _SPREAD_OF_ONE),
    )


def _typical(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Leave out first rounds of a pass, which find cold caches: one of three in a dry run, and one of many otherwise.

    The longest batch comes first, so they stay where they alone show how long such a round takes.
    """
    others = [each for each in samples if not each.is_first_of_pass]
    largest = max((each.size or 0 for each in others), default=0)
    is_needed = any((each.size or 0) > _NEEDED * largest for each in samples)
    return samples if len(others) < 2 or is_needed else others


@dataclass(frozen=True, slots=True)
class _Line:
    """base + slope * size.

    Args:
        mean: The mean of all samples, for an unknown size.
    """

    base: float
    slope: float
    mean: float
    relative_error: float

    def at(self, size: float | None) -> float:
        return self.mean if size is None or not self.slope else self.base + self.slope * size


def _line(points: list[tuple[Any, float]], mean_size: float | None) -> _Line:
    """Fit a line, by relative distances, since noise is relative. Without different sizes it is level."""
    seconds = [each for _, each in points]
    mean = sum(seconds) / len(seconds)
    level = _Line(mean, 0.0, mean, _relative_error(seconds, [mean] * len(seconds), 1))
    sizes = [size for size, _ in points if size is not None]
    differ = len(sizes) == len(points) and min(sizes) > 0 and max(sizes) > _DIFFERENT * min(sizes)
    if not differ or mean_size is None or min(seconds) <= 0:
        return level
    base, slope = 0.0, mean / (sum(sizes) / len(sizes))
    for _ in range(_REFINEMENTS):
        if slope <= 0:
            return level
        # weighed by what is expected: by what was measured, the rounds that happened to be fast would count more
        weights = [1 / (base + slope * size) ** 2 for size in sizes]
        base, slope = _weighted_line(sizes, seconds, weights)
    if slope <= 0:
        return level
    fitted = [base + slope * size for size in sizes]
    return _Line(base, slope, mean, _relative_error(seconds, fitted, 2))


def _weighted_line(sizes: Sequence[float], seconds: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return base and slope of least squares; the base is not negative, as no round takes less than nothing."""
    total = sum(weights)
    size_0 = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_0 = sum(w * each for w, each in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (size - size_0) ** 2 for w, size in zip(weights, sizes, strict=True))
    slope = sum(w * (size - size_0) * each for w, size, each in zip(weights, sizes, seconds, strict=True)) / spread
    base = mean_0 - slope * size_0
    if base >= 0:
        return base, slope
    squares = sum(w * size * size for w, size in zip(weights, sizes, strict=True))
    return 0.0, sum(w * size * each for w, size, each in zip(weights, sizes, seconds, strict=True)) / squares


def _relative_error(seconds: Sequence[float], fitted: Sequence[float], parameters: int) -> float:
    """Return the relative standard error of a fit."""
    free = len(seconds) - parameters
    if not any(seconds):
        return 0.0
    if free <= 0:
        return _SPREAD_OF_ONE / math.sqrt(len(seconds))
    squares = sum(((each - fit) / fit) ** 2 for each, fit in zip(seconds, fitted, strict=True) if fit > 0)
    return math.sqrt(squares / free / len(seconds))
