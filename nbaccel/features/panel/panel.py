"""Panel: one run at one moment as HTML, and the bundle that a notebook shows of it. Pure; runs in the kernel.

A small table and inline SVG: no script and no external resource. While the run goes on, the height depends on nothing
but the available width: if that is small, the table of ranks stands below the curves. Words that do not fit into a line
are left out as a whole, never cut. The text beside the panel carries every number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from nbaccel.base.quantities import gigabytes, listed, number, rate, ticks
from nbaccel.display.history import History, Usage
from nbaccel.display.series import Line, are_equal
from nbaccel.display.summary import (
    RUNNING,
    RunFacts,
    RunState,
    curve_words,
    lag_words,
    loss_of_records,
    mark_words,
    not_finite_words,
    paces,
    text,
    times,
    where,
)
from nbaccel.features.panel.shared_plots import plots_of, smoothed
from nbaccel.features.panel.svg import STYLE, Scale, colour, dashes, plot

if TYPE_CHECKING:
    from nbaccel.features.map.item_count import ItemCount

__all__ = [
    "SIGNS",
    "Panel",
]

_LINE_PX, _ROW_PX, _PLOT_PX, _STEPS_PX = 20, 22, 116, 14
_MOST_ROWS = 8
_MANY_PLOTS = 3
"""Number of plots from which they stand above the table at any width, in as many rows as they need."""
_POINTS = 800
"""Number of points that all lines of a panel share; it limits the size of a frame, drawn every half second."""
_HELD_OUT_POINTS = 60
_STALE = (
    '<p class="stale soft">nothing new for 20 s; if this page was reloaded, <code>%accelerate last</code> shows the run'
    "</p>"
)
"""Becomes visible 20 seconds after the frame: a reloaded page, and a saved file, get no new frame."""
SIGNS = {"done": "✓", "failed": "✕", "stopped": "■"}
"""Signs shown beside the word for how a run ended, with the same meaning."""


@dataclass(frozen=True)
class Panel:
    """Pictures of `history`.

    >>> panel = Panel(History(2), RunFacts("Cell In[5]"))
    >>> sorted(panel.bundle(seconds=1.0))
    ['text/html', 'text/plain']
    """

    history: History
    facts: RunFacts = field(default_factory=RunFacts)

    def bundle(self, seconds: float, state: RunState = RUNNING) -> dict[str, str]:
        """Return the run after `seconds`, by MIME type."""
        return {
            "text/plain": text(self.history, self.facts, seconds, state),
            "text/html": f"<style>{STYLE}</style>{self.html(seconds, state)}",
        }

    @property
    def _table_px(self) -> int:
        return _LINE_PX + _ROW_PX * min(self.history.world_size, _MOST_ROWS)

    @property
    def _figure_px(self) -> int:
        """Return the height of a curve with its words: that of the table beside it, or more."""
        return max(_LINE_PX + _PLOT_PX + _STEPS_PX, self._table_px)

    def html(self, seconds: float, state: RunState = RUNNING) -> str:
        """Return the HTML of the run after `seconds`, without the style sheet."""
        names = self.history.names
        plots = plots_of(self.facts.shown(names), names)
        drawn = [name for main, beside in plots for name in (main, *beside)]
        return (
            f'<div class="nbaccel" role="group" aria-label="{escape(self.facts.title)}">'
            f"{self._head(state)}{self._progress(seconds, state)}"
            f'<div class="body of{min(len(plots), _MANY_PLOTS)}">{self._plots(plots, state)}{self._table(drawn)}</div>'
            f"{self._foot(drawn, state)}{_bars(state)}{'' if state.is_over else _STALE}</div>"
        )

    def _head(self, state: RunState) -> str:
        setting = self.facts.setting_of(self.history).split(", ")
        return (
            f'<div class="row"><b class="{state.word}">{SIGNS.get(state.word, "●")} {state.word}</b>'
            f'<b>{escape(self.facts.title)}</b><span class="fits soft">{_parts(setting)}</span>'
            f"{_hint(state)}</div>"
        )

    def _progress(self, seconds: float, state: RunState) -> str:
        items = self.history.items
        if items is None:
            nothing = "no number was reported" if state.is_over and not self.history.has_curves else ""
            places = list(filter(None, [*where(self.history), nothing])) or ([] if state.is_over else ["running"])
            done = self.history.phase.bar.value
        else:  # another notebook may have had a share: at the end the sentence counts all of them
            places = [] if state.is_over else where(self.history)
            done = 1.0 if state.word == "done" else items.part
        label = escape(", ".join(places)) or "progress"
        speeds = [*times(self.history, seconds, state), *paces(self.history, state)]
        return (
            f'<div class="row at"><span class="fits">{_parts(places)}</span>'
            f'<span class="fits">{_parts(speeds)}</span></div>'
            # Without a value the browser would animate the bar.
            f'<progress max="1" value="{done or 0:.3f}" aria-label="{label}"></progress>'
        )

    # --- curves ------------------------------------------------------------------------------------------------

    def _plots(self, of: list[tuple[str, list[str]]], state: RunState) -> str:
        if of:
            plots = "".join(self._plot(name, beside, _POINTS // len(of)) for name, beside in of)
        elif state.is_over or self.history.items is not None:
            return ""  # no empty place for curves that never come
        else:
            plots = self._figure('<div class="row soft">no numbers yet</div>')
        return f'<div class="plots">{plots}</div>'

    def _figure(self, content: str) -> str:
        return f'<figure style="height:{self._figure_px}px">{content}</figure>'

    def _plot(self, name: str, beside: list[str], points: int) -> str:
        everything = self.history.phase.series
        series = everything.get(name)
        lines = 3 if series is None else len(series.ranks) + 3  # the mean, and both edges of the band
        drawn = None if series is None else series.coarser(max(24, min(160, points // lines)))
        mean = None if drawn is None else drawn.mean()
        if series is None or drawn is None or not mean:
            there = listed([other for other in everything if other != name])
            aside = f"nothing yet{there and f'; there is {there}'}" if series is None else not_finite_words(series)
            return self._figure(
                f'<div class="row fits"><b>{escape(name)}</b><span class="soft">{escape(aside)}</span></div>'
            )
        marks = [mark.step for mark in self.history.marks if mark.kind == "oom" and mark.step is not None]
        held_out = {other: everything[other].coarser(_HELD_OUT_POINTS).mean() for other in beside}
        held_out = {other: line for other, line in held_out.items() if line}
        scale = Scale.of(_together([mean, *held_out.values()]))
        first = min(line.step[0] for line in (mean, *held_out.values()))
        latest = max(step for one in (name, *held_out) for step in everything[one].newest.values())
        ranks = {rank: drawn.line(rank) for rank in drawn.ranks}
        picture = plot(
            mean,
            {} if are_equal(ranks.values()) else ranks,
            scale,
            label="; ".join(curve_words(one, everything[one]) for one in (name, *beside)),
            height_px=self._figure_px - _LINE_PX - _STEPS_PX,
            marks=marks[-8:],
            smooth=smoothed(mean),
            beside=list(held_out.values()),
        )
        others = "".join(
            f'<b class="val">{"╌" if at else "●"} {escape(other)} {number(everything[other].latest)}</b>'
            for at, other in enumerate(beside)
        )
        if series.not_finite:
            kind, asides = "failed", [not_finite_words(series)]
        else:
            lowest = f"lowest {number(series.lowest)}" if name.lower().endswith("loss") else ""
            kind, asides = "soft", [lowest, "log scale" if scale.is_log else ""]
        words = "".join(f'<span class="{kind}">{aside}</span>' for aside in asides if aside)
        low, high = ticks(scale.low, scale.high)
        return self._figure(
            f'<div class="row fits"><b>{escape(name)} {number(series.latest)}</b>{others}{words}</div>'
            f'<div class="plot"><div class="axis" aria-hidden="true"><span>{high}</span>'
            f"<span>{low}</span></div>{picture}</div>"
            f'<div class="steps" aria-hidden="true"><span>step {first:,}</span><span>{latest:,}</span></div>'
        )

    # --- ranks -------------------------------------------------------------------------------------------------

    def _table(self, names: list[str]) -> str:
        ranks = range(self.history.world_size)
        first = names[:1] if len(ranks) > 1 else []  # of one rank, the number stands above the plot
        columns = ["rank", *first, "memory", "in use", "peak"]
        if self.history.items is not None:
            columns = ["rank", "items", "items/s", "failed", *first, "memory"]
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in columns)
        scrolls = ' tabindex="0" role="region" aria-label="all ranks"' if len(ranks) > _MOST_ROWS else ""
        return (
            f'<div class="ranks" style="max-height:{self._table_px}px"{scrolls}><table><thead><tr>{heads}</tr></thead>'
            f"<tbody>{''.join(self._row(rank, first) for rank in ranks)}</tbody></table></div>"
        )

    def _row(self, rank: int, names: list[str]) -> str:
        history = self.history
        series = [history.phase.series.get(name) for name in names]
        values = [None if one is None else one.last.get(rank) for one in series]
        numbers = "".join(f"<td>{'' if value is None else number(value)}</td>" for value in values)
        memory = _memory_cells(history.memory.get(rank), rank, self.facts.device(rank))
        if history.items is not None:
            numbers = f"{_item_cells(history.items, rank)}{numbers}"
            memory = _memory_cell(history.memory.get(rank), rank)
        swatch = _swatch(rank) if history.world_size > 1 else ""
        lag = lag_words(history, rank)
        return f'<tr><th scope="row">{swatch}{rank}{f", {lag}" if lag else ""}</th>{numbers}{memory}</tr>'

    # --- the last line -----------------------------------------------------------------------------------------

    def _foot(self, names: list[str], state: RunState) -> str:
        """Return the last line: how the run ended; before that the latest mark, and the numbers that are not drawn."""
        if state.sentence:
            sentence = escape(state.sentence)
            return f'<p class="{state.word}" role="status">{sentence}</p>'
        history = self.history
        others = [f"{name} {number(one.latest)}" for name, one in history.phase.series.items() if name not in names]
        words = [*map(mark_words, history.marks[-1:]), loss_of_records(history), *others]
        return f'<p class="row soft fits">{_parts(list(filter(None, words)))}</p>'


def _together(lines: list[Line]) -> Line:
    """Return a line of one point whose edges hold all `lines`."""
    low, high = min(min(line.low) for line in lines), max(max(line.high) for line in lines)
    return Line((0,), (low,), (low,), (high,))


def _parts(words: list[str]) -> str:
    """Return `words` as spans, of which as many are visible as fit. The comma belongs to the word after it."""
    return "".join(f"<span>{', ' if at else ''}{escape(word)}</span>" for at, word in enumerate(words))


def _hint(state: RunState) -> str:
    return f'<span class="soft">{escape(state.hint)}</span>' if state.hint else ""


def _bars(state: RunState) -> str:
    rows = escape("\n".join(state.bars))
    return f'<pre class="bars">{rows}</pre>' if state.bars else ""


def _swatch(rank: int) -> str:
    """Return a piece of the rank's line: the table is the legend."""
    dash = " ".join(f"{length:g}" for length in dashes(rank)) or "none"
    return (
        f'<svg class="swatch" aria-hidden="true"><path d="M0 4H24" stroke="{colour(rank)}" stroke-dasharray="{dash}"/>'
        "</svg> "
    )


