"""Board: several runs in one view, such as the folds or the sweep of one cell. Pure; runs in the kernel.

The run that goes on is shown as a panel. Each run that is over is one row: how it ended, its last numbers, its curve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from nbaccel.view.panel import SIGNS, Panel
from nbaccel.view.plot import Scale, spark
from nbaccel.view.series import Line
from nbaccel.view.state import RUNNING, State
from nbaccel.view.text import line
from nbaccel.view.theme import STYLE
from nbaccel.view.words import duration, number, plural

__all__ = ["Board", "Row"]

_MOST_ROWS = 100
"""Number of rows that are kept: the first half and the latest half; 700 bytes each."""
_SPARK_POINTS, _POINTS = 48, 120
_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One run that is over.

    number: 1 for the first run of the board.  name: name of the curve, empty if there is none.  curve: the mean over
    ranks.
    latest: the mean of the latest values of the ranks.  text, html: the row as text and as HTML.
    """

    number: int
    title: str
    word: str
    seconds: float
    name: str
    curve: Line
    latest: float
    text: str
    html: str


class Board:
    """The runs of one cell, oldest first.

    ends: number of runs by the word for how they ended.  rows: the first fifty and the latest fifty of these runs.

    >>> from nbaccel.view.history import History
    >>> board = Board()
    >>> board.finish(Panel(History(1)), 2.0, State("done", "done in 2.0 s"))
    >>> board.bundle()["text/plain"]
    '1. run: done in 2.0 s'
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.rows: list[Row] = []

    @property
    def runs(self) -> int:
        """Return the number of runs that are over."""
        return self.ends.total()

    def finish(self, panel: Panel, seconds: float, state: State) -> None:
        """Turn the run of `panel`, which is over, into a row."""
        self.ends[state.word] += 1
        self.rows.append(_row(self.runs, panel, seconds, state))
        if len(self.rows) > _MOST_ROWS:
            del self.rows[_MOST_ROWS // 2]

    def bundle(self, panel: Panel | None = None, seconds: float = 0.0, state: State = RUNNING) -> dict[str, str]:
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


def _row(at: int, panel: Panel, seconds: float, state: State) -> Row:
    history, facts = panel.history, panel.facts
    series = history.phase.series
    name = next(iter(facts.shown(list(series))), "")
    one = series.get(name)
    curve = Line() if one is None else one.coarser(_POINTS).mean()
    drawn = "" if one is None or not curve else _spark(name, one.coarser(_SPARK_POINTS).mean())
    numbers = [f"{name} {number(one.latest)}" for name, one in series.items()]
    shown = ", ".join([*numbers[:_MOST_NUMBERS], *(["…"] if len(numbers) > _MOST_NUMBERS else [])])
    return Row(
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
    )


def _spark(name: str, mean: Line) -> str:
    label = f"{name} from {number(mean.mean[0])} to {number(mean.mean[-1])}"
    return spark(mean, Scale.of(mean), label)
