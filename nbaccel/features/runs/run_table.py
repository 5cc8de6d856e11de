"""Table of runs that are over: one line for each, as text and as HTML. Pure; runs in the kernel.

`TableRow` is the line of one run; whoever keeps runs makes them. The tables show all columns; in a narrow place the
HTML breaks long texts into lines, and leaves out when a run began, then its flags, its seed and its curve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nbaccel.base.quantities import duration, number, plural
from nbaccel.display.history import History
from nbaccel.display.series import Line
from nbaccel.display.summary import RunFacts, RunState, few_numbers
from nbaccel.features.panel.panel import SIGNS
from nbaccel.features.panel.svg import STYLE, Scale, spark

__all__ = [
    "TableRow",
    "differences",
    "html_table",
    "moment",
    "text_table",
]

_STYLE = (
    f"{STYLE}.nbaccel.runs.all{{max-height:440px}}"
    ".nbaccel.all td,.nbaccel.all th{vertical-align:top;line-height:22px}.nbaccel.all td.left{white-space:normal}"
    ".nbaccel.all td.name{overflow-wrap:anywhere;min-width:6em}.nbaccel.all td.left.wide{min-width:9em}"
    ".nbaccel.all td span{display:inline-block;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".nbaccel.all svg{max-width:60px}@container(max-width:860px){.nbaccel .widest{display:none}}"
    "@container(max-width:560px){.nbaccel .wide{display:none}}"
)
"""The panel's style sheet, and what the table of runs needs besides."""
_MOST_ROWS = 40
"""Number of rows that a table shows, the latest; each is a line of 150 characters."""
_LONGEST = {"cell": 26, "flags": 40, "numbers": 60, "ended": 72}
_SPARK_POINTS = 48
_HEADS = ("run", "began", "cell", "flags", "seed", "last numbers", "time", "how it ended")
_RIGHT = (0, 4, 6)
"""Columns of numbers, written flush right."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One run that is over.

    Args:
        number: Its number among the runs of the notebook.
        began: Seconds since 1970, 0 if unknown.
        cell: What ran.
        flags: As typed.
        curve, name: One curve to draw small, and its name; empty for none.
        numbers: The last numbers in words.
        word, ended: How it ended, in a word and in some.
    """

    number: int
    began: float
    cell: str
    flags: str
    seed: int | None
    name: str
    curve: Line
    numbers: str
    seconds: float
    word: str
    ended: str

    @classmethod
    def of(
        cls,
        number: int,
        history: History,
        facts: RunFacts,
        state: RunState,
        seconds: float,
        *,
        flags: str = "",
        seed: int | None = None,
        began: float = 0.0,
        notes: Sequence[str] = (),
    ) -> TableRow:
        """Return the row of the run with this history.

        Args:
            notes: Said after how it ended.

        Example:
            >>> TableRow.of(3, History(1), RunFacts("Cell In[5]"), RunState("done", "done in 2 s"), 2.0).text
            ('3', '', 'Cell In[5]', '', '', '', '2 s', 'done')
        """
        series = history.phase.series
        name = next((name for name in facts.shown(list(series)) if name in series), "")
        why = state.sentence.partition(": ")[2]
        steps = plural(history.steps, "step") if history.steps else ""
        failed = f"{history.items.failed:,} failed" if history.items is not None and history.items.failed else ""
        words = ", ".join(filter(None, [state.word, steps, failed, *notes]))
        return cls(
            number,
            began,
            facts.title,
            flags,
            seed,
            name,
            series[name].coarser(_SPARK_POINTS).mean() if name else Line(),
            ", ".join(few_numbers(history, facts)),
            seconds,
            state.word,
            f"{words}: {why}" if why else words,
        )

    @property
    def text(self) -> tuple[str, ...]:
        """Return the columns as text; what is long ends in "…"."""
        return (
            str(self.number),
            moment(self.began),
            _short(self.cell, "cell"),
            _short(self.flags, "flags"),
            "" if self.seed is None else str(self.seed),
            _short(self.numbers, "numbers"),
            duration(self.seconds),
            _short(self.ended, "ended"),
        )

    @property
    def html(self) -> str:
        """Return the row as HTML."""
        run, began, cell, flags, seed, numbers, seconds, ended = map(escape, self.text)
        flags = _unbroken(flags, " -")
        numbers = _unbroken(numbers, ", ")
        drawn = ""
        if self.curve:
            mean = self.curve.mean
            label = f"{self.name} from {number(mean[0])} to {number(mean[-1])}"
            drawn = spark(self.curve, Scale.of(self.curve), label)
        return (
            f'<tr><th scope="row">{run}</th><td class="widest">{began}</td><td class="left name">{cell}</td>'
            f'<td class="left wide">{flags}</td><td class="wide">{seed}</td><td class="wide">{drawn}</td>'
            f'<td class="left">{numbers}</td><td>{seconds}</td>'
            f'<td class="left {self.word}">{SIGNS.get(self.word, "")} {ended}</td></tr>'
        )


