"""Judge results: a word per cell, the table, the sums, and what makes the call end with 1."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from public_notebooks.kernels import Ended

__all__ = ["Row", "row_of_check", "row_of_run", "row_of_speed", "sums", "table"]

CELLS_PER_FALSE_ALARM = 25
LEAST_GAIN = 0.98

_CHECK_WORDS = ("fine", "true alarm", "refused", "false alarm", "missed", "crash")
_RUN_WORDS = ("right", "refused", "fails alike", "wrong", "crash")
_DEFECTS = ("missed", "wrong", "crash")
_UNSURE = "nothing is sure to help"
"""The line of a report where there was too little time for so much noise."""

_NOT_FINITE = re.compile(r"\b(?:nan|inf)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of one training cell.

    word: "" where it has no result.  gain: of speed, how many times as fast after pasting; None where not measured.
    said: the reason of the word.
    """

    key: str
    word: str
    said: str = ""
    seconds: str = ""
    gain: float | None = None


Judge = Callable[[str, Mapping[str, Any]], Row]


def row_of_check(key: str, result: Mapping[str, Any]) -> Row:
    """Judge a check by the run that follows it: an alarm is true where the run fails."""
    check, ran = Ended(**result["check"]), Ended(**result["run"])
    red, yellow = ([line for line in result["report"] if line.startswith(colour)] for colour in ("red:", "yellow:"))
    if check.is_refused:
        word = "refused" if ran.is_refused else "false alarm"
    elif check.how != "well" or not result["report"]:
        word = "crash"
    elif red:
        word = "true alarm" if ran.fails else "false alarm"
    else:
        word = "missed" if ran.fails else "fine"
    said = "; ".join(yellow) if word == "fine" else check.error or (red[0] if red else ran.error)
    cut = ", cut" * (ran.how == "cut")
    if failed := result["before"]:
        said = f"{said} (before it fails {failed[0]})".strip()
    return Row(key, word, said, f"{check.seconds:.0f} + {ran.seconds:.0f}{cut}")


def row_of_run(key: str, result: Mapping[str, Any]) -> Row:
    """Judge a run in two ranks by the plain cell.

    Wrong: it prints nothing where the plain cell prints, or what is no number where the plain cell has numbers. Other
    numbers are no sign: two ranks see batches in another order, and half as many.
    """
    ran = Ended(**result["run"])
    plain = Ended(**result["plain"]) if result["plain"] else None
    seconds = f"{ran.seconds:.0f}"
    if ran.is_refused:
        return Row(key, "refused", ran.error, seconds)
    if ran.fails:
        alike = plain is not None and plain.fails and ran.how == "error"
        return Row(key, "fails alike" if alike else "crash", ran.error, seconds)
    cut = "cut" * (ran.how == "cut")
    if plain is None or plain.fails:
        return Row(key, "right", f"the plain cell fails: {plain.error}" if plain else cut, seconds)
    if plain.printed.strip() and not ran.printed.strip() and not cut:
        return Row(key, "wrong", "prints nothing, and the plain cell does", seconds)
    if (odd := _NOT_FINITE.search(ran.printed)) and not _NOT_FINITE.search(plain.printed):
        return Row(key, "wrong", f"prints {odd[0]}, and the plain cell does not", seconds)
    return Row(key, "right", cut, seconds)


def row_of_speed(key: str, result: Mapping[str, Any]) -> Row:
    """Judge advice by the medians of the seconds before and after pasting; no advice gains 1.00."""
    if result["error"]:
        return Row(key, "not measured" if result["error"].startswith("not measured") else "crash", result["error"])
    if not result["advice"]:
        return Row(key, "undecided" if _UNSURE in result["report"] else "nothing helps", gain=1.0)
    before, after = result["before"], result["after"]
    gain = statistics.median(before) / statistics.median(after)
    seconds = f"{' '.join(map(str, before))} / {' '.join(map(str, after))}"
    said = f"{result['advice']}: {result['foretold']:.2f} was foretold"
    return Row(key, "faster" if gain >= LEAST_GAIN else "slower", said, seconds, gain)


JUDGES: Mapping[str, Judge] = {"check": row_of_check, "run": row_of_run, "speed": row_of_speed}


def table(mode: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and of the sums."""
    yield f"| cell | {mode} | {'gain | ' * (mode == 'speed')}seconds | why |"
    yield "|---|---|---|---|" + "---|" * (mode == "speed")
    for row in rows:
        gain = ["" if row.gain is None else f"{row.gain:.2f}"] * (mode == "speed")
        said = row.said.replace("|", "/").replace("\n", " ")[:200]
        yield f"| {' | '.join([row.key, row.word or 'not run', *gain, row.seconds, said])} |"
    yield ""
    yield sums(mode, rows)


def sums(mode: str, rows: Sequence[Row]) -> str:
    """Return the counts, or for speed the median gain and the smallest, as a sentence."""
    done = [row for row in rows if row.word]
    left = f"; {len(rows) - len(done)} not run" * (len(done) < len(rows))
    counts = Counter(row.word for row in done)
    if mode != "speed":
        words = _CHECK_WORDS if mode == "check" else _RUN_WORDS
        always = ("fine", "true alarm", "false alarm", "crash") if mode == "check" else ("right", "wrong", "crash")
        said = [_counted(counts[word], word) for word in words if counts[word] or word in always]
        return f"{_counted(len(done), 'cell')}: {', '.join(said)}{left}"
    gains = [row.gain for row in done if row.gain is not None]
    said = [
        _counted(counts[word], word)
        for word in ("nothing helps", "undecided", "slower", "not measured", "crash")
        if counts[word]
    ]
    if gains:
        said.insert(0, f"median gain {statistics.median(gains):.2f}, smallest {min(gains):.2f}")
    return f"{_counted(len(done), 'loop')}: {', '.join(said) or 'none'}{left}"


def _counted(count: int, word: str) -> str:
    plural = {
        "cell": "cells",
        "loop": "loops",
        "true alarm": "true alarms",
        "false alarm": "false alarms",
        "crash": "crashes",
    }
    return f"{count} {plural.get(word, word) if count != 1 else word}"


def is_failure(rows: Sequence[Row]) -> bool:
    """Whether the call ends with 1: a defect, a gain too small, or too many false alarms for so many cells."""
    done = [row for row in rows if row.word]
    alarms = sum(row.word == "false alarm" for row in done)
    allowed = max(1, len(done) // CELLS_PER_FALSE_ALARM)
    return alarms > allowed or any(row.word in (*_DEFECTS, "slower") for row in done)
