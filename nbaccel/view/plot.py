"""Plot: curves as one inline SVG without script, text or fixed width. Pure.

Lines are drawn from bucket means, in the colour and dashes of their rank. The band behind them goes from the smallest
to the largest value, so that a spike is visible for any number of steps. Numbers stand beside the plot as HTML: the SVG
is stretched to the available width, and text in it would be stretched too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nbaccel.view.series import Line
from nbaccel.view.theme import colour, dashes

__all__ = ["Scale", "plot", "spark"]

_SIDE, _TOP = 1000, 40
_ROOM = _SIDE - 2 * _TOP
_STROKE = 'fill="none" vector-effect="non-scaling-stroke" stroke-linejoin="round"'
_LOG_FROM = 10.0
"""Values that differ by more than this factor, all of them positive, are drawn on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Range of the values of a plot; with `is_log`, distances stand for ratios."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, line: Line) -> Scale:
        """Return a scale that holds `line`, from its lowest to its highest value."""
        low, high = min(line.low), max(line.high)
        if low > 0 and high / low > _LOG_FROM:
            return cls(low, high, True)
        if low == high:
            room = abs(low) * 0.1 or 1.0
            return cls(low - room, high + room, False)
        return cls(low, high, False)

    def height(self, value: float) -> float:
        """Return the height of `value`: 0 at the lowest, 1 at the highest."""
        if self.is_log:
            return math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def plot(
    mean: Line, ranks: Mapping[int, Line], scale: Scale, *, label: str, height_px: int, marks: Sequence[int] = ()
) -> str:
    """Return the SVG of `mean`, which has at least one point, and of the curves of `ranks`, drawn on `scale`.

    label: the text for a screen reader.  marks: steps to mark by a vertical line.
    """
    # Sizes are styles, not attributes: JupyterLab gives every SVG in an output `height: auto`.
    first, last = mean.step[0], max(mean.step[-1], mean.step[0] + 1)

    def points(steps: Iterable[int], values: Iterable[float]) -> list[tuple[int, int]]:
        return [(x(step), y(value)) for step, value in zip(steps, values, strict=True)]

    def y(value: float) -> int:
        return round(_TOP + (1 - scale.height(value)) * _ROOM)

    def x(step: int) -> int:
        return round((min(max(step, first), last) - first) / (last - first) * _SIDE)

    parts = [f'<path d="M0 {at}H{_SIDE}" stroke="var(--line)" {_STROKE}/>' for at in (_TOP, _SIDE // 2, _SIDE - _TOP)]
    edges = points(mean.step, mean.high) + points(reversed(mean.step), reversed(mean.low))
    parts.append(f'<path d="{_path(edges)}z" fill="var(--r0)" opacity=".16"/>')
    for rank, line in ranks.items():
        dash = " ".join(f"{length:g}" for length in dashes(rank)) or "none"
        parts.append(
            f'<path d="{_path(points(line.step, line.mean))}" stroke="{colour(rank)}" stroke-dasharray="{dash}" '
            f'stroke-width="1.3" {_STROKE}/>'
        )
    stroke = "var(--fg)" if ranks else colour(0)
    parts.append(
        f'<path d="{_path(points(mean.step, mean.mean))}" stroke="{stroke}" stroke-width="2" '
        f'stroke-linecap="round" {_STROKE}/>'
    )
    parts += [
        f'<path d="M{x(step)} 0V{_SIDE}" stroke="var(--bad)" stroke-dasharray="2 3" {_STROKE}/>'
        for step in marks
        if first <= step <= last
    ]
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" '
        f'style="height:{height_px}px">{"".join(parts)}</svg>'
    )


def spark(line: Line, scale: Scale, label: str) -> str:
    """Return the SVG of one curve, as small as a word."""
    first, last = line.step[0], max(line.step[-1], line.step[0] + 1)
    points = [
        (round((step - first) / (last - first) * 90), round(1 + (1 - scale.height(value)) * 14))
        for step, value in zip(line.step, line.mean, strict=True)
    ]
    return (
        f'<svg role="img" aria-label="{escape(label)}" style="width:90px;height:16px"><path d="{_path(points)}" '
        f'stroke="var(--r0)" stroke-width="1.5" {_STROKE}/></svg>'
    )


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return a path of relative moves, half the characters of absolute ones. A single point is a dot."""
    if not points:
        return ""
    (x, y), *rest = points
    moves = [f"M{x} {y}l"]
    for to_x, to_y in rest or [(x, y)]:
        moves.append(f"{to_x - x} {to_y - y} ")
        x, y = to_x, to_y
    return "".join(moves).rstrip()
