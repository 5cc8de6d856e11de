"""Curves as one inline SVG without script, text or fixed width, and the colours of ranks. Pure; runs in the kernel.

Lines are drawn from bucket means, in the colour and dashes of their rank. The band behind them goes from the smallest
to the largest value, so that a spike is visible for any number of steps. Numbers stand beside the plot as HTML: the SVG
is stretched to the available width, and text in it would be stretched too. Colours are Okabe and Ito's, which
colour-blind people tell apart (https://jfly.uni-koeln.de/color); dashes repeat the difference for those who see none.
Each set is ordered by contrast on its background.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nbaccel.display.series import Line

__all__ = [
    "ON_LIGHT",
    "STYLE",
    "Scale",
    "colour",
    "dashes",
    "plot",
    "spark",
]

_SIDE, _TOP = 1000, 40
_ROOM = _SIDE - 2 * _TOP
_STROKE = 'fill="none" vector-effect="non-scaling-stroke" stroke-linejoin="round"'
_MOST_DOTS = 30
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
    mean: Line,
    ranks: Mapping[int, Line],
    scale: Scale,
    *,
    label: str,
    height_px: int,
    marks: Sequence[int] = (),
    smooth: Line | None = None,
    beside: Sequence[Line] = (),
) -> str:
    """Return the SVG of `mean`, which has at least one point, and of the curves of `ranks`, drawn on `scale`.

    Args:
        label: The text for a screen reader.
        marks: Steps to mark by a vertical line.
        smooth: A smooth curve over `mean`, which is drawn pale then.
        beside: Curves of held-out data; not empty.
    """
    # Sizes are styles, not attributes: JupyterLab gives every SVG in an output `height: auto`.
    first = min(line.step[0] for line in (mean, *beside))
    last = max(first + 1, *(line.step[-1] for line in (mean, *beside)))

    def points(steps: Iterable[int], values: Iterable[float]) -> list[tuple[int, int]]:
        return [(x(step), y(value)) for step, value in zip(steps, values, strict=True)]

    def y(value: float) -> int:
        return round(_TOP + (1 - scale.height(value)) * _ROOM)

    def x(step: int) -> int:
        return round((min(max(step, first), last) - first) / (last - first) * _SIDE)

    parts = [f'<path d="M0 {at}H{_SIDE}" stroke="var(--line)" {_STROKE}/>' for at in (_TOP, _SIDE // 2, _SIDE - _TOP)]
    edges = points(mean.step, mean.high) + points(reversed(mean.step), reversed(mean.low))
    parts.append(f'<path d="{_path(edges)}z" fill="var(--r0)" opacity=".16"/>')
    behind = "" if smooth is None else ' opacity=".6"'
    for rank, line in ranks.items():
        dash = " ".join(f"{length:g}" for length in dashes(rank)) or "none"
        parts.append(
            f'<path d="{_path(points(line.step, line.mean))}" stroke="{colour(rank)}" stroke-dasharray="{dash}" '
            f'stroke-width="1.3"{behind} {_STROKE}/>'
        )
    stroke = "var(--fg)" if ranks else colour(0)
    pale = "" if smooth is None else ' opacity=".35"'
    parts.append(
        f'<path d="{_path(points(mean.step, mean.mean))}" stroke="{stroke}" stroke-width="{2 if not pale else 1}" '
        f'stroke-linecap="round"{pale} {_STROKE}/>'
    )
    if smooth is not None:
        parts.append(
            f'<path d="{_path(points(smooth.step, smooth.mean))}" stroke="{stroke}" stroke-width="2" '
            f'stroke-linecap="round" {_STROKE}/>'
        )
    for at, line in enumerate(beside):
        parts += _held_out(points(line.step, line.mean), at)
    parts += [
        f'<path d="M{x(step)} 0V{_SIDE}" stroke="var(--bad)" stroke-dasharray="2 3" {_STROKE}/>'
        for step in marks
        if first <= step <= last
    ]
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" '
        f'style="height:{height_px}px">{"".join(parts)}</svg>'
    )


def _held_out(points: Sequence[tuple[int, int]], at: int) -> Iterator[str]:
    """Yield the paths of curve `at` of held-out data: a line, and a dot for each point unless there are very many."""
    dash = "5 3" if at else "none"
    yield (
        f'<path d="{_path(points)}" stroke="var(--val)" stroke-width="1.6" stroke-dasharray="{dash}" '
        f'stroke-linecap="round" {_STROKE}/>'
    )
    if len(points) <= _MOST_DOTS:  # a line of no length with round ends is a dot that no stretching distorts
        dots = "".join(f"M{x} {y}h0" for x, y in points)
        yield f'<path d="{dots}" stroke="var(--val)" stroke-width="5" stroke-linecap="round" {_STROKE}/>'


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


ON_LIGHT = ("#0072b2", "#d55e00", "#008a65", "#a9507f", "#b07a00", "#3a87b8")
"""Colours on white.

