"""Compare speed and losses of the trials of a cell with those of the unchanged cell. Values; used in the kernel."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.features.speed.changes import SpeedChange

__all__ = ["SpeedComparison", "SpeedRow", "SpeedTrial"]

LEAST_GAIN = 1.05
"""Ratio to the cell as it is from which on a change is worth a line, where the noise is less."""

FEWEST_TRIALS = 2
"""Trials after which a change may be said to be faster."""

_FEWEST_STEPS = 6
"""Steps that are measured at least of a training that ends before the wanted time; warm-up comes before them."""

_ALIKE, _ALIKE_KERNELS, _ALIKE_ROUNDED = 1e-3, 5e-3, 2e-2
"""Relative differences of first losses: of the same arithmetic in another order, of other kernels for convolutions,
which GPUs compute with 10 bits (TF32) by default, and of other precisions."""

_SKIPS = "fp16"
"""Precision whose scaler leaves out first steps until the scale is right: only the loss before them is the same."""

_GROWTH = 5.0
"""How much larger differences of later losses may be: steps of an optimizer make more of them."""


@dataclass(frozen=True, slots=True)
class SpeedTrial:
    """One trial.

    Args:
        steps_per_s: 0 if nothing was measured.
        samples_per_step: The samples per step of all ranks; 0 where they are not known.
        losses: The first ones of each rank.
        seconds: That it took, with the start of its ranks.
        why_not: Why nothing was measured, in a few words.
        facts: The facts of the parts of the training.
        at: Its number among all trials of the search.
    """

    steps_per_s: float = 0.0
    samples_per_step: float = 0.0
    losses: Sequence[Sequence[float]] = ()
    seconds: float = 0.0
    why_not: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: int = 0

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], seconds: float) -> SpeedTrial:
        """Return the trial whose ranks have left these records, one of each rank."""
        first = records[0]
        measured_s = max(float(each["seconds"]) for each in records)
        is_enough = first["steps"] >= (_FEWEST_STEPS if first["is_whole"] else 1) and measured_s > 0
        why_not = "" if is_enough else "too few steps"
        if first.get("compiles_nothing"):
            why_not = "torch compiles nothing of it"
        return cls(
            0.0 if why_not else first["steps"] / measured_s,
            sum(float(each["samples_per_step"]) for each in records),
            [each["losses"] for each in records],
            seconds,
            why_not,
            first,
        )


@dataclass(eq=False)
class SpeedRow:
    """One change with its trials.

    Args:
        family: Changes of one family exclude each other.
        note: Why there are no trials, if there is a reason.
    """

    change: SpeedChange
    family: str = ""
    trials: list[SpeedTrial] = field(default_factory=list)
    note: str = ""

    @property
    def speeds(self) -> list[float]:
        """Return the steps per second of its trials."""
        return [each.steps_per_s for each in self.trials if each.steps_per_s]

    @property
    def why_not(self) -> str:
        """Return why it has no speed; empty if it has one."""
        if self.speeds:
            return ""
        return next((each.why_not for each in self.trials if each.why_not), self.note or "not tried")


class SpeedComparison:
    """Rows beside the row of the cell as it is.

    Attributes:
        base: The cell as it is.
        rows: Of changes, in the order in which they were tried.
    """

    def __init__(self) -> None:
        self.base = SpeedRow(SpeedChange())
        self.rows: list[SpeedRow] = []

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what is known of the training, from the first trial."""
        return self.base.trials[0].facts if self.base.trials else {}

    @property
    def has_samples(self) -> bool:
        return bool(self._samples(self.base))

    def _samples(self, row: SpeedRow) -> float:
        """Return the samples of a step: where a row does not know them, those of the cell as it is."""
        known = [each.samples_per_step for each in row.trials if each.samples_per_step]
        if known:
            return statistics.median(known)
        return 0.0 if row is self.base else self._samples(self.base) * row.change.batch_factor

    def rates(self, row: SpeedRow) -> list[float]:
        """Return samples per second, or steps per second where samples are not known, of each trial."""
        samples = self._samples(row) or 1.0
        return [speed * samples for speed in row.speeds]

    def rate(self, row: SpeedRow) -> float:
        rates = self.rates(row)
        return statistics.median(rates) if rates else 0.0

    def ratios(self, row: SpeedRow) -> list[float]:
        """Return the speed of each trial, as a multiple of that of the cell as it is just before and after it."""
        samples, own = self._samples(row) or 1.0, self._samples(self.base) or 1.0
        return [
            each.steps_per_s * samples / (self._base_around(each.at) * own) for each in row.trials if each.steps_per_s
        ]

    def _base_around(self, at: int) -> float:
        """Return the steps per second of the cell as it is about the trial of that number."""
        known = [each for each in self.base.trials if each.steps_per_s]
        before = [each for each in known if each.at <= at][-1:]
        after = [each for each in known if each.at > at][:1]
        return statistics.fmean(each.steps_per_s for each in before + after)

    def ratio(self, row: SpeedRow) -> float:
        ratios = self.ratios(row)
        return statistics.median(ratios) if ratios else 0.0

    @property
    def noise(self) -> float:
        """Return how far one trial of the cell as it is usually is from the next one, relative."""
        speeds = self.base.speeds
        steps = [max(a, b) / min(a, b) - 1 for a, b in itertools.pairwise(speeds)]
        return statistics.median(steps) if steps else 0.0

    def is_faster(self, row: SpeedRow) -> bool:
        """Return whether a row is faster than the cell as it is, by more than the noise, in each of several trials."""
        ratios = self.ratios(row)
        is_sure = len(ratios) >= FEWEST_TRIALS and min(ratios) > 1.0
        return is_sure and statistics.median(ratios) >= max(LEAST_GAIN, 1.0 + self.noise)

    def is_undecided(self, row: SpeedRow) -> bool:
        """Return whether a row had too little time: it was not tried, or may be faster."""
        return self.is_open(row) or not (row.trials or row.note)

    def is_open(self, row: SpeedRow) -> bool:
        """Return whether a row may be faster, and more trials would tell."""
        return bool(row.speeds) and self.ratio(row) >= LEAST_GAIN and not self.is_faster(row)

    def changes_training(self, row: SpeedRow) -> str:
        """Return how a row changes what is trained, in words: by the samples of a step; empty if it does not."""
        if row.change.batch_factor > 1:
            return f"{row.change.batch_factor} times fewer steps"
        own, samples = self._samples(self.base), self._samples(row)
        is_other = bool(row.change.ranks and row.speeds and own) and not math.isclose(samples, own, rel_tol=0.02)
        return f"{samples:g} samples in a step, not {own:g}" if is_other else ""

    def numbers(self, row: SpeedRow) -> str:
        """Return whether the losses of a row are those of the cell as it is: "yes", "no", or why that is not known."""
        change = row.change
        if changed := self.changes_training(row):
            return f"changes the training: {changed}"
        tolerance = _ALIKE_KERNELS if change.channels_last else _ALIKE
        tolerance = _ALIKE_ROUNDED if change.precision or change.compiles else tolerance
        first = 1 if change.precision == _SKIPS else None
        if not _losses_of(self.base) or not row.speeds:
            return "" if not row.speeds else "no losses seen"
        own = _losses_of(self.base)
        if not all(_are_alike(each, own[0], _ALIKE) for each in own[1:]):
            return "differ from run to run"
        if all(_are_alike(each, own[0][:first], tolerance) for each in _losses_of(row)):
            return "yes"
        if change.loader and self.facts.get("draws"):
            return "random data"
        draws_otherwise = change.compiles or change.channels_last or change.precision
        if draws_otherwise and (self.facts.get("model") or {}).get("is_random"):
            return "random layers"
        return "no"

    def may_be_advised(self, row: SpeedRow) -> bool:
        return self.is_faster(row) and self.numbers(row) != "no"


def _losses_of(row: SpeedRow) -> list[list[float]]:
    """Return the losses of each trial, averaged over the ranks: which rank gets which samples of a batch may differ."""
    found = [each.losses for each in row.trials if each.losses and all(each.losses)]
    return [[statistics.fmean(each) for each in zip(*losses, strict=False)] for losses in found]


def _are_alike(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        allowed = tolerance * (_GROWTH if number else 1.0)
        if not math.isclose(a, b, rel_tol=allowed, abs_tol=0.1 * allowed):
            return False
    return True
