"""Panel: one run at one moment as HTML, and the bundle that a notebook shows of it. Pure; runs in the kernel.

A small table and inline SVG: no script, nothing from elsewhere, and a height that depends on nothing that changes
while the run goes on. The text beside it carries every number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from nbaccel.view.history import History
from nbaccel.view.plot import Scale, plot
from nbaccel.view.series import Series
from nbaccel.view.state import RUNNING, Facts, State
from nbaccel.view.text import (
    curve_words,
    lag_words,
    loss_of_records,
    mark_words,
    not_finite_words,
    text,
    times,
    where,
)
from nbaccel.view.theme import STYLE, colour, dashes
from nbaccel.view.usage import Usage
from nbaccel.view.words import gigabytes, number

__all__ = ["SIGNS", "Panel"]

_LINE_PX, _ROW_PX, _PLOT_PX, _STEPS_PX, _BAR_PX = 20, 22, 116, 14, 18
_PADDING_PX = 18
_MOST_ROWS = 8
_MOST_PLOTS = 3
_POINTS = 840
"""Points that all lines of a panel share: what half a second's frame may weigh."""
SIGNS = {"done": "✓", "failed": "✕", "stopped": "■"}
"""Beside the word, which says the same."""


@dataclass(frozen=True)
class Panel:
    """Pictures of `history`.

    >>> panel = Panel(History(2), Facts("Cell In[5]"))
    >>> sorted(panel.bundle(seconds=1.0))
    ['text/html', 'text/plain']
    """

    history: History
    facts: Facts = field(default_factory=Facts)

    def bundle(self, seconds: float, state: State = RUNNING) -> dict[str, str]:
        """The run after `seconds`, by MIME type."""
        return {
            "text/plain": text(self.history, self.facts, seconds, state),
            "text/html": f"<style>{STYLE}</style>{self.html(seconds, state)}",
        }

    @property
    def height_px(self) -> int:
        """The outer height without bars, by the number of ranks alone."""
        return _PADDING_PX + 2 * _LINE_PX + _LINE_PX + self._body_px + 4 + _LINE_PX

    @property
    def _body_px(self) -> int:
        table_px = _LINE_PX + _ROW_PX * min(self.history.world_size, _MOST_ROWS)
        return max(_LINE_PX + _PLOT_PX + _STEPS_PX, table_px)

    def html(self, seconds: float, state: State = RUNNING) -> str:
        """The run after `seconds`, without the style sheet."""
        names = self.facts.shown(self.history.names)[:_MOST_PLOTS]
        height_px = self.height_px + _BAR_PX * len(state.bars)
        return (
            f'<div class="nbaccel" role="group" aria-label="{escape(self.facts.title)}" '
            f'style="height:{height_px}px">{self._head(state)}{self._progress(seconds, state)}'
            f'<div class="body" style="height:{self._body_px}px">{self._plots(names, state)}{self._table(names)}</div>'
            f"{self._foot(names, state)}{_bars(state)}</div>"
        )

    def _head(self, state: State) -> str:
        return (
            f'<div class="row"><b class="{state.word}">{SIGNS.get(state.word, "●")} {state.word}</b>'
            f'<b>{escape(self.facts.title)}</b><span class="wide soft">{escape(self.facts.setting)}</span>'
            f"{_hint(state)}</div>"
        )

    def _progress(self, seconds: float, state: State) -> str:
        place = escape(", ".join(where(self.history))) or ("" if state.is_over else "running")
        when = escape(", ".join(times(self.history, seconds, state)))
        done = self.history.phase.bar.value
        return (
            f'<div class="row"><span class="wide">{place}</span><span>{when}</span></div>'
            # One without a value would move by itself.
            f'<progress max="1" value="{done or 0:.3f}" aria-label="{place or "progress"}"></progress>'
        )

    # --- curves ------------------------------------------------------------------------------------------------

    def _plots(self, names: list[str], state: State) -> str:
        series = self.history.phase.series
        if not names:
            words = "no number was reported" if state.is_over else "no numbers yet"
            return f'<figure><div class="row soft">{words}</div></figure>'
        return "".join(self._plot(name, series.get(name), _POINTS // len(names)) for name in names)

    def _plot(self, name: str, series: Series | None, points: int) -> str:
        lines = 3 if series is None else len(series.ranks) + 3  # the mean, and both edges of the band
        drawn = None if series is None else series.coarser(max(40, min(160, points // lines)))
        mean = None if drawn is None else drawn.mean()
        if series is None or drawn is None or not mean:
            aside = "nothing yet" if series is None else not_finite_words(series)
            return (
                f'<figure><div class="row"><b>{escape(name)}</b><span class="wide soft">{aside}</span></div></figure>'
            )
        marks = [mark.step for mark in self.history.marks if mark.kind == "oom" and mark.step is not None]
        scale, latest = Scale.of(mean), max(series.newest.values())
        ranks = drawn.ranks if len(drawn.ranks) > 1 else []
        picture = plot(
            mean,
            {rank: drawn.line(rank) for rank in ranks},
            scale,
            label=curve_words(name, series),
            height_px=self._body_px - _LINE_PX - _STEPS_PX,
            marks=marks[-8:],
        )
        if series.not_finite:
            kind, aside = "failed", not_finite_words(series)
        else:
            lowest = f"lowest {number(series.lowest)}" if name.lower().endswith("loss") else ""
            kind, aside = "soft", ", ".join(filter(None, [lowest, "log scale" if scale.is_log else ""]))
        return (
            f'<figure><div class="row"><b>{escape(name)} {number(series.latest)}</b>'
            f'<span class="wide {kind}">{aside}</span></div>'
            f'<div class="plot"><div class="axis" aria-hidden="true"><span>{number(scale.high)}</span>'
            f"<span>{number(scale.low)}</span></div>{picture}</div>"
            f'<div class="steps" aria-hidden="true"><span>step {mean.step[0]:,}</span><span>{latest:,}</span>'
            "</div></figure>"
        )

    # --- ranks -------------------------------------------------------------------------------------------------

    def _table(self, names: list[str]) -> str:
        ranks = range(self.history.world_size)
        first = names[:1] if len(ranks) > 1 else []  # of one rank, the number stands above the plot
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ["rank", *first, "memory", "in use", "peak"])
        scrolls = ' tabindex="0" role="region" aria-label="all ranks"' if len(ranks) > _MOST_ROWS else ""
        return (
            f'<div class="ranks"{scrolls}><table><thead><tr>{heads}</tr></thead>'
            f"<tbody>{''.join(self._row(rank, first) for rank in ranks)}</tbody></table></div>"
        )

    def _row(self, rank: int, names: list[str]) -> str:
        history = self.history
        series = [history.phase.series.get(name) for name in names]
        values = [None if one is None else one.last.get(rank) for one in series]
        numbers = "".join(f"<td>{'' if value is None else number(value)}</td>" for value in values)
        swatch = _swatch(rank) if history.world_size > 1 else ""
        lag = lag_words(history, rank)
        return (
            f'<tr><th scope="row">{swatch}{rank}{f", {lag}" if lag else ""}</th>{numbers}'
            f"{_memory_cells(history.memory.get(rank), rank, self.facts.device(rank))}</tr>"
        )

    # --- the last line -----------------------------------------------------------------------------------------

    def _foot(self, names: list[str], state: State) -> str:
        """How it ended; before that what happened last, and the numbers that are not drawn."""
        if state.sentence:
            sentence = escape(state.sentence)
            return f'<p class="row {state.word}" role="status"><span class="wide">{sentence}</span></p>'
        history = self.history
        others = [f"{name} {number(one.latest)}" for name, one in history.phase.series.items() if name not in names]
        words = [*map(mark_words, history.marks[-1:]), loss_of_records(history), ", ".join(others)]
        return f'<p class="row soft"><span class="wide">{escape("; ".join(filter(None, words)))}</span></p>'


def _hint(state: State) -> str:
    return f'<span class="soft">{escape(state.hint)}</span>' if state.hint else ""


def _bars(state: State) -> str:
    rows = escape("\n".join(state.bars))
    return f'<pre class="bars">{rows}</pre>' if state.bars else ""


def _swatch(rank: int) -> str:
    """A piece of the rank's line: the table is the legend."""
    dash = " ".join(f"{length:g}" for length in dashes(rank)) or "none"
    return (
        f'<svg style="width:24px;height:8px" aria-hidden="true"><path d="M0 4H24" stroke="{colour(rank)}" '
        f'stroke-width="2" stroke-dasharray="{dash}"/></svg> '
    )


def _memory_cells(usage: Usage | None, rank: int, device: str) -> str:
    if usage is None:
        return f"<td>{escape(device)}</td><td></td><td></td>"
    bar = (
        f' <span class="bar" aria-hidden="true"><i style="width:{usage.used_part:.0%};background:{colour(rank)}"></i>'
        f'<u style="left:{usage.peak_part * 97:.0f}%"></u></span>'
    )
    limit = f" of {gigabytes(usage.limit_bytes)}" if usage.limit_bytes else ""
    used = gigabytes(usage.used_bytes).removesuffix(" GB" if limit else "")
    return (
        f"<td>{escape(device)}{bar if limit else ''}</td><td>{used}{limit}</td><td>{gigabytes(usage.peak_bytes)}</td>"
    )
