"""The runs of a sweep in one table: those that wait, that go on, and that are over. Runs in the kernel; starts nothing.

A `SweepRow` is one configuration. `SweepTable` makes text and HTML of all rows at one moment. A `SweepView` shows the
table while the sweep goes on: in the display of its cell, or as a line of text for each run that has ended. What stays
is one picture of all curves, drawn as for the runs of a loop (`comparison`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from nbaccel.base.hardware import Platform
from nbaccel.base.quantities import duration, number, plural
from nbaccel.display.attendance import runs_unattended
from nbaccel.display.history import History
from nbaccel.display.run_view import TICK_SLACK_S, PanelSink
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.display.views import Views
from nbaccel.features.panel.display_slot import DisplaySlot
from nbaccel.features.panel.panel import SIGNS, Panel
from nbaccel.features.panel.svg import STYLE, Scale, spark
from nbaccel.output.painter import Screen
from nbaccel.output.screens import ConsoleScreen, JupyterScreen

__all__ = [
    "SweepRow",
    "SweepTable",
    "SweepView",
    "view_of",
]

_FRAME_S = 0.5
_LINE_S = 30.0
_SHARE_OF_CORE = 0.03
_BYTES_PER_S = 30_000
_MOST_ROWS = 60
_MOST_NUMBERS = 3
_SPARK_POINTS = 48
_ORDER = ("running", "waiting", "done", "failed", "stopped")


@dataclass(slots=True)
class SweepRow:
    """One run of a sweep.

    Args:
        title: Its values, "fold=0, lr=0.001".
        word: "waiting", "running", "done", "failed" or "stopped".
        place: What it runs on, "GPU 1" or "slot 2"; empty while it waits.
        began_at: On the clock of the view.
        seconds: Its duration, once it is over.
        why: How it failed, in one line.
        is_found: An earlier sweep has done it.
    """

    title: str
    word: str = "waiting"
    place: str = ""
    history: History = field(default_factory=History)
    facts: RunFacts = field(default_factory=RunFacts)
    began_at: float = 0.0
    seconds: float = 0.0
    why: str = ""
    is_found: bool = False

    @property
    def is_over(self) -> bool:
        return self.word not in ("waiting", "running")

    def lasts(self, now: float) -> float | None:
        """Return the seconds that the run has taken; None if it has not begun."""
        if self.word == "waiting" or (self.word == "stopped" and not self.began_at):
            return None
        return self.seconds if self.is_over else now - self.began_at

    @property
    def numbers(self) -> str:
        """Return its latest numbers."""
        series = self.history.phase.series
        shown = [f"{name} {number(one.latest)}" for name, one in list(series.items())[:_MOST_NUMBERS]]
        return ", ".join([*shown, *(["…"] if len(series) > _MOST_NUMBERS else [])])

    def line(self, now: float) -> str:
        """Return the run in one line.

        Example:
            >>> SweepRow("lr=0.1", "done", "slot 1", seconds=2.0).line(9.0)
            'lr=0.1: done on slot 1, 2 s'
        """
        lasts = self.lasts(now)
        where = f" on {self.place}" if self.place and not self.is_found else ""
        state = "not begun" if self.word == "stopped" and lasts is None else self.word
        words = [f"{state}{' earlier' if self.is_found else where}", self.numbers]
        words.append("" if lasts is None else duration(lasts))
        return f"{self.title}: {', '.join(filter(None, words))}{f': {self.why}' if self.why else ''}"


class SweepTable:
    """All rows of a sweep, in the order of its configurations.

    Args:
        title: The sweep in words, "sweep of train".
        began_at: On the clock of the view.

    Example:
        >>> table = SweepTable("sweep of train", [SweepRow("lr=0.1", "done"), SweepRow("lr=0.2")], began_at=0.0)
        >>> table.counts
        '1 waiting, 1 done'
    """

    def __init__(self, title: str, rows: Sequence[SweepRow], began_at: float) -> None:
        self.title = title
        self.rows = rows
        self.began_at = began_at

    @property
    def counts(self) -> str:
        """Return the number of runs by their state."""
        counted = Counter(row.word for row in self.rows)
        return ", ".join(f"{counted[word]} {word}" for word in _ORDER if counted[word])

    def failures(self) -> Iterator[str]:
        """Yield a line for the first run that failed in each way, and one for others that failed so.

        Example:
            >>> rows = [SweepRow(f"lr={lr}", "failed", "slot 1", seconds=2.0, why="ValueError: no") for lr in range(5)]
            >>> list(SweepTable("sweep", rows, 0.0).failures())
            ['1. lr=0: failed on slot 1, 2 s: ValueError: no', '4 more runs failed alike']
        """
        ways: dict[str, list[int]] = {}
        for at, row in enumerate(self.rows):
            if row.word == "failed":
                ways.setdefault(row.why, []).append(at)
        for first, *others in ways.values():
            row = self.rows[first]
            yield f"{first + 1}. {row.line(row.began_at + row.seconds)}"
            if others:
                yield f"{plural(len(others), 'more run')} failed alike"

    def bundle(self, now: float, hint: str = "") -> dict[str, str]:
        """Return the sweep at `now`, by MIME type.

        Args:
            hint: How to end it; empty if that is visible anyway.
        """
        seconds = now - self.began_at
        lines = [f"{at}. {row.line(now)}" for at, row in self._shown()]
        return {
            "text/plain": "\n".join([f"{self.title}: {self.counts}, {duration(seconds)}", *lines, *self._left_out()]),
            "text/html": f"<style>{STYLE}</style>{self._html(now, seconds, hint)}",
        }

    def _shown(self) -> list[tuple[int, SweepRow]]:
        """Return rows with their numbers; of very many, those that go on, those that failed and the latest ones."""
        rows = list(enumerate(self.rows, 1))
        if len(rows) <= _MOST_ROWS:
            return rows
        first = [at for at, row in rows if row.word in ("running", "failed", "stopped")]
        rest = [at for at, row in reversed(rows) if row.word == "done"]
        rest += [at for at, row in rows if row.word == "waiting"]
        chosen = {*[*first, *rest][:_MOST_ROWS]}
        return [(at, row) for at, row in rows if at in chosen]

    def _left_out(self) -> list[str]:
        more = len(self.rows) - len(self._shown())
        return [f"… {plural(more, 'more run')}"] if more else []

    def _html(self, now: float, seconds: float, hint: str) -> str:
        over = sum(row.is_over for row in self.rows)
        word = "done" if over == len(self.rows) else "running"
        heads = ("run", "", "", "", "latest", "on", "time")
        head = "".join(f'<th scope="col">{name}</th>' for name in heads)
        rows = [self._row(at, row, now) for at, row in self._shown()]
        rows += [f'<tr><td colspan="{len(heads)}">{words}</td></tr>' for words in self._left_out()]
        action = f'<span class="fits soft"><span>{escape(hint)}</span></span>' if hint and over < len(self.rows) else ""
        return (
            f'<div class="nbaccel" role="group" aria-label="{escape(self.title)}"><div class="row">'
            f'<b class="{word}">{SIGNS.get(word, "●")} {word}</b><b>{escape(self.title)}</b>'
            f'<span class="fits soft"><span>{self.counts}</span></span><span class="soft">{duration(seconds)}</span>'
            f'{action}</div><progress max="1" value="{over / max(1, len(self.rows)):.3f}" '
            f'aria-label="{over} of {len(self.rows)} runs are over"></progress></div>'
            '<div class="nbaccel runs" style="max-height:420px" tabindex="0" role="region" '
            'aria-label="runs of the sweep"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _row(self, at: int, row: SweepRow, now: float) -> str:
        kind = "soft" if row.word == "waiting" else row.word
        sign = SIGNS.get(row.word, "●" if row.word == "running" else "○")
        lasts = row.lasts(now)
        numbers = escape(", ".join(filter(None, [row.numbers, row.why])))
        time_words = "earlier" if row.is_found else "" if lasts is None else duration(lasts)
        return (
            f'<tr><th scope="row">{at}</th><td class="left {kind}">{sign} {row.word}</td>'
            f'<td class="left">{escape(row.title)}</td><td>{_curve(row)}</td><td>{numbers}</td>'
            f"<td>{escape(row.place)}</td><td>{time_words}</td></tr>"
        )


def _curve(row: SweepRow) -> str:
    series = row.history.phase.series
    name = next(iter(row.facts.shown(list(series))), "")
    one = series.get(name)
    mean = None if one is None else one.coarser(_SPARK_POINTS).mean()
    if not mean:
        return ""
    return spark(mean, Scale.of(mean), f"{name} from {number(mean.mean[0])} to {number(mean.mean[-1])}")


class SweepView:
    """Shows a sweep on `screen`.

    Args:
        slot: The display of the cell, which holds the picture in the end; None where there is no display, but text
            only.
        is_live: The display shows the table while the sweep goes on.
        frames: Shows its states then.
    """

    def __init__(
        self,
        table: SweepTable,
        screen: Screen,
        slot: DisplaySlot | None,
        *,
        is_live: bool,
        frames: PanelSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self._screen = screen
        self._slot = slot
        self.is_live = is_live and slot is not None
        self._frames = frames or PanelSink()
        self._clock = clock
        self._due = table.began_at

    def say(self, line: str) -> None:
        """Write one line of the project."""
        self._screen.write("stdout", f"{line}\n")

    def ended(self, number: int) -> None:
        """Take note that run `number`, 1 for the first, is over."""
        row = self.table.rows[number - 1]
        if not self.is_live and not row.is_found:
            self.say(f"{number}. {row.line(self._clock())}")

    def due_in(self, now: float) -> float:
        """Return the seconds until `tick` has something to show."""
        return max(0.0, self._due - now)

    def tick(self, now: float) -> None:
        """Show what is due."""
        if now < self._due - TICK_SLACK_S:
            return
        if not self.is_live:
            if now > self.table.began_at + TICK_SLACK_S:
                self.say(f"{self.table.title}: {self.table.counts}, {duration(now - self.table.began_at)}")
            self._due = now + _LINE_S
            return
        self._frames.get_ready()
        cpu_s = time.thread_time()
        bundle = self.table.bundle(now, self._frames.hint)
        data = self._frames.show(dict(bundle))
        if data is not None and self._slot is not None:
            self._slot.show(self._screen, data)
        cpu_s = time.thread_time() - cpu_s
        self._due = now + max(_FRAME_S, cpu_s / _SHARE_OF_CORE, sum(map(len, bundle.values())) / _BYTES_PER_S)

    def end(self) -> None:
        """Show the result that stays. An error in that does not harm the sweep."""
        try:
            if self._slot is not None:
                self._slot.conclude_all(self._screen, list(self._results()), self.table.bundle(self._clock()))
        except Exception as trouble:
            self._screen.write("stderr", f"this sweep could not be drawn ({type(trouble).__name__}: {trouble})\n")
        finally:
            self._frames.close()

    def _results(self) -> Iterator[tuple[Panel, float, RunState]]:
        for row in self.table.rows:
            if row.word in ("done", "failed", "stopped"):
                state = RunState.ended(row.word, row.seconds, row.history.steps, row.why)
                yield Panel(row.history, row.facts), row.seconds, state


def view_of(
    views: Views,
    shell: Any,
    table: SweepTable,
    platform: Platform,
    *,
    is_plain: bool = False,
    frames: PanelSink | None = None,
) -> SweepView:
    """Return the view of a sweep, chosen as `views` chooses that of a run; the arguments are those of `Views.show`."""
    if shell is None or is_plain:
        return SweepView(table, ConsoleScreen(), None, is_live=False)
    if (drawn := views.drawn()) is None:
        return SweepView(table, JupyterScreen(shell), None, is_live=False)
    is_live = not runs_unattended(platform)
    return SweepView(table, JupyterScreen(shell), drawn.place_in(shell), is_live=is_live, frames=frames)
