"""The figure of a run, by matplotlib: one that stays in the notebook, one for a paper. Runs in the kernel.

`matplotlib.figure` alone, without pyplot: no window, no back-end of the notebook's, nothing to close. It is imported
when the first figure is made.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbaccel.view.history import History
from nbaccel.view.picture import Picture
from nbaccel.view.plot import Scale
from nbaccel.view.series import Line, Series
from nbaccel.view.state import Facts
from nbaccel.view.theme import ON_LIGHT, dashes
from nbaccel.view.words import gigabytes, number, rate, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "head", "logarithmic", "picture", "sheet", "trace"]

_INK, _SOFT, _BAD = "#1d1f23", "#5b616b", "#b3261e"
_WIDTH_IN, _HEIGHT_IN = 9.4, 2.7
_DPI, _CSS_DPI = 160, 96
_COLOURS = 160
_POINTS = 240
_MOST_LABELS = 10

_STYLE: Any = {  # all that a notebook's own style could turn unreadable
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "text.usetex": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": _SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.grid": True,
    "font.size": 8,
    "grid.color": "#e4e7eb",
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "text.color": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
}


def draw(
    history: History,
    facts: Facts | None = None,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    size: tuple[float, float] | None = None,
) -> Figure:
    """A new `matplotlib.figure.Figure`: the curves of each rank and their mean, memory, and speed.

    names: the curves to draw; by default those of the panel, all phases one after the other.  size: in inches.

    Raises:
        KeyError: no curve has that name.

    >>> from nbaccel.events import Loss
    >>> history = History(1)
    >>> history.feed(0, 0.5, Loss(1.0, step=0))
    >>> [axes.get_title(loc="left") for axes in draw(history).axes]
    ['loss 1', 'memory', 'speed']
    """
    facts = facts or Facts()
    known = dict.fromkeys(name for phase in history.phases for name in phase.series)
    shown = [name for name in facts.shown(list(known)) if name in known] if names is None else list(names)
    with sheet(size or (_WIDTH_IN, _HEIGHT_IN)) as figure:
        widths = [1.9] * max(1, len(shown)) + [1.15]
        grid = figure.add_gridspec(2, len(widths), width_ratios=widths)
        for at, name in enumerate(shown):
            _curves(figure.add_subplot(grid[:, at]), history, name)
        if not shown:
            figure.add_subplot(grid[:, 0]).set_title("no numbers were logged")
        _memory(figure.add_subplot(grid[0, -1]), history)
        _speed(figure.add_subplot(grid[1, -1]), history)
        if title:
            head(figure, title)
    return figure


@contextmanager
def sheet(size: tuple[float, float]) -> Iterator[Figure]:
    """A new figure of `size` in inches, to be drawn on in our own style while the block runs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=size, dpi=_DPI, layout="constrained")


def head(figure: Figure, title: str) -> None:
    """One line above everything; a "$" in it, of an error perhaps, begins no formula."""
    figure.suptitle(title, x=0.005, ha="left", fontsize=9.5, fontweight="bold", parse_math=False)


def picture(figure: Figure, text: str) -> Picture:
    """`figure` as a PNG of few colours, which is a quarter of what matplotlib writes. It uses the figure up.

    text: what it shows, in words.
    """
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(numpy.ascontiguousarray(numpy.asarray(canvas.buffer_rgba())[..., :3]))
    file = io.BytesIO()
    few = image.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, "PNG", optimize=True, dpi=(_DPI, _DPI))
    width, height = (round(inches * _CSS_DPI) for inches in figure.get_size_inches())
    _dissolve(figure)
    return Picture(file.getvalue(), width, height, text)


def _dissolve(figure: Figure) -> None:
    """Free all that `figure` is made of now, and its canvas with the pixels.

    Its parts refer to each other in circles. Left to the garbage collector, some 10,000 objects and 4 MiB of every run
    would wait for it, for dozens of runs.
    """
    for artist in figure.findobj():
        vars(artist).clear()


# --- the parts ----------------------------------------------------------------------------------------------------


