"""The values of `--sweep`: from the line of a cell to a list for each name. Runs in the kernel; starts nothing.

A value is a Python literal, or a word; `0-4` means the numbers from 0 to 4. Words that most likely are a mistake are
refused, and quotes make a text of any of them. Quotes and brackets keep blanks and commas together, so these words are
cut out of the line before a shell's rules are applied to the rest of it. The list of `--sweep` ends at the first word
that is not NAME=VALUES.
"""

from __future__ import annotations

import argparse
import ast
import keyword
import math
import re
from collections.abc import Iterator
from typing import Any

from nbaccel.options.parsing import SweptName

__all__ = [
    "BareWord",
    "cut_out",
    "read_swept",
]

_FLAG = re.compile(r"(?:(?<=\s)|^)--sweep(?=\s|=|$)")
_NAME = re.compile(r"[^\W\d]\w*=")
_RANGE = re.compile(r"(\d+)-(\d+)")
_WORD = re.compile(r"[\w./:+@-]+")
_OF_DIGITS = re.compile(r"[+-]?[.\d][\d.eE+_-]*")
_CONSTANTS = {"true": "True", "false": "False", "none": "None"}
_FLOATS = frozenset({"nan", "inf", "+inf", "-inf"})
_OPEN, _CLOSE = "([{", ")]}"
_MOST_VALUES = 10_000
_OURS = "accelerator"


class BareWord(str):
    """A text that was written without quotes: it may be a name that was meant."""

    __slots__ = ()


def cut_out(line: str) -> tuple[str, list[str], str]:
    """Return the text before `--sweep`, its words NAME=VALUES with their quotes, and the text after them.

    Example:
        >>> cut_out("-p no --sweep fold=0-4 opt='a b',c --slots 2")
        ('-p no ', ['fold=0-4', "opt='a b',c"], ' --slots 2')
        >>> cut_out("-n 2")
        ('-n 2', [], '')
    """
    found = _FLAG.search(line)
    if found is None:
        return line, [], ""
    at, words = found.end(), []
    while (start := _next_word(line, at)) is not None and _NAME.match(line, start):
        at = _end_of(line, start)
        words.append(line[start:at])
    return (line[: found.start()], words, line[at:]) if words else (line, [], "")


def _next_word(line: str, at: int) -> int | None:
    """Return where the next word begins, or None; the first may follow an `=` instead of a blank."""
    while at < len(line) and (line[at].isspace() or line[at] == "="):
        at += 1
    return at if at < len(line) else None


def _end_of(line: str, start: int) -> int:
    """Return where a word ends: at a blank outside of quotes and brackets, with no comma before or after it."""
    at = start
    for at, is_inside in _positions(line, start):
        if is_inside or not line[at].isspace():
            continue
        rest = line[at:].lstrip()
        if not line[:at].rstrip().endswith(",") and not rest.startswith(","):
            return at
    return len(line)


def _positions(text: str, start: int = 0) -> Iterator[tuple[int, bool]]:
    """Yield each position, and whether it is inside quotes or brackets."""
    quote, depth, is_escaped = "", 0, False
    for at in range(start, len(text)):
        mark = text[at]
        yield at, bool(quote) or depth > 0
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = mark == "\\"
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        else:
            depth += (mark in _OPEN) - (mark in _CLOSE)


def read_swept(text: str) -> SweptName:
    """Read one NAME=VALUES.

    Example:
        >>> read_swept("fold=0-2"), read_swept("lr=1e-3,1e-4"), read_swept("opt=adam,'s g,d'")
        (('fold', (0, 1, 2)), ('lr', (0.001, 0.0001)), ('opt', ('adam', 's g,d')))
    """
    name, is_given, values = text.partition("=")
    if not is_given or not name.isidentifier() or keyword.iskeyword(name):
        raise argparse.ArgumentTypeError(f"a sweep is written NAME=VALUES, such as fold=0-4 lr=1e-3,1e-4; got {text!r}")
    if name == _OURS:
        raise argparse.ArgumentTypeError("each run has an accelerator of its own, and that name cannot be swept")
    read = tuple(value for part in _parts(values) for value in _values(name, part))
    if len(read) > _MOST_VALUES:
        raise argparse.ArgumentTypeError(f"{name} has {len(read)} values; {_MOST_VALUES} are the most")
    return name, read


def _parts(values: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of quotes and brackets."""
    begin = 0
    for at, is_inside in _positions(values):
        if values[at] == "," and not is_inside:
            yield values[begin:at].strip()
            begin = at + 1
    yield values[begin:].strip()


def _values(name: str, part: str) -> list[Any]:
    if not part:
        raise argparse.ArgumentTypeError(
            f"{name} has an empty value; write {name}=VALUE,VALUE, or '' for an empty text"
        )
    if (ends := _RANGE.fullmatch(part)) is not None:
        first, last = int(ends[1]), int(ends[2])
        if last < first or last - first >= _MOST_VALUES:
            raise argparse.ArgumentTypeError(
                f"{name}={part}: a range goes up, and has {_MOST_VALUES} values at most; write the values with commas"
            )
        return list(range(first, last + 1))
    if part.lower() in _FLOATS:
        return [float(part)]
    try:
        value = ast.literal_eval(part)
    except (ValueError, SyntaxError):
        return [_word(name, part)]
    if any(number == math.inf for number in _floats_in(value)):
        raise argparse.ArgumentTypeError(f"{name}={part}: no float holds such a number; write inf if it is meant")
    return [value]


def _word(name: str, part: str) -> BareWord:
    """Return a value that is no literal.

    Raises:
        ArgumentTypeError: It can only be a mistake.
    """
    quoted = f"for the text, put it into quotes: {name}='{part}'"
    if part.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"{part} stands in the values of {name}: a flag stands behind a blank, with no comma before it; {quoted}"
        )
    if (constant := _CONSTANTS.get(part)) is not None:
        raise argparse.ArgumentTypeError(f"{name}={part}: write {constant}; {quoted}")
    if _OF_DIGITS.fullmatch(part):
        raise argparse.ArgumentTypeError(
            f"{name}={part}: this is no number and no range; write the values with commas, or a range such as 0-4; "
            f"{quoted}"
        )
    if not _WORD.fullmatch(part):
        raise argparse.ArgumentTypeError(
            f"{name}: a value is a Python literal, a word, or a range such as 0-4; got {part!r}"
        )
    return BareWord(part)


def _floats_in(value: Any) -> Iterator[float]:
    if isinstance(value, float | complex):
        yield abs(value)
    elif isinstance(value, dict):
        yield from (number for pair in value.items() for each in pair for number in _floats_in(each))
    elif isinstance(value, list | tuple | set):
        yield from (number for each in value for number in _floats_in(each))
