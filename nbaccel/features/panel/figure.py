"""Figure of a run, drawn by matplotlib: one that stays in the notebook, one for a paper. Runs in the kernel.

It uses `matplotlib.figure` without pyplot: no window, no back-end of the notebook, nothing to close. matplotlib is
imported when the first figure is made. Notebooks show a figure as a `Picture`, a PNG with a description in words.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base.quantities import gigabytes, number, rate, span
from nbaccel.display.history import History
from nbaccel.display.series import Line, Series, are_equal
from nbaccel.display.summary import RunFacts
from nbaccel.features.panel.shared_plots import plots_of, smoothed
from nbaccel.features.panel.svg import ON_LIGHT, Scale, dashes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

__all__ = [
    "PAPER",
    "Bundle",
    "Ground",
    "Picture",
    "draw",
    "head_lines",
    "logarithmic",
    "picture",
    "sheet",
    "trace",
]


@dataclass(frozen=True, slots=True)
class Ground:
    """Background of a figure, and the colours that are visible on it.

    Args:
        paper: The background; "none" shows that of the page.
        bad: Colour of failures.
        ranks: Colours of the ranks' curves.
        held_out: Colour of curves of held-out data.
    """

    paper: str
    ink: str
    soft: str
    edge: str
    grid: str
    bad: str
    ranks: tuple[str, ...]
    held_out: str

    def rank(self, rank: int) -> str:
        """Return the colour of a rank."""
        return self.ranks[rank % len(self.ranks)]


PAPER = Ground("white", "#1d1f23", "#5b616b", "#9aa0a8", "#e4e7eb", "#b3261e", ON_LIGHT, "#7a3fb0")
"""The colours of all figures; text has a contrast of 4.5:1 and more, lines of ranks 3:1 (a test computes it).

A picture brings its own paper: the programs that show a saved file have themes that no PNG can follow, and no text has
more than 4.2:1 on white and on nearly black alike.
"""

_WIDTH_IN, _HEIGHT_IN = 9.4, 2.7
_ROW_IN, _LINE_IN, _EDGE_IN = 2.0, 0.17, 0.05
"""Height of each row of curves, if there are several, of each line of the title, and of the edge above it."""
_SIDE_IN = 2.35
"""Width of the column of memory and speed: that of their titles."""
_MOST_IN_A_ROW = 3
_HEAD_PT, _MOST_HEAD_LINES = 9.5, 3
_DPI = 160
_MOST_BYTES = 60_000
_COARSER_DPI = (120, 96, 72)
"""Resolutions for a picture of many curves, tried in turn until its file is small enough."""
_POINTS = 240
_MOST_POINTS = 960
"""Number of points of all curves of one figure together, so that its file stays small."""
_HELD_OUT_POINTS = 120
_MOST_LABELS = 10


def _style(ground: Ground) -> Any:
    """Return matplotlib settings that replace those of a notebook's own style that could make the figure unreadable."""
    return {
        "figure.facecolor": ground.paper,
        "axes.facecolor": ground.paper,
        "savefig.facecolor": "auto",
        "text.usetex": False,
        "axes.edgecolor": ground.edge,
        "axes.labelcolor": ground.soft,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9,
        "axes.titley": 1.0,  # where it is anyway: if it may move, all ticks are measured before
        "axes.grid": True,
        "font.size": 8,
        "grid.color": ground.grid,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "text.color": ground.ink,
        "xtick.color": ground.soft,
        "ytick.color": ground.soft,
    }


