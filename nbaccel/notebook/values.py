"""Values: reads the text after a flag, and says what is wrong with it. Runs in the kernel; starts nothing.

A reader takes the text and returns the value, or raises `argparse.ArgumentTypeError` with half a sentence on what was
expected and what was given; argparse puts the flag before it. `flags` assigns the readers to the flags.
"""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Callable
from typing import Any

from nbaccel.notebook.options import AUTO, CELL, NAMED, expanded

__all__ = [
    "checked",
    "one_of",
    "read_batches",
    "read_curves",
    "read_kept",
    "read_names",
    "read_only",
    "read_out",
    "read_processes",
    "read_rank",
    "read_ranks",
    "read_seconds",
    "read_seed",
]

_LARGEST_SEED = 2**32 - 1
"""NumPy's limit; rank r is seeded with seed + r."""
_SEED_ROOM = 100_000


def read_processes(text: str) -> int | str:
    """Read a number of ranks, or "auto"."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks is 1 or more, or auto; got {text!r}")
    return int(text)


def one_of(what: str, *names: str) -> Callable[[str], str]:
    """Return a reader that takes one of `names`, in capitals too."""

    def read(text: str) -> str:
        if text.lower() not in names:
            *others, last = names
            raise argparse.ArgumentTypeError(f"{what} is {', '.join(others)} or {last}; got {text!r}")
        return text.lower()

    return read


def read_batches(text: str) -> int:
    """Read the batches per optimizer step."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"batches per optimizer step are 1 or more; got {text!r}")
    return int(text)


def read_names(text: str) -> tuple[str, ...]:
    """Read names of variables with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if wrong or not names:
        what = f"{wrong[0]!r} is not the name of a variable" if wrong else "no name was given"
        raise argparse.ArgumentTypeError(f"{what}; write names with commas between them, such as model,history")
    return names


def read_out(text: str) -> tuple[str, ...] | str:
    """Read names of variables, or a word for what a cell leaves in the notebook."""
    word = text.strip().lower()
    return NAMED if word in ("none", NAMED) else CELL if word == CELL else read_names(text)


def read_curves(text: str) -> tuple[str, ...]:
    """Read names of numbers to draw, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(
            f"one curve is the least; got {text!r}. "
            'Write names with commas between them, such as loss,acc, and quotes around spaces: "val loss,acc"'
        )
    return names


def read_ranks(text: str) -> str:
    """Check a list of ranks, or "all", and return it as text: the number of ranks is not known yet."""
    if text == "all":
        return text
    is_list = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    if not is_list or not list(expanded(text)):
        raise argparse.ArgumentTypeError(f"ranks are all, a number, or a list such as 0,2-3; got {text!r}")
    return text


def read_rank(text: str) -> int:
    """Read the number of one rank; whether the run has it is not known yet."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a rank is a number, the first is 0; got {text!r}")
    return int(text)


def read_only(text: str) -> str:
    """Check a list of some ranks, and return it as text."""
    if text == "all":
        raise argparse.ArgumentTypeError("all ranks take part in a cell without it; name some, such as 0,2-3")
    return read_ranks(text)


def read_seconds(text: str) -> float:
    """Read seconds, with a fraction if needed."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a time limit is a number of seconds above 0; got {text!r}")
    return seconds


def checked(read: Callable[[str], Any], keeps_text: bool = False) -> Callable[[str], Any]:
    """Return `read` for argparse, which shows the text of no other error."""

    def value(text: str) -> Any:
        try:
            read_value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text if keeps_text else read_value

    return value


def read_kept(text: str) -> int:
    """Read the number of checkpoints to keep."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"checkpoints to keep are 1 or more; got {text!r}")
    return int(text)


def read_seed(text: str) -> int:
    """Read a seed that leaves room for the ranks."""
    if not text.isdecimal() or int(text) > _LARGEST_SEED - _SEED_ROOM:
        raise argparse.ArgumentTypeError(f"a seed lies in 0..{_LARGEST_SEED - _SEED_ROOM}; got {text!r}")
    return int(text)