def _curves(axes: Axes, history: History, name: str) -> None:
    """One quantity over the steps, one phase beside the other."""
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
            trace(axes, series.coarser(_POINTS).mean(), at, phase or "before", 1.4)
    else:
        _ranks_and_mean(axes, latest)
    mean = latest.mean()
    if mean and Scale.of(mean).is_log:
        logarithmic(axes)
    for mark in history.marks:
        if mark.kind == "oom" and mark.step is not None:
            axes.axvline(mark.step, color=_BAD, linestyle=":", linewidth=1.2, label="out of memory")
    _legend(axes)


def _ranks_and_mean(axes: Axes, series: Series) -> None:
    series = series.coarser(_POINTS)
    mean = series.mean()
    axes.fill_between(mean.step, mean.low, mean.high, color=ON_LIGHT[0], alpha=0.15, linewidth=0)
    if len(series.ranks) == 1:
        trace(axes, mean, 0, "", 1.6)
        return
    for rank in series.ranks:
        trace(axes, series.line(rank), rank, f"rank {rank}", 0.9)
    axes.plot(mean.step, mean.mean, color=_INK, linewidth=1.7, label="mean")


def trace(axes: Axes, line: Line, rank: int, label: str, width: float) -> None:
    """A curve in the colour and dashes of `rank`, as wide as `width` points."""
    (drawn,) = axes.plot(line.step, line.mean, color=ON_LIGHT[rank % len(ON_LIGHT)], linewidth=width, label=label)
    if len(line) == 1:
        drawn.set_marker("o")
    if dash := dashes(rank):
        drawn.set_dashes(dash)


def logarithmic(axes: Axes) -> None:
    """A logarithmic axis whose ticks are written as numbers are spoken."""
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")


def _memory(axes: Axes, history: History) -> None:
    """What each rank used over time, and where the limit is."""
    peaks = [usage.peak_bytes for usage in history.memory.values()]
    axes.set_title(f"memory, peak {span(peaks)}" if peaks else "memory")
    axes.set_ylabel("GB")
    top = float(max(peaks, default=0))
    for rank in history.memory:
        line = history.memory_bytes.line(rank)
        high = tuple(value / 1e9 for value in line.high)
        trace(axes, Line(line.step, high, high, high), rank, "", 1.2)
    # A host's limit is that of all its processes, and so far away that the curves would lie flat.
    for limit in sorted({usage.limit_bytes for usage in history.memory.values() if usage.is_device}):
        axes.axhline(limit / 1e9, color=_INK, linestyle="--", linewidth=0.9)
        axes.text(0.01, limit / 1e9, f"limit {gigabytes(limit)}", transform=axes.get_yaxis_transform(), va="bottom")
        top = max(top, limit * 1.2)
    _from_zero(axes, history, top / 1e9)


def _speed(axes: Axes, history: History) -> None:
    line = history.speed.mean()
    steps_per_s = history.steps_per_s
    axes.set_title("speed" if steps_per_s is None else f"speed, {rate(steps_per_s, 'steps')}")
    axes.set_ylabel("steps/s")
    axes.set_xlabel("seconds")
    axes.plot(line.step, line.mean, color=_INK, linewidth=1.2)
    _from_zero(axes, history, max(line.high, default=0.0))


def _from_zero(axes: Axes, history: History, top: float) -> None:
    """From nothing to a little more than `top`, over milliseconds of the whole run that are written as seconds."""
    axes.set_ylim(0, top * 1.1 or 1.0)
    if history.seconds > 0:
        axes.set_xlim(0, history.seconds * 1000)
    for mark in history.marks:
        if mark.kind == "restart":
            axes.axvline(mark.at_s * 1000, color=_BAD, linestyle=":", linewidth=1.2)
    axes.xaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds / 1000:g}")


def _legend(axes: Axes) -> None:
    """Each label once, and none where there would be too many."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if 0 < len(unique) <= _MOST_LABELS:
        axes.legend(unique.values(), unique.keys(), handlelength=2.4, borderaxespad=0.2, labelspacing=0.25)