def draw(
    history: History,
    facts: RunFacts | None = None,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    size: tuple[float, float] | None = None,
    ground: Ground = PAPER,
) -> Figure:
    """Return a new `matplotlib.figure.Figure`: the curves of each rank and their mean; beside them memory and speed.

    A row holds at most three curves. Memory and speed are left out until they have a second point.

    Args:
        names: The curves to draw; by default those of the panel, all phases one after the other.
        size: In inches.

    Raises:
        KeyError: No curve has that name.

    Example:
        >>> from nbaccel.base.events import Loss
        >>> history = History(1)
        >>> history.feed(0, 0.5, Loss(1.0, step=0))
        >>> [axes.get_title(loc="left") for axes in draw(history).axes]
        ['loss 1']
    """
    from nbaccel.features.panel.run_figure import edge_of_column

    facts = facts or RunFacts()
    known = dict.fromkeys(name for phase in history.phases for name in phase.series)
    chosen = [name for name in facts.shown(list(known)) if name in known] if names is None else list(names)
    shown = plots_of(chosen, list(known))
    rows = math.ceil(len(shown) / _MOST_IN_A_ROW) or 1
    columns = math.ceil(len(shown) / rows) or 1
    beside = [
        part
        for part, line in ((_memory, _longest(history.memory_bytes)), (_speed, history.speed.mean()))
        if len(line) > 1
    ]
    width_in, height_in = size or (_WIDTH_IN, max(_HEIGHT_IN, 0.5 + rows * _ROW_IN))
    lines = head_lines(title, width_in)
    if size is None:
        height_in += _LINE_IN * max(0, len(lines) - 1)
    with sheet((width_in, height_in), ground, lines) as figure:
        side_in = min(_SIDE_IN, width_in / 2) if beside else 0.0
        widths = [(width_in - side_in) / columns] * columns + ([side_in] if beside else [])
        grid: GridSpec = figure.add_gridspec(2 * rows, len(widths), width_ratios=widths)
        points = max(40, min(_POINTS, _MOST_POINTS // max(1, len(shown))))
        for at, (name, held_out) in enumerate(shown):
            row, column = divmod(at, columns)
            axes = figure.add_subplot(grid[2 * row : 2 * row + 2, column])
            _curves(axes, history, name, ground, points)
            _held_out(axes, history, held_out, ground)
        if not shown:
            nothing = figure.add_subplot(grid[:, 0])
            nothing.set_title(facts.not_found(list(known)) if known else "no numbers were logged")
            nothing.set_axis_off()
        for at, part in enumerate(beside):
            each = 2 * rows // len(beside)
            axes = figure.add_subplot(grid[at * each : (at + 1) * each, -1])
            axes.set_title(part(axes, history, ground), x=edge_of_column(side_in))
    return figure


@contextmanager
def sheet(size: tuple[float, float], ground: Ground, lines: Sequence[str]) -> Iterator[Figure]:
    """Yield a new figure of `size` in inches, for plots in one grid; meanwhile the project's own style applies.

    Args:
        lines: Written above everything; a "$" in them, for example of an error, begins no formula.
    """
    import matplotlib

    from nbaccel.features.panel.run_figure import Margins, RunFigure

    head_in = _EDGE_IN + _LINE_IN * len(lines)
    with matplotlib.rc_context(_style(ground)):
        figure = RunFigure(figsize=size, dpi=_DPI, layout=Margins(head_in))
        if lines:
            style = {"fontsize": _HEAD_PT, "fontweight": "bold", "parse_math": False}
            figure.suptitle("\n".join(lines), x=0.005, y=1 - _EDGE_IN / size[1], ha="left", va="top", **style)
        yield figure


def head_lines(title: str, width_in: float) -> list[str]:
    """Break `title` into at most three lines of `width_in` inches; "…" marks that the rest was cut off."""
    room_pt, space_pt, dots_pt = (width_in - 0.1) * 72, _width_pt(". .") - _width_pt(".."), _width_pt(" …")
    lines: list[str] = []
    used_pt = math.inf
    for word in title.split():
        word_pt = _width_pt(word)
        while word_pt > room_pt:
            word = f"{word[: int(len(word) * room_pt / word_pt * 0.95)]}…"
            word_pt = _width_pt(word)
        is_last = len(lines) == _MOST_HEAD_LINES
        if used_pt + space_pt + word_pt <= room_pt - (dots_pt if is_last else 0.0):
            lines[-1] = f"{lines[-1]} {word}"
            used_pt += space_pt + word_pt
        elif is_last:
            lines[-1] = f"{lines[-1].removesuffix('…')} …"
            break
        else:
            lines.append(word)
            used_pt = word_pt
    return lines


def _width_pt(text: str) -> float:
    """Return the width of the head with this text, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=_HEAD_PT, weight="bold")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def picture(figure: Figure, text: str) -> Picture:
    """Return `figure` as a small PNG. The figure cannot be used afterwards.

    Args:
        text: The content of the figure in words.
    """
    from nbaccel.features.panel.run_figure import png_of, size_px

    width, height = size_px(figure)
    for dpi in _COARSER_DPI:
        png = png_of(figure)
        if len(png) <= _MOST_BYTES:
            break
        figure.set_dpi(dpi)
    else:
        png = png_of(figure)
    _dissolve(figure)
    return Picture(png, width, height, text)


def _dissolve(figure: Figure) -> None:
    """Free everything that `figure` is made of, and its canvas with the pixels.

    The parts refer to each other in cycles. Left to the garbage collector, some 10,000 objects and 4 MiB of every run
    would wait for it, for dozens of runs.
    """
    for artist in figure.findobj():
        vars(artist).clear()


# --- the parts ----------------------------------------------------------------------------------------------------


def _curves(axes: Axes, history: History, name: str, ground: Ground, points: int) -> None:
    """Draw one quantity over the steps, the phases side by side."""
    of_phases = [(phase.name, phase.series[name]) for phase in history.phases if name in phase.series]
    if not of_phases:
        known = ", ".join(dict.fromkeys(name for phase in history.phases for name in phase.series))
        raise KeyError(f"no curve is called {name!r}; this run has: {known or 'none'}")
    latest = of_phases[-1][1]
    axes.set_title(f"{name} {number(latest.latest)}", fontweight="bold")
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    if len(of_phases) > 1:
        for at, (phase, series) in enumerate(of_phases):
            trace(axes, series.coarser(points).mean(), at, phase or "before", 1.4, ground)
    else:
        _ranks_and_mean(axes, latest.coarser(points), ground)
    mean = latest.mean()
    if mean and Scale.of(mean).is_log:
        logarithmic(axes)
    for mark in history.marks:
        if mark.kind == "oom" and mark.step is not None:
            axes.axvline(mark.step, color=ground.bad, linestyle=":", linewidth=1.2, label="out of memory")
    _whole_steps(axes, of_phases[0][1] if len(of_phases) == 1 else None)
    _legend(axes)


def _held_out(axes: Axes, history: History, names: Sequence[str], ground: Ground) -> None:
    """Draw curves of held-out data into the plot of their metric in training; only those of the last phase."""
    everything = history.phase.series
    for at, name in enumerate(name for name in names if name in everything):
        line = everything[name].coarser(_HELD_OUT_POINTS).mean()
        if not line:
            continue
        style = "--" if at else "-"
        label = f"{name} {number(everything[name].latest)}"
        axes.plot(line.step, line.mean, style, color=ground.held_out, linewidth=1.3, marker="o", ms=3, label=label)
        _legend(axes)


def _ranks_and_mean(axes: Axes, series: Series, ground: Ground) -> None:
    mean = series.mean()
    axes.fill_between(mean.step, mean.low, mean.high, color=ground.rank(0), alpha=0.15, linewidth=0)
    lines = {rank: series.line(rank) for rank in series.ranks}
    smooth = smoothed(mean)
    pale = 1.0 if smooth is None else 0.35
    over = mean if smooth is None else smooth
    if are_equal(lines.values()):
        if smooth is not None:
            axes.plot(mean.step, mean.mean, color=ground.rank(0), linewidth=0.8, alpha=pale)
        trace(axes, over, 0, "", 1.6, ground)
        return
    for rank, line in lines.items():
        trace(axes, line, rank, f"rank {rank}", 0.9, ground, alpha=1.0 if smooth is None else 0.6)
    axes.plot(over.step, over.mean, color=ground.ink, linewidth=1.7, label="mean" if smooth is None else "mean, smooth")


def _whole_steps(axes: Axes, only: Series | None) -> None:
    """Place ticks at whole steps; a curve of a single step gets one tick at this step."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    steps = set() if only is None else {step for rank in only.ranks for step in only.line(rank).step}
    if len(steps) == 1:
        axes.xaxis.set_major_locator(FixedLocator([*steps]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def trace(axes: Axes, line: Line, rank: int, label: str, width: float, ground: Ground, *, alpha: float = 1.0) -> None:
    """Draw a curve in the colour and dashes of `rank`, `width` points wide."""
    (drawn,) = axes.plot(line.step, line.mean, color=ground.rank(rank), linewidth=width, label=label, alpha=alpha)
    if len(line) == 1:
        drawn.set_marker("o")
    if dash := dashes(rank):
        drawn.set_dashes(dash)


def logarithmic(axes: Axes) -> None:
    """Make the axis of what is drawn logarithmic, with ticks at 1, 2, 5, 10 ... as plain numbers.

    Minor ticks between them would take a sixth of the time of a picture.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.dataLim.intervaly
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high <= 100 * low else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _memory(axes: Axes, history: History, ground: Ground) -> str:
    """Draw the memory of each rank over time, and the limit; return the title."""
    peaks = [usage.peak_bytes for usage in history.memory.values()]
    axes.set_ylabel("GB")
    top = float(max(peaks, default=0))
    for rank in history.memory:
        line = history.memory_bytes.line(rank)
        high = tuple(value / 1e9 for value in line.high)
        axes.plot(_seconds(line), high, color=ground.rank(rank), linewidth=1.2)
        if dash := dashes(rank):
            axes.lines[-1].set_dashes(dash)
    # The limit of a host is shared by all its processes and so high that the curves would look flat.
    for limit in sorted({usage.limit_bytes for usage in history.memory.values() if usage.is_device}):
        axes.axhline(limit / 1e9, color=ground.ink, linestyle="--", linewidth=0.9)
        axes.text(0.01, limit / 1e9, f"limit {gigabytes(limit)}", transform=axes.get_yaxis_transform(), va="bottom")
        top = max(top, limit * 1.2)
    _from_zero(axes, history, top / 1e9, ground)
    return f"memory, peak {span(peaks)}" if peaks else "memory"


def _speed(axes: Axes, history: History, ground: Ground) -> str:
    """Draw the steps per second over time; return the title."""
    line = history.speed.mean()
    steps_per_s = history.steps_per_s
    axes.set_ylabel("steps/s")
    axes.set_xlabel("seconds")
    axes.plot(_seconds(line), line.mean, color=ground.ink, linewidth=1.2)
    _from_zero(axes, history, max(line.high, default=0.0), ground)
    return "speed" if steps_per_s is None else f"speed, {rate(steps_per_s, 'steps')}"


def _longest(series: Series) -> Line:
    """Return the curve of the rank that has most points; an empty one if there is no rank."""
    return max((series.line(rank) for rank in series.ranks), key=len, default=Line())


def _seconds(line: Line) -> tuple[float, ...]:
    """Return the times of the points of a curve over time, in seconds; the steps of such a curve are milliseconds."""
    return tuple(step / 1000 for step in line.step)


def _from_zero(axes: Axes, history: History, top: float, ground: Ground) -> None:
    """Scale the axes from zero to a little more than `top`, over the seconds of the whole run."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, top * 1.1 or 1.0)
    if history.seconds > 0:
        axes.set_xlim(0, history.seconds)
    for mark in history.marks:
        if mark.kind == "restart":
            axes.axvline(mark.at_s, color=ground.bad, linestyle=":", linewidth=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))


def _legend(axes: Axes) -> None:
    """Add a legend with each label once; none if there are too many labels."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if 0 < len(unique) <= _MOST_LABELS:
        axes.legend(unique.values(), unique.keys(), handlelength=2.4, borderaxespad=0.2, labelspacing=0.25)


Bundle = tuple[dict[str, Any], dict[str, Any]]
"""Data and metadata, by MIME type."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG of `width` times `height` CSS pixels; it has more pixels than that, for sharp screens.

    Args:
        text: The content in words.
    """

    png: bytes
    width: int
    height: int
    text: str

    def bundle(self) -> Bundle:
        """Return the data that a notebook saves of the picture."""
        image = {"width": self.width, "height": self.height, "alt": self.text}
        return (
            {"text/plain": self.text, "image/png": b64encode(self.png).decode("ascii")},
            {"image/png": image},
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self.bundle()

    def __repr__(self) -> str:
        return self.text