def moment(began: float, now: float | None = None) -> str:
    """Return when something began, in local time: "14:02" today, "26 Nov 14:02" before; empty for 0."""
    if not began:
        return ""
    then, today = time.localtime(began), time.localtime(now)
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", then)


def text_table(rows: Sequence[TableRow]) -> str:
    """Return a table with one line for each run, of which the latest forty are shown.

    Example:
        >>> text_table([])
        'no run yet'
    """
    if not rows:
        return "no run yet"
    shown = rows[-_MOST_ROWS:]
    columns = list(zip(_HEADS, *(row.text for row in shown), strict=True))
    used = [at for at, column in enumerate(columns) if any(column[1:])]
    widths = {at: max(map(len, columns[at])) for at in used}
    lines = [
        "  ".join(
            cell.rjust(widths[at]) if at in _RIGHT else cell.ljust(widths[at])
            for at, cell in enumerate(cells)
            if at in widths
        ).rstrip()
        for cells in zip(*columns, strict=True)
    ]
    return "\n".join([*lines[:1], *_left_out(rows), *lines[1:]])


def html_table(rows: Sequence[TableRow], label: str = "runs") -> str:
    """Return the same table as HTML, with its style sheet and a small curve for each run."""
    if not rows:
        return f'<style>{_STYLE}</style><div class="nbaccel"><p>no run yet</p></div>'
    run, began, cell, flags, seed, numbers, seconds, ended = _HEADS
    heads = "".join(
        f'<th scope="col"{f" class={kind!r}" if kind else ""}>{head}</th>'
        for head, kind in (
            (run, ""),
            (began, "widest"),
            (cell, "left"),
            (flags, "left wide"),
            (seed, "wide"),
            ("curve", "wide"),
            (numbers, "left"),
            (seconds, ""),
            (ended, "left"),
        )
    )
    more = "".join(f'<tr><td colspan="9">{line}</td></tr>' for line in _left_out(rows))
    return (
        f'<style>{_STYLE}</style><div class="nbaccel runs all" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{more}{''.join(row.html for row in rows[-_MOST_ROWS:])}</tbody>"
        "</table></div>"
    )


def _left_out(rows: Sequence[TableRow]) -> Iterator[str]:
    if len(rows) > _MOST_ROWS:
        yield f"… {plural(len(rows) - _MOST_ROWS, 'earlier run')}"


def differences(choices: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the choices in which runs differ, by name; each with the value of each run, "" where there is none.

    Example:
        >>> differences({"1": {"seed": "1", "cpu": "true"}, "2": {"seed": "2", "cpu": "true"}})
        {'seed': {'1': '1', '2': '2'}}
    """
    names = dict.fromkeys(name for each in choices.values() for name in each)
    values = {name: {run: each.get(name, "") for run, each in choices.items()} for name in names}
    return {name: each for name, each in values.items() if len({*each.values()}) > 1}


def _unbroken(text: str, between: str) -> str:
    """Return escaped text as spans that may be broken into lines only where `between` stands.

    Example:
        >>> _unbroken("-n 2 --resume", " -")
        '<span>-n 2 </span><span>--resume</span>'
    """
    kept = between.strip() if between.startswith(" ") else ""  # begins the next part, otherwise ends this one
    first, *others = text.split(between)
    parts = [first, *(f"{kept}{part}" for part in others)]
    ends = [between.removesuffix(kept)] * len(others) + [""]
    return "".join(f"<span>{part}{end}</span>" for part, end in zip(parts, ends, strict=True) if part)


def _short(text: str, column: str) -> str:
    most = _LONGEST[column]
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
