"""Several runs in one view and in one figure, such as the folds or the sweep of a cell. Pure; runs in the kernel.

In a `RunComparison` the run that goes on is shown as a panel, and each run that is over is one row: how it ended, its
last numbers, its curve. `draw_runs` makes the figure that is left in the notebook after the cell: the curves in one
plot, and a line for each beside it, and so for each further metric below. It compares runs; the figure of one run shows
its ranks, memory and speed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbaccel.base.quantities import duration, number, plural
from nbaccel.display.series import Line
from nbaccel.display.summary import RUNNING, RunState, line
from nbaccel.features.panel.figure import PAPER, head_lines, logarithmic, sheet, trace
from nbaccel.features.panel.panel import SIGNS, Panel
from nbaccel.features.panel.shared_plots import held_out_beside
from nbaccel.features.panel.svg import STYLE, Scale, dashes, spark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "RunComparison",
    "RunRow",
    "draw_runs",
]

_MOST_ROWS = 100
"""Number of rows that are kept: the first half and the latest half; 700 bytes each."""
_SPARK_POINTS, _POINTS = 48, 120
_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run that is over.

    Args:
        number: 1 for the first run compared.
        name: Name of the curve, empty if there is none.
        curve: The mean over ranks.
        latest: The mean of the latest values of the ranks.
        text, html: The row as text and as HTML.
        label: A name for it, shown instead of the number.
        held_out: The curves of the same metric on held-out data, by name.
    """

    number: int
    title: str
    word: str
    seconds: float
    name: str
    curve: Line
    latest: float
    text: str = ""
    html: str = ""
    label: str = ""
    held_out: tuple[tuple[str, Line], ...] = ()