def _item_cells(items: ItemCount, rank: int) -> str:
    """Return what a rank of a map has done, its speed, and what failed."""
    per_s = items.per_s(rank)
    speed = "" if per_s is None else rate(per_s, "items").partition(" ")[0]
    return f"<td>{items.finished_by(rank):,}</td><td>{speed}</td><td>{items.failed_of(rank):,}</td>"


def _memory_cell(usage: Usage | None, rank: int) -> str:
    """Return the memory of a rank in one cell, for tables that have more to show."""
    if usage is None:
        return "<td></td>"
    return f"<td>{_memory_bar(usage, rank)} {_memory_used(usage)}</td>"


def _memory_cells(usage: Usage | None, rank: int, device: str) -> str:
    if usage is None:
        return f"<td>{escape(device)}</td><td></td><td></td>"
    return (
        f"<td>{escape(device)}{_memory_bar(usage, rank)}</td><td>{_memory_used(usage)}</td>"
        f"<td>{gigabytes(usage.peak_bytes)}</td>"
    )


def _memory_bar(usage: Usage, rank: int) -> str:
    """Return a bar of the used part and the peak; empty if the limit is unknown."""
    if not usage.limit_bytes:
        return ""
    return (
        f' <span class="bar"><i style="width:{usage.used_part:.0%};background:{colour(rank)}"></i>'
        f'<u style="left:{usage.peak_part * 97:.0f}%"></u></span>'
    )


def _memory_used(usage: Usage) -> str:
    limit = f" of {gigabytes(usage.limit_bytes)}" if usage.limit_bytes else ""
    return f"{gigabytes(usage.used_bytes).removesuffix(' GB' if limit else '')}{limit}"
