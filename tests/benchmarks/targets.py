"""Targets: what a contender should hold, as a ratio to raw, as a time, or as a time over raw's. Pure.

One that is missed falls short only beyond the noise: the third quartile of raw against itself in the same run. Where
it takes more turns to tell than were taken, nothing falls short.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FALLS_SHORT", "AtMost", "OverRaw", "Ratio", "Target", "ratios"]

FALLS_SHORT = "FALLS SHORT"

Times = Sequence[float]


class Target(Protocol):
    """Times are in the row's unit, one per turn; those of one index were taken in the same turn."""

    def verdict(self, unit: str, mine: Times, raw: Times, again: Times, enough: int = 1) -> str:
        """What to print beside a cell.

        again: raw's times when it was measured once more, NaN where that failed.  enough: turns that it takes to tell.
        """


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median ratio to raw."""

    value: float

    def verdict(self, unit: str, mine: Times, raw: Times, again: Times, enough: int = 1) -> str:
        noise = _third_quartile(ratios(again, raw))
        return _verdict(f"{self.value:g}", _median(ratios(mine, raw)), self.value, noise, len(mine) >= enough)


@dataclass(frozen=True, slots=True)
class AtMost:
    """The median time."""

    value: float

    def verdict(self, unit: str, mine: Times, raw: Times, again: Times, enough: int = 1) -> str:
        noise = self.value * _third_quartile(ratios(again, raw))
        return _verdict(f"{self.value:g} {unit}", _median(mine), self.value, noise, len(mine) >= enough)


@dataclass(frozen=True, slots=True)
class OverRaw:
    """The median of what it took longer than raw in the same turn."""

    value: float

    def verdict(self, unit: str, mine: Times, raw: Times, again: Times, enough: int = 1) -> str:
        noise = _third_quartile(_differences(again, raw))
        more = _median(_differences(mine, raw))
        return _verdict(f"{self.value:g} {unit} over raw", more, self.value, noise, len(mine) >= enough)


def ratios(mine: Times, raw: Times) -> list[float]:
    """Turn by turn; a clock too coarse for a turn gives none for it."""
    return [one / other for one, other in zip(mine, raw, strict=True) if other > 0]


def _differences(mine: Times, raw: Times) -> list[float]:
    return [one - other for one, other in zip(mine, raw, strict=True)]


def _median(values: Times) -> float:
    return statistics.median(values) if values else float("nan")


def _third_quartile(values: Times) -> float:
    """NaN excuses nothing."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=4, method="inclusive")[2]


def _verdict(target: str, found: float, value: float, noise: float, is_enough: bool) -> str:
    if found <= value:
        return f"holds {target}"
    if found <= noise:
        return f"over {target}, within the noise"
    return f"{FALLS_SHORT} of {target}" if is_enough else f"over {target}, too few turns to tell"
