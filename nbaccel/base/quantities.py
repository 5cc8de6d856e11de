"""Read and write quantities: durations, intervals, sizes, counts, metrics, plurals. Runs anywhere; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from nbaccel.base.values import frozen

__all__ = [
    "Period",
    "Steps",
    "amount",
    "duration",
    "gigabytes",
    "in_gb",
    "length_or_none",
    "listed",
    "number",
    "number_spans",
    "numbers_in_order",
    "parse_interval",
    "parse_seconds",
    "plural",
    "rate",
    "seconds_of",
    "short_count",
    "span",
    "three_digits",
    "ticks",
    "time_text",
    "with_article",
]

_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
_STEPS = r"(\d+)\s*(?:steps?)?"
_PART = r"(\d+(?:\.\d+)?)\s*(sec|s|min|m|h)(?![a-z])\s*"


@frozen
class Steps:
    """An interval of `count` optimizer steps."""

    count: int


@frozen
class Period:
    """An interval in seconds."""

    seconds: float


def parse_interval(text: str | int) -> Steps | Period:
    """Read an interval: steps or a time.

    Raises:
        ValueError: It is neither.

    Example:
        >>> parse_interval("500steps"), parse_interval("1h30min")
        (Steps(count=500), Period(seconds=5400.0))
    """
    steps = re.fullmatch(_STEPS, str(text).strip(), re.IGNORECASE)
    if steps and int(steps[1]) > 0:
        return Steps(int(steps[1]))
    try:
        return Period(parse_seconds(str(text)))
    except ValueError:
        raise ValueError(f"an interval is steps or a time, as in 500, 500steps, 10min, 1h30m; got {text!r}") from None


def parse_seconds(text: str) -> float:
    """Read a time in seconds; units are h, min or m, s, one after the other.

    Raises:
        ValueError: It is none, or is 0.

    Example:
        >>> parse_seconds("11h30m")
        41400.0
    """
    parts = re.findall(_PART, text, re.IGNORECASE)
    seconds = float(sum(float(number) * _UNITS_S[unit.lower()] for number, unit in parts))
    if not seconds or re.sub(_PART, "", text, flags=re.IGNORECASE).strip():
        raise ValueError(f"a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got {text!r}")
    return seconds


def seconds_of(time: str | float | timedelta) -> float:
    """Return a time that a program gives: in words, as a number of seconds, or as a timedelta.

    Raises:
        ValueError: It is none, or not above 0.

    Example:
        >>> seconds_of("1h30m"), seconds_of(90), seconds_of(timedelta(minutes=1))
        (5400.0, 90.0, 60.0)
    """
    if isinstance(time, str):
        return parse_seconds(time)
    seconds = time.total_seconds() if isinstance(time, timedelta) else float(time)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time is above 0 and finite, as in 11h30m, 90s or 5400 (seconds); got {time!r}")
    return seconds


def time_text(seconds: float) -> str:
    """Return a time as `parse_seconds` reads it, exactly: as the value of a flag.

    Example:
        >>> time_text(41400.0), time_text(90), time_text(0.5), time_text(119.96)
        ('11h30min', '1min30s', '0.5s', '2min')
    """
    minutes, rest = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (round(rest, 1), "s")]
    return "".join(f"{number:g}{unit}" for number, unit in parts if number) or "0s"


_DIGITS = 4


def number(value: float) -> str:
    """Format a number with four significant digits, so that columns keep their width, or an integer with all digits.

    Example:
        >>> number(0.41234), number(0.5), number(12345.6), number(3.2e-05), number(2.0), number(float("nan"))
        ('0.4123', '0.5000', '12,346', '3.2e-05', '2', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    if abs(value) >= 10 ** (_DIGITS - 1):
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:#.{_DIGITS}g}" if abs(value) >= 0.01 else f"{value:.{_DIGITS}g}"


def ticks(low: float, high: float) -> tuple[str, str]:
    """Format the ends of an axis: at most eight characters each, unless they would then be equal.

    Example:
        >>> ticks(0.0069321, 2.30259), ticks(1.00001, 1.00002), ticks(-12345.6, 3.2e-05)
        (('0.00693', '2.3'), ('1.00001', '1.00002'), ('-12,346', '3.2e-05'))
    """
    short = _tick(low), _tick(high)
    return short if low == high or short[0] != short[1] else (f"{low:.8g}", f"{high:.8g}")


def _tick(value: float) -> str:
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 1e3 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a time for a person to read; every line and picture that shows one uses this function.

    A whole number of seconds, such as a limit, is exact, and has no digit after the point.

    Example:
        >>> duration(0.42), duration(12.61), duration(12), duration(125), duration(3725), duration(41400)
        ('0.4 s', '12.6 s', '12 s', '2 min 05 s', '1 h 02 min', '11 h 30 min')
    """
    if seconds < 59.95:
        is_whole = math.isclose(seconds, round(seconds), abs_tol=1e-6)
        return f"{max(seconds, 0.0):.{0 if is_whole else 1}f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02} min" if rest else f"{hours} h"


def gigabytes(nbytes: float) -> str:
    """Format a number of bytes in gigabytes; below one with two digits after the point.

    Example:
        >>> gigabytes(9_100_000_000), gigabytes(14_700_000_000), gigabytes(120_000_000), gigabytes(0)
        ('9.1 GB', '14.7 GB', '0.12 GB', '0 GB')
    """
    size = nbytes / 1e9
    return f"{size:.1f} GB" if size >= 1 else f"{size:.2f} GB" if size else "0 GB"


def in_gb(nbytes: float) -> str:
    """Format a number of bytes in gigabytes with one digit after the point, however few they are.

    Example:
        >>> in_gb(9_100_000_000), in_gb(120_000_000), in_gb(0)
        ('9.1 GB', '0.1 GB', '0.0 GB')
    """
    return f"{nbytes / 1e9:.1f} GB"


def span(sizes: Sequence[int]) -> str:
    """Format the smallest and the largest of `sizes`, in bytes.

    Example:
        >>> span([11_200_000_000, 11_200_000_000]), span([9_000_000_000, 11_200_000_000])
        ('11.2 GB', '9.0 to 11.2 GB')
    """
    low, high = gigabytes(min(sizes)), gigabytes(max(sizes))
    return high if low == high else f"{low.removesuffix(' GB')} to {high}"


def rate(per_s: float, noun: str) -> str:
    """Format a rate per second.

    Example:
        >>> rate(12.44, "steps"), rate(0.05, "steps"), rate(1840.2, "samples")
        ('12.4 steps/s', '0.05 steps/s', '1,840 samples/s')
    """
    if per_s >= 100:
        return f"{per_s:,.0f} {noun}/s"
    return f"{per_s:.1f} {noun}/s" if per_s >= 1 else f"{per_s:.2g} {noun}/s"


def amount(nbytes: int) -> str:
    """Format a number of bytes with one digit after the point; `three_digits` counts from the first digit instead.

    Example:
        >>> amount(44_700_000), amount(2_100), amount(12)
        ('44.7 MB', '2 kB', '12 bytes')
    """
    for unit, scale, digits in (("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 0)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} bytes"


def three_digits(nbytes: int) -> str:
    """Format a number of bytes with three significant digits: for amounts that are compared with each other.

    Example:
        >>> three_digits(1_234_567), three_digits(44_700_000), three_digits(1_500), three_digits(999)
        ('1.23 MB', '44.7 MB', '1.5 kB', '999 bytes')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} bytes"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural.

    Example:
        >>> plural(1, "step"), plural(1200, "step")
        ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_count(count: int) -> str:
    """Format a count, such as that of a model's parameters, with one digit after the point.

    Example:
        >>> short_count(1_234_000), short_count(12_300), short_count(500)
        ('1.2 M', '12.3 k', '500')
    """
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return str(count)