Green, purple, orange and sky blue are darkened until they reach 3:1, which graphics need (WCAG 1.4.11).
"""
_ON_DARK = ("#56b4e9", "#e69f00", "#2fc39a", "#d98fb9", "#f0e442", "#ff8a4c")

_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2, 1, 2))
"""Lengths on and off, in points; empty is solid."""


def colour(rank: int) -> str:
    """Return the colour of a rank as a CSS value that follows the theme."""
    return f"var(--r{rank % len(ON_LIGHT)})"


def dashes(rank: int) -> tuple[float, ...]:
    """Return the dashes of a rank. Ranks that share a colour differ in these."""
    return _DASHES[(rank + rank // len(ON_LIGHT)) % len(_DASHES)]


def _ranks(colours: tuple[str, ...]) -> str:
    return "".join(f"--r{at}:{value};" for at, value in enumerate(colours))


_LIGHT = (
    "--bg:#fff;--fg:#1d1f23;--soft:#5b616b;--line:#d9dce1;--fill:#e4e7eb;--bad:#b3261e;--good:#00704f;--val:#7a3fb0;"
    f"{_ranks(ON_LIGHT)}"
)
_DARK = (
    "--bg:#16181c;--fg:#e8eaed;--soft:#a9b0ba;--line:#3a3f47;--fill:#2f343c;--bad:#ff8a80;--good:#5ed3ae;--val:#c9a2f2;"
    f"{_ranks(_ON_DARK)}"
)

_IS_DARK = (
    "body[data-jp-theme-light=false] .nbaccel",  # JupyterLab, Notebook 7
    "body.vscode-dark .nbaccel",
    "body.vscode-high-contrast .nbaccel",
    "html[theme=dark] .nbaccel",  # Colab
)
_IS_LIGHT = ("body[data-jp-theme-light=true] .nbaccel", "body.vscode-light .nbaccel", "html[theme=light] .nbaccel")

STYLE = (
    f".nbaccel{{{_LIGHT}color-scheme:light}}"
    f"@media(prefers-color-scheme:dark){{.nbaccel{{{_DARK}color-scheme:dark}}}}"
    f"{','.join(_IS_LIGHT)}{{{_LIGHT}color-scheme:light}}"
    f"{','.join(_IS_DARK)}{{{_DARK}color-scheme:dark}}"
    # The background is set here: text on it is readable even if the front end does not say which theme it has.
    ".nbaccel{box-sizing:border-box;max-width:960px;padding:8px 12px;border:1px solid var(--line);border-radius:6px;"
    "background:var(--bg);color:var(--fg);font:13px/20px system-ui,sans-serif;font-variant-numeric:tabular-nums;"
    "overflow:hidden;position:relative;container-type:inline-size}"
    ".nbaccel.runs{margin-bottom:4px;max-height:220px;overflow:auto}"
    ".nbaccel.runs table{width:100%}.nbaccel.runs svg{vertical-align:middle}"
    ".nbaccel p,.nbaccel figure{margin:0;padding:0}"
    ".nbaccel .row{display:flex;gap:6px 16px;height:20px;white-space:nowrap;overflow:hidden}"
    ".nbaccel .row>*{flex:none}"
    # One line high: parts that do not fit wrap out of sight as a whole.
    ".nbaccel .fits{display:flex;flex-wrap:wrap;height:20px;overflow:hidden;white-space:pre}"
    ".nbaccel .row>.fits{flex:1 1 0;min-width:0}.nbaccel .row>.fits::before{content:'\\200b'}"
    # The position comes first, then as many of the speeds as there is room for.
    ".nbaccel .at>.fits:first-child{flex:none;max-width:100%}.nbaccel .at>.fits+.fits{justify-content:flex-end}"
    ".nbaccel .row.fits{gap:0}.nbaccel figure .row.fits{gap:0 8px}"
    ".nbaccel .fits>*{max-width:100%;overflow:hidden;text-overflow:ellipsis}"
    ".nbaccel .row>.fits>*{max-width:none}"
    ".nbaccel .soft{color:var(--soft)}.nbaccel b{font-weight:600}"
    ".nbaccel .stale{position:absolute;right:12px;bottom:7px;padding-left:12px;background:var(--bg);visibility:hidden;"
    "animation:nbaccel-stale 0s linear 20s forwards}@keyframes nbaccel-stale{to{visibility:visible}}"
    ".nbaccel b.val{color:var(--val)}.nbaccel .failed{color:var(--bad)}.nbaccel .done{color:var(--good)}"
    ".nbaccel progress{width:100%;height:6px;display:block;margin:6px 0 8px;appearance:none;-webkit-appearance:none;"
    "border:0;border-radius:3px;overflow:hidden;background:var(--fill)}"
    ".nbaccel progress::-webkit-progress-bar{background:var(--fill)}"
    ".nbaccel progress::-webkit-progress-value{background:var(--r0)}"
    ".nbaccel progress::-moz-progress-bar{background:var(--r0)}"
    ".nbaccel .body{display:flex;gap:12px 20px}"
    ".nbaccel .plots{flex:1 1 0;min-width:0;display:grid;grid-auto-columns:1fr;gap:10px 20px;align-content:start}"
    ".nbaccel .of2>.plots{grid-template-columns:repeat(2,minmax(0,1fr))}"
    ".nbaccel .of3>.plots{grid-template-columns:repeat(3,minmax(0,1fr))}"
    ".nbaccel figure{min-width:0;overflow:hidden}"
    ".nbaccel .plot{position:relative;display:flex;gap:6px}"
    ".nbaccel .plot svg{flex:1 1 0;min-width:0;display:block;background:none}"
    ".nbaccel .axis{display:flex;flex-direction:column;justify-content:space-between;align-items:flex-end;width:52px;"
    "white-space:nowrap}"
    ".nbaccel .axis,.nbaccel .steps{font-size:11px;line-height:14px;color:var(--soft)}"
    ".nbaccel .steps{display:flex;justify-content:space-between;padding-left:58px;height:14px}"
    # Front ends give preformatted text a background, a size and a way to wrap of their own.
    ".nbaccel pre.bars{margin:0;padding:0;border:0;background:none;color:inherit;white-space:pre;overflow:hidden;"
    "font:12px/18px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".nbaccel .ranks{flex:none;max-width:100%;overflow:hidden auto}"
    ".nbaccel table{border-collapse:collapse;margin:0;border:0;font:inherit;color:inherit;table-layout:auto}"
    # Front ends give tables stripes and rules of their own.
    ".nbaccel thead{border:0}.nbaccel tr,.nbaccel tbody tr:nth-child(n),.nbaccel tbody tr:nth-child(n):hover"
    "{background:none}"
    ".nbaccel th,.nbaccel td{padding:0 0 0 14px;height:22px;text-align:right;white-space:nowrap;border:0;"
    "font-weight:400;color:inherit;vertical-align:middle;background:none}"
    ".nbaccel th:first-child,.nbaccel td:first-child{padding-left:0;text-align:left}"
    ".nbaccel td.left,.nbaccel th.left{text-align:left}"
    ".nbaccel thead th{color:var(--soft);height:20px}"
    # JupyterLab gives every SVG in an output `height: auto`, by a rule that this one overrules.
    ".nbaccel svg.swatch{width:24px;height:8px;stroke-width:2}"
    ".nbaccel .bar{position:relative;display:inline-block;width:90px;height:8px;border-radius:2px;"
    "background:var(--fill);overflow:hidden;vertical-align:middle}"
    ".nbaccel .bar i{position:absolute;left:0;top:0;bottom:0}"
    ".nbaccel .bar u{position:absolute;top:0;bottom:0;width:2px;background:var(--fg)}"
    # The table below the curves: always below three of them, below fewer where the place is narrow.
    ".nbaccel .of3{flex-direction:column}.nbaccel .of3>*{flex:none}"
    "@container(max-width:860px){.nbaccel .of2{flex-direction:column}.nbaccel .of2>*{flex:none}}"
    "@container(max-width:660px){.nbaccel .body{flex-direction:column}.nbaccel .body>*{flex:none}"
    ".nbaccel .of3>.plots{grid-template-columns:repeat(2,minmax(0,1fr))}}"
    "@container(max-width:500px){.nbaccel .bar{display:none}}"
    "@container(max-width:420px){.nbaccel .row.at{display:block;height:40px}"
    ".nbaccel .body>.plots{grid-template-columns:minmax(0,1fr)}"
    ".nbaccel .swatch,.nbaccel .row>.fits+span.soft{display:none}"
    ".nbaccel th,.nbaccel td{padding-left:10px}}"
    # At this width the name of the device does not fit.
    "@container(max-width:330px){.nbaccel .ranks :is(th,td):nth-last-child(3){display:none}"
    ".nbaccel table{font-size:10px}.nbaccel th,.nbaccel td{padding-left:4px}"
    ".nbaccel .row.at{height:60px}.nbaccel .at>.fits:first-child{display:block;height:40px;white-space:normal}}"
    "@container(max-width:230px){.nbaccel .ranks :is(th,td):last-child{display:none}}"
)
