"""Intervals: readers of intervals and durations as people write them. Pure; used in kernel and ranks.

``"500steps"`` or 500 counts optimizer steps; ``"10min"``, ``"90s"``, ``"11h30m"`` is time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta

__all__ = ["Period", "Steps", "parse_interval", "parse_seconds", "said", "seconds_of"]

_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
_STEPS = re.compile(r"(\d+)\s*(?:steps?)?", re.IGNORECASE)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(sec|s|min|m|h)(?![a-z])\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Steps:
    """An interval of `count` optimizer steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Period:
    """An interval in seconds."""

    seconds: float


def parse_interval(text: str | int) -> Steps | Period:
    """Read an interval: steps or a time.

    Raises:
        ValueError: it is neither.

    >>> parse_interval("500steps"), parse_interval("1h30min")
    (Steps(count=500), Period(seconds=5400.0))
    """
    steps = _STEPS.fullmatch(str(text).strip())
    if steps and int(steps[1]) > 0:
        return Steps(int(steps[1]))
    try:
        return Period(parse_seconds(str(text)))
    except ValueError:
        raise ValueError(f"an interval is steps or a time, as in 500, 500steps, 10min, 1h30m; got {text!r}") from None


def parse_seconds(text: str) -> float:
    """Read a time in seconds; units are h, min or m, s, one after the other.

    Raises:
        ValueError: it is none, or is 0.

    >>> parse_seconds("11h30m")
    41400.0
    """
    parts = _PART.findall(text)
    seconds = float(sum(float(number) * _UNITS_S[unit.lower()] for number, unit in parts))
    if not seconds or _PART.sub("", text).strip():
        raise ValueError(f"a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got {text!r}")
    return seconds


def seconds_of(time: str | float | timedelta) -> float:
    """Return a time that a program gives: in words, as a number of seconds, or as a timedelta.

    Raises:
        ValueError: it is none, or not above 0.

    >>> seconds_of("1h30m"), seconds_of(90), seconds_of(timedelta(minutes=1))
    (5400.0, 90.0, 60.0)
    """
    if isinstance(time, str):
        return parse_seconds(time)
    seconds = time.total_seconds() if isinstance(time, timedelta) else float(time)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time is above 0 and finite, as in 11h30m, 90s or 5400 (seconds); got {time!r}")
    return seconds


def said(seconds: float) -> str:
    """Format a time with its units.

    >>> said(41400.0), said(90), said(0.5)
    ('11 h 30 min', '1 min 30 s', '0.5 s')
    """
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(hours, "h"), (minutes, "min"), (round(rest, 1), "s")]
    return " ".join(f"{number:g} {unit}" for number, unit in parts if number) or "0 s"
