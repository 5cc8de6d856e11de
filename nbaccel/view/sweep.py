"""The figure of several runs: their curves in one plot, and a line for each beside it. Pure; runs in the kernel.

It is left in the notebook after the folds or the sweep of one cell. It compares runs; the figure of one run shows its
ranks, memory and speed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from nbaccel.view.board import Board, Row
from nbaccel.view.figure import ANY_GROUND, head, head_lines, logarithmic, sheet, trace
from nbaccel.view.plot import Scale
from nbaccel.view.series import Line
from nbaccel.view.theme import dashes
from nbaccel.view.words import duration, number, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_runs"]

_WIDTH_IN, _LINE_IN, _LEAST_IN = 9.4, 0.17, 2.7
_MOST_LINES = 16
_LONGEST_TITLE = 34
_UNNAMED = "#8b909880"


def draw_runs(board: Board) -> Figure:
    """Return a new figure of all runs of `board` that are over; at most 16 are named, the first and the latest.

    >>> [axes.get_title(loc="left") for axes in draw_runs(Board()).axes]
    ['no numbers were logged', '']
    """
    named = _first_and_latest(board.rows)
    name = next((name for name, _ in Counter(row.name for row in board.rows if row.name).most_common(1)), "")
    height_in = max(_LEAST_IN, 0.7 + _LINE_IN * (len(named) + 1))
    with sheet((_WIDTH_IN, height_in), ANY_GROUND) as figure:
        grid = figure.add_gridspec(1, 2, width_ratios=[1.0, 1.0])
        compared = [row for row in board.rows if row.name == name and row.curve]
        _curves(figure.add_subplot(grid[0, 0]), compared, {row.number for row in named}, name)
        _lines(figure.add_subplot(grid[0, 1]), board, named)
        ends = ", ".join(f"{count} {word}" for word, count in board.ends.items())
        head(figure, head_lines(f"{plural(board.runs, 'run')}: {ends}", _WIDTH_IN))
    return figure


def _first_and_latest(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= _MOST_LINES:
        return list(rows)
    half = _MOST_LINES // 2
    return [*rows[:half], *rows[-half:]]


def _curves(axes: Axes, rows: Sequence[Row], named: Collection[int], name: str) -> None:
    if not rows:
        axes.set_title("no numbers were logged")
        return
    axes.set_title(name, fontweight="bold")
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    for row in rows:
        if row.number in named:
            trace(axes, row.curve, row.number - 1, "", 1.2, ANY_GROUND)
        else:  # in the background: nobody tells a hundred curves apart
            axes.plot(row.curve.step, row.curve.mean, color=_UNNAMED, linewidth=0.6, zorder=1.5)
    low, high = min(min(row.curve.low) for row in rows), max(max(row.curve.high) for row in rows)
    if Scale.of(Line((0,), (low,), (low,), (high,))).is_log:
        logarithmic(axes)


def _lines(axes: Axes, board: Board, rows: Sequence[Row]) -> None:
    """Write one line for each run, after a piece of its curve: the table is the legend."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    places = max(len(rows) + (len(rows) < board.runs), 8)
    axes.set_ylim(places, 0)
    write = functools.partial(axes.text, va="center", parse_math=False)  # a title may hold a "$"
    at = 0.5
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row.number > before.number + 1:
            write(0.1, at, f"… {plural(row.number - before.number - 1, 'more run')}")
            at += 1
        if row.curve:
            _sample(axes, row.number - 1, at)
        title = row.title if len(row.title) <= _LONGEST_TITLE else f"{row.title[: _LONGEST_TITLE - 1]}…"
        words = ["" if row.word == "done" else row.word, f"{row.name} {number(row.latest)}" if row.name else ""]
        write(0.1, at, f"{row.number}. {title}")
        write(0.84, at, ", ".join(filter(None, words)), ha="right")
        write(1.0, at, duration(row.seconds), ha="right")
        at += 1


def _sample(axes: Axes, at: int, height: float) -> None:
    """Draw a piece of the curve of run `at`."""
    (drawn,) = axes.plot([0.0, 0.08], [height, height], color=ANY_GROUND.rank(at), linewidth=1.6)
    if dash := dashes(at):
        drawn.set_dashes(dash)