def listed(texts: Sequence[str], most: int = 6) -> str:
    """Join `texts` by commas; beyond `most`, say how many more there are.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], most=2)
        ('a, b', 'a, b and 2 more')
    """
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def numbers_in_order(numbers: Iterable[int]) -> str:
    """Join numbers, such as ranks, by commas in ascending order.

    Example:
        >>> numbers_in_order({2, 0, 10})
        '0, 2, 10'
    """
    return ", ".join(map(str, sorted(numbers)))


def number_spans(numbers: Sequence[int]) -> str:
    """Join ascending numbers, such as ranks or GPUs, by commas; more than two in a row are the first and the last.

    Example:
        >>> number_spans([0, 1]), number_spans([0, 1, 2, 3]), number_spans([1, 3, 4])
        ('0, 1', '0-3', '1, 3, 4')
    """
    is_row = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_row else ", ".join(map(str, numbers))


def length_or_none(sized: Any) -> int | None:
    """Return ``len(sized)``; None if that raises.

    Example:
        >>> length_or_none([1, 2]), length_or_none(iter([1, 2]))
        (2, None)
    """
    with suppress(Exception):  # of the program's own classes, or where there is none
        return len(sized)
    return None


def with_article(noun: str) -> str:
    """Put "a" or "an" before `noun`.

    Example:
        >>> with_article("Lock"), with_article("Accelerator")
        ('a Lock', 'an Accelerator')
    """
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