class RunComparison:
    """The runs of one cell, oldest first.

    Attributes:
        ends: Number of runs by the word for how they ended.
        rows: The first fifty and the latest fifty of these runs.

    Example:
        >>> from nbaccel.display.history import History
        >>> comparison = RunComparison()
        >>> comparison.finish(Panel(History(1)), 2.0, RunState("done", "done in 2 s"))
        >>> comparison.bundle()["text/plain"]
        '1. run: done in 2 s'
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.rows: list[RunRow] = []

    @property
    def runs(self) -> int:
        """Return the number of runs that are over."""
        return self.ends.total()

    def finish(self, panel: Panel, seconds: float, state: RunState) -> None:
        """Turn the run of `panel`, which is over, into a row."""
        self.add(_row(self.runs + 1, panel, seconds, state))

    def add(self, row: RunRow) -> None:
        """Add the row of a run that is over."""
        self.ends[row.word] += 1
        self.rows.append(row)
        if len(self.rows) > _MOST_ROWS:
            del self.rows[_MOST_ROWS // 2]

    def bundle(self, panel: Panel | None = None, seconds: float = 0.0, state: RunState = RUNNING) -> dict[str, str]:
        """Return all runs by MIME type; `panel` is the run that goes on, if there is one."""
        if panel is not None and not self.rows:
            return panel.bundle(seconds, state)
        now = {} if panel is None else panel.bundle(seconds, state)
        current = "" if panel is None else panel.html(seconds, state)
        return {
            "text/plain": "\n".join([*self._text_rows(), *filter(None, [now.get("text/plain")])]),
            "text/html": f"<style>{STYLE}</style>{self._html_rows()}{current}",
        }

    @property
    def left_out(self) -> int:
        """Return the number of runs between the first half of the rows and the latest half."""
        return self.runs - len(self.rows)

    def _text_rows(self) -> Iterator[str]:
        for at, row in enumerate(self.rows):
            if self.left_out and at == _MOST_ROWS // 2:
                yield f"… {plural(self.left_out, 'more run')}"
            yield row.text

    def _html_rows(self) -> str:
        rows = [row.html for row in self.rows]
        if self.left_out:
            rows.insert(_MOST_ROWS // 2, f'<tr><td colspan="6">… {plural(self.left_out, "more run")}</td></tr>')
        heads = "".join(f'<th scope="col">{head}</th>' for head in ("run", "", "", "", "latest", "time"))
        return (
            '<div class="nbaccel runs" tabindex="0" role="region" aria-label="finished runs"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


def _row(at: int, panel: Panel, seconds: float, state: RunState) -> RunRow:
    history, facts = panel.history, panel.facts
    series = history.phase.series
    name = next(iter(facts.shown(list(series))), "")
    one = series.get(name)
    curve = Line() if one is None else one.coarser(_POINTS).mean()
    drawn = "" if one is None or not curve else _spark(name, one.coarser(_SPARK_POINTS).mean())
    numbers = [f"{name} {number(one.latest)}" for name, one in series.items()]
    shown = ", ".join([*numbers[:_MOST_NUMBERS], *(["…"] if len(numbers) > _MOST_NUMBERS else [])])
    return RunRow(
        number=at,
        title=facts.title,
        word=state.word,
        seconds=seconds,
        name=name if one is not None else "",
        curve=curve,
        latest=math.nan if one is None else one.latest,
        text=f"{at}. {facts.title}: {line(history, facts, seconds, state)}",
        html=f'<tr><th scope="row">{at}</th><td class="left {state.word}">{SIGNS.get(state.word, "")} {state.word}'
        f'</td><td class="left">{escape(facts.title)}</td><td>{drawn}</td><td>{escape(shown)}</td>'
        f"<td>{duration(seconds)}</td></tr>",
        held_out=tuple(
            (other, series[other].coarser(_POINTS).mean()) for other in held_out_beside(name, series) if one is not None
        ),
    )


def _spark(name: str, mean: Line) -> str:
    label = f"{name} from {number(mean.mean[0])} to {number(mean.mean[-1])}"
    return spark(mean, Scale.of(mean), label)


_WIDTH_IN, _LINE_IN, _LEAST_IN = 9.4, 0.17, 2.7
_MOST_LINES = 16
_LONGEST_TITLE, _LONGEST_LINE = 34, 44
"""Characters of a title, and of a title with the words beside it."""
_UNNAMED = "#8b909880"
_MOST_HELD_OUT = 8
"""Number of runs up to which their curves on held-out data are drawn, too: of more, nobody tells them apart."""


def draw_runs(comparison: RunComparison, title: str = "", more: Sequence[RunComparison] = ()) -> Figure:
    """Return a new figure of all runs of `comparison` that are over; at most 16 are named, the first and the latest.

    Args:
        title: Written above; empty for their number and how they ended.
        more: The same runs by other metrics, each drawn below the one before.

    Example:
        >>> [axes.get_title(loc="left") for axes in draw_runs(RunComparison()).axes]
        ['no numbers were logged', '']
    """
    drawn = [comparison, *more]
    height_in = max(_LEAST_IN, 0.7 + _LINE_IN * (len(_first_and_latest(comparison.rows)) + 1))
    ends = ", ".join(f"{count} {word}" for word, count in comparison.ends.items())
    lines = head_lines(title or f"{plural(comparison.runs, 'run')}: {ends}", _WIDTH_IN)
    with sheet((_WIDTH_IN, height_in * len(drawn)), PAPER, lines) as figure:
        grid = figure.add_gridspec(len(drawn), 2, width_ratios=[1.0, 1.0])
        for at, each in enumerate(drawn):
            named = _first_and_latest(each.rows)
            name = next((name for name, _ in Counter(row.name for row in each.rows if row.name).most_common(1)), "")
            compared = [row for row in each.rows if row.name == name and row.curve]
            _curves(figure.add_subplot(grid[at, 0]), compared, {row.number for row in named}, name)
            _lines(figure.add_subplot(grid[at, 1]), each, named)
    return figure


def _first_and_latest(rows: Sequence[RunRow]) -> list[RunRow]:
    if len(rows) <= _MOST_LINES:
        return list(rows)
    half = _MOST_LINES // 2
    return [*rows[:half], *rows[-half:]]


def _curves(axes: Axes, rows: Sequence[RunRow], named: Collection[int], name: str) -> None:
    if not rows:
        axes.set_title("no numbers were logged")
        return
    beside = [(row.number, *each) for row in rows if row.number in named for each in row.held_out if each[1]]
    beside = beside if len({number for number, *_ in beside}) <= _MOST_HELD_OUT else []
    names = ", ".join(dict.fromkeys(each for _, each, _ in beside))
    axes.set_title(f"{name}{f'; with dots: {names}' if names else ''}", fontweight="bold")
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    for number_, _, line_ in beside:
        axes.plot(line_.step, line_.mean, color=PAPER.rank(number_ - 1), linewidth=0.8, marker="o", ms=2.6)
    for row in rows:
        if row.number in named:
            trace(axes, row.curve, row.number - 1, "", 1.2, PAPER)
        else:  # in the background: nobody tells a hundred curves apart
            axes.plot(row.curve.step, row.curve.mean, color=_UNNAMED, linewidth=0.6, zorder=1.5)
    low, high = min(min(row.curve.low) for row in rows), max(max(row.curve.high) for row in rows)
    if Scale.of(Line((0,), (low,), (low,), (high,))).is_log:
        logarithmic(axes)


def _lines(axes: Axes, comparison: RunComparison, rows: Sequence[RunRow]) -> None:
    """Write one line for each run, after a piece of its curve: the table is the legend."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    places = max(len(rows) + (len(rows) < comparison.runs), 8)
    axes.set_ylim(places, 0)
    write = functools.partial(axes.text, va="center", parse_math=False)  # a title may hold a "$"
    at = 0.5
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row.number > before.number + 1:
            write(0.1, at, f"… {plural(row.number - before.number - 1, 'more run')}")
            at += 1
        if row.curve:
            _sample(axes, row.number - 1, at)
        parts = ["" if row.word == "done" else row.word, f"{row.name} {number(row.latest)}" if row.name else ""]
        words, label = ", ".join(filter(None, parts)), row.label or f"{row.number}."
        most = min(_LONGEST_TITLE, max(8, _LONGEST_LINE - len(words) - len(label)))
        title = row.title if len(row.title) <= most else f"{row.title[: most - 1]}…"
        write(0.1, at, f"{label} {title}")
        write(0.84, at, words, ha="right")
        write(1.0, at, duration(row.seconds), ha="right")
        at += 1


def _sample(axes: Axes, at: int, height: float) -> None:
    """Draw a piece of the curve of run `at`."""
    (drawn,) = axes.plot([0.0, 0.08], [height, height], color=PAPER.rank(at), linewidth=1.6)
    if dash := dashes(at):
        drawn.set_dashes(dash)
