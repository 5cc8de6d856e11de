"""Board: several runs in one place, such as the folds or the sweep of one cell. Pure; runs in the kernel.

The run that goes on is a panel; each one that is over is a row: how it ended, its last numbers, its curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from nbaccel.view.panel import SIGNS, Panel
from nbaccel.view.plot import Scale, spark
from nbaccel.view.state import RUNNING, State
from nbaccel.view.text import line
from nbaccel.view.theme import STYLE
from nbaccel.view.words import duration, number, plural

__all__ = ["Board"]

_MOST_ROWS = 100
"""The first half of them and the latest half; 700 bytes each."""
_SPARK_POINTS = 48
_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class _Row:
    """A run that is over."""

    text: str
    html: str


class Board:
    """The runs of one place, oldest first.

    >>> from nbaccel.view.history import History
    >>> board = Board()
    >>> board.finish(Panel(History(1)), 2.0, State("done", "done in 2.0 s"))
    >>> board.bundle()["text/plain"]
    '1. run: done in 2.0 s'
    """

    def __init__(self) -> None:
        self.runs = 0
        self._rows: list[_Row] = []

    def finish(self, panel: Panel, seconds: float, state: State) -> None:
        """The run of `panel` is over: from now on it is a row."""
        self.runs += 1
        self._rows.append(_row(self.runs, panel, seconds, state))
        if len(self._rows) > _MOST_ROWS:
            del self._rows[_MOST_ROWS // 2]

    def bundle(self, panel: Panel | None = None, seconds: float = 0.0, state: State = RUNNING) -> dict[str, str]:
        """All runs by MIME type; `panel` is the one that goes on, if one does."""
        if panel is not None and not self._rows:
            return panel.bundle(seconds, state)
        now = {} if panel is None else panel.bundle(seconds, state)
        current = "" if panel is None else panel.html(seconds, state)
        return {
            "text/plain": "\n".join([*self._text_rows(), *filter(None, [now.get("text/plain")])]),
            "text/html": f"<style>{STYLE}</style>{self._html_rows()}{current}",
        }

    @property
    def _left_out(self) -> int:
        return self.runs - len(self._rows)

    def _text_rows(self) -> Iterator[str]:
        for at, row in enumerate(self._rows):
            if self._left_out and at == _MOST_ROWS // 2:
                yield f"… {plural(self._left_out, 'more run')}"
            yield row.text

    def _html_rows(self) -> str:
        rows = [row.html for row in self._rows]
        if self._left_out:
            rows.insert(_MOST_ROWS // 2, f'<tr><td colspan="6">… {plural(self._left_out, "more run")}</td></tr>')
        heads = "".join(f'<th scope="col">{head}</th>' for head in ("run", "", "", "", "latest", "time"))
        return (
            '<div class="nbaccel runs" tabindex="0" role="region" aria-label="finished runs"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


def _row(at: int, panel: Panel, seconds: float, state: State) -> _Row:
    history, facts = panel.history, panel.facts
    series = history.phase.series
    names = facts.shown(list(series))
    curve = ""
    if names and (one := series.get(names[0])) is not None and (mean := one.coarser(_SPARK_POINTS).mean()):
        curve = spark(mean, Scale.of(mean), f"{names[0]} from {number(mean.mean[0])} to {number(mean.mean[-1])}")
    numbers = [f"{name} {number(one.latest)}" for name, one in series.items()]
    shown = ", ".join([*numbers[:_MOST_NUMBERS], *(["…"] if len(numbers) > _MOST_NUMBERS else [])])
    return _Row(
        f"{at}. {facts.title}: {line(history, facts, seconds, state)}",
        f'<tr><th scope="row">{at}</th><td class="left {state.word}">{SIGNS.get(state.word, "")} {state.word}</td>'
        f'<td class="left">{escape(facts.title)}</td><td>{curve}</td><td>{escape(shown)}</td>'
        f"<td>{duration(seconds)}</td></tr>",
    )
