"""Mistakes on the line of a magic, each answered in one sentence with the right form. Runs in the kernel.

`flags` and `values` decide what is right; this file only words what is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable

__all__ = ["COMMANDS", "in_our_words", "near", "what_is_unknown"]

COMMANDS = (
    "config",
    "doctor",
    "memory",
    "why",
    "status",
    "wait",
    "attach",
    "last",
    "stop",
    "start",
    "push",
    "pull",
    "restart",
)
"""Words that follow `%accelerate`."""

_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")

_OF_OTHERS = {"--nproc-per-node": "-n", "--num-gpus": "-n"}
"""Flags of other launchers, and the project's flags with the same meaning."""

_HELP = "%accelerate? lists every flag."

_ARGPARSE = {
    r"^argument (\S+): expected one argument$": r"\1 needs a value.",
    r"^argument (\S+): ignored explicit argument (.*)$": r"\1 takes no value; got \2.",
    r"^argument (\S+): (.*)$": r"\1: \2.",
    r"^ambiguous option: (.*)$": r"\1; write it out.",
}
"""Messages of argparse, and the project's wording."""


def in_our_words(message: str, where_to_look: str = _HELP) -> str:
    """Return a message of argparse in the project's wording.

    >>> in_our_words("argument -n/--num-processes: expected one argument")
    '-n/--num-processes needs a value. %accelerate? lists every flag.'
    """
    for theirs, ours in _ARGPARSE.items():
        if re.search(theirs, message):
            sentence = re.sub(theirs, ours, message)
            return f"{sentence} {where_to_look}" if sentence.endswith("needs a value.") else sentence
    return message


def near(key: str, keys: Iterable[str]) -> str:
    """Return a suggestion of the setting that was probably meant.

    >>> near("sed", ["seed", "out"])
    ' (did you mean seed=…?)'
    """
    alike = difflib.get_close_matches(key.lstrip("-"), list(keys), n=1)
    return f" (did you mean {alike[0]}=…?)" if alike else ""


def what_is_unknown(parser: argparse.ArgumentParser, word: str, following: str = "") -> str:
    """Return a sentence on the first word that argparse could not place.  following: the word after it."""
    flag, _, value = word.partition("=")
    if (meant := _OF_OTHERS.get(flag.replace("_", "-"))) is not None:
        return f"there is no flag {flag}; did you mean {' '.join([meant, *(value or following).split()[:1]])}?"
    if flag.startswith("-"):
        every = [name for action in parser._actions for name in action.option_strings]
        alike = difflib.get_close_matches(flag.replace("_", "-"), every, n=1)
        return f"there is no flag {flag}{f'; did you mean {alike[0]}?' if alike else '.'}"
    if flag.startswith(_DASHES):
        return f"{word!r} begins with a dash that is no hyphen, as texts on the web do; write - or --."
    if word in COMMANDS:
        return f"{word!r} is a command: %accelerate {word}, with one percent sign."
    if word.isdecimal():
        return f"{word!r} belongs to no flag; for {word} ranks it is -n {word}."
    return f"{word!r} belongs to no flag; lists are written with commas, such as --out model,history."
