"""Turn the text of a magic's line into options, and options into text. Runs in the kernel; starts nothing.

A cell's line has flags; `%accelerate config` and nbaccel.toml have KEY=VALUE, the keys being the long flags without
their dashes. The flags and the readers of their values are in `flags`, which decides what is right; here a mistake is
answered in one sentence with the right form.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from IPython.core.error import UsageError

from nbaccel.base.quantities import time_text
from nbaccel.features import feature
from nbaccel.options.flags import settings
from nbaccel.options.run_options import RunOptions

__all__ = [
    "COMMANDS",
    "SAVE",
    "SweptName",
    "asks_for_help",
    "chosen",
    "command_line",
    "configured",
    "described",
    "in_our_words",
    "joined",
    "keys",
    "near",
    "parse",
    "text_of",
    "what_is_unknown",
]

SAVE = "--save"
"""Word that `%accelerate config` takes besides KEY=VALUE."""

SweptName = tuple[str, tuple[Any, ...]]
"""A name of `--sweep`, and its values."""

_SWEEP = "--sweep"

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def parse(parser: argparse.ArgumentParser, line: str) -> RunOptions:
    """Return the options of the rest of a `%%accelerate` line.

    Raises:
        UsageError: One sentence on the first mistake.
    """
    before, swept, after = feature("the values of --sweep")(line) if _SWEEP in line else (line, [], "")
    try:
        arguments = [word for part in (before, after) for word in shlex.split(joined(part), comments=True)]
    except ValueError as error:
        raise UsageError(f"a quote in this line is not closed ({error}): %%accelerate {line}") from None
    if swept and _SWEEP in arguments:
        raise UsageError("--sweep stands twice in this line: write all its NAME=VALUES behind one.")
    try:
        known, unknown = parser.parse_known_args(
            [*_with_keep_told_apart(arguments), *(part for word in swept for part in (_SWEEP, word))]
        )
    except UsageError as error:
        raise UsageError(in_our_words(str(error))) from None
    if unknown:
        is_of_sweep = bool(swept) and after.split()[:1] == unknown[:1] and not unknown[0].startswith("-")
        words = _rest_of_values(swept[-1], unknown[0]) if is_of_sweep else what_is_unknown(parser, *unknown[:2])
        raise UsageError(f"{words} %accelerate? lists every flag.")
    return replace(RunOptions(**vars(known)), sweep=_each_once(known.sweep))


def _rest_of_values(values: str, word: str) -> str:
    return f"{word!r} belongs to no flag; values of one name are written with commas: --sweep {values},{word}."


def _each_once(swept: Sequence[SweptName] | None) -> tuple[SweptName, ...] | None:
    if swept is None:
        return None
    names = [name for name, _ in swept]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--sweep has {twice} twice: write its values with commas, {twice}=1,2.")
    return tuple(swept)


def _with_keep_told_apart(arguments: list[str]) -> list[str]:
    """Rename `--keep` with a number to `--keep-checkpoints`, as in ``Accelerator(keep=3)``; alone it keeps the ranks.

    Example:
        >>> _with_keep_told_apart(["--keep", "-n", "2", "--keep", "3"])
        ['--keep', '-n', '2', '--keep-checkpoints', '3']
    """
    return [
        "--keep-checkpoints" if word == "--keep" and following.isdecimal() else word
        for word, following in pairwise([*arguments, ""])
    ]


def asks_for_help(line: str) -> bool:
    """Return whether a line asks for the table of flags, as in terminals: `help`, or `-h` or `--help` among the flags.

    Example:
        >>> asks_for_help("-n 2 --help"), asks_for_help("help"), asks_for_help("push help")
        (True, True, False)
    """
    words = line.split()
    return words[:1] == ["help"] or not {"-h", "--help"}.isdisjoint(words)


def joined(line: str) -> str:
    """Return a line whose lists have no blanks: `--out model, history` names two.

    Example:
        >>> joined("--out model, history -n 2")
        '--out model,history -n 2'
    """
    return re.sub(r"\s*,\s*", ",", line)


def configured(parser: argparse.ArgumentParser, settings: Iterable[str], before: RunOptions) -> RunOptions:
    """Return `before` with each KEY=VALUE of `%accelerate config` set; `KEY=` returns to the default.

    Raises:
        UsageError: An unknown key or a wrong value.
    """
    for setting in settings:
        key, is_given, text = setting.partition("=")
        key = key.replace("_", "-")  # as it is spelled in Python
        action = _action(parser, key)
        if action is None or not is_given:
            what = f"{key!r} needs a value: {key}=…" if action else _no_setting(parser, key)
            raise UsageError(f"{what}; settings are KEY=VALUE with one of {', '.join(keys(parser))}.")
        before = replace(before, **{action.dest: _value(parser, action, key, text) if text else None})
    return before


def keys(parser: argparse.ArgumentParser) -> list[str]:
    """Return the settings of `%accelerate config`: the long flags without their dashes."""
    return [action.option_strings[-1].removeprefix("--") for action in settings(parser)]


def chosen(parser: argparse.ArgumentParser, options: RunOptions) -> dict[str, Any]:
    """Return everything that `options` choose: the value of each setting, as it would be given."""
    values = ((key, _given(action, options)) for key, action in zip(keys(parser), settings(parser), strict=True))
    return {key: value for key, value in values if value is not None}


def _given(action: argparse.Action, options: RunOptions) -> Any:
    """Return a flag's value as it would be given: a time that is stored in seconds gets its units back."""
    value = getattr(options, action.dest)
    return time_text(value) if action.dest == "time_limit" and value is not None else value


def described(parser: argparse.ArgumentParser, options: RunOptions) -> str:
    """Return `options` as arguments of `%accelerate config`; empty when nothing is chosen."""
    return " ".join(f"{key}={text_of(value)}" for key, value in chosen(parser, options).items())


def command_line(parser: argparse.ArgumentParser, options: RunOptions) -> str:
    """Return the first line of a cell that chooses `options` by itself."""
    words = ["%%accelerate"]
    for action in settings(parser):
        value = _given(action, options)
        if value is None or value is False:  # no flag turns another off
            continue
        words += [action.option_strings[0]] + ([] if action.nargs == 0 else [shlex.quote(text_of(value))])
    return " ".join(words)


def text_of(value: Any) -> str:
    """Return a value as it is written after KEY=.

    Example:
        >>> text_of(True), text_of(("model", "history")), text_of("GPU-5eA"), text_of(1.5)
        ('true', 'model,history', 'GPU-5eA', '1.5')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def _action(parser: argparse.ArgumentParser, key: str) -> argparse.Action | None:
    """Return the setting of this name, long or short, without its dashes."""
    spelled = {f"--{key}", f"-{key}"}
    return next((action for action in settings(parser) if spelled & {*action.option_strings}), None)


def _no_setting(parser: argparse.ArgumentParser, key: str) -> str:
    if f"--{key}" in parser._option_string_actions:
        return f"--{key} means one cell and is none of the settings: write it behind %%accelerate"
    return f"there is no setting {key!r}{near(key, keys(parser))}"


def _value(parser: argparse.ArgumentParser, action: argparse.Action, key: str, text: str) -> Any:
    if action.nargs == 0:
        if text.lower() not in _TRUTH:
            raise UsageError(f"{key} is true or false; got {text!r}.")
        return _TRUTH[text.lower()]
    try:
        return getattr(parser.parse_args([f"{action.option_strings[-1]}={text}"]), action.dest)
    except UsageError as error:
        raise UsageError(in_our_words(str(error))) from None


COMMANDS = (
    "config",
    "doctor",
    "memory",
    "estimate",
    "why",
    "status",
    "wait",
    "attach",
    "last",
    "runs",
    "nodes",
    "export",
    "stop",
    "start",
    "push",
    "pull",
    "restart",
)
"""Words that follow `%accelerate`."""

_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")

_OF_OTHERS = dict.fromkeys(("--nproc-per-node", "--nproc", "--num-gpus", "--num-gpu", "--gpus"), "-n")
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

    Example:
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

    Example:
        >>> near("sed", ["seed", "out"])
        ' (did you mean seed=…?)'
    """
    alike = difflib.get_close_matches(key.lstrip("-"), list(keys), n=1)
    return f" (did you mean {alike[0]}=…?)" if alike else ""


def what_is_unknown(parser: argparse.ArgumentParser, word: str, following: str = "") -> str:
    """Return a sentence on the first word that argparse could not place.

    Args:
        following: The word after it.
    """
    flag, _, value = word.partition("=")
    if (meant := _OF_OTHERS.get(flag.replace("_", "-"))) is not None:
        return f"there is no flag {flag}; did you mean {' '.join([meant, *(value or following).split()[:1]])}?"
    if (command := flag.lstrip("-")) in COMMANDS:
        return f"{word!r} is a command: %accelerate {command}, with one percent sign."
    if flag.startswith("-"):
        is_long = flag.startswith("--")
        every = [
            name for action in parser._actions for name in action.option_strings if name.startswith("--") == is_long
        ]
        alike = difflib.get_close_matches(flag.replace("_", "-"), every, n=1, cutoff=0.65)
        return f"there is no flag {flag}{f'; did you mean {alike[0]}?' if alike else '.'}"
    if flag.startswith(_DASHES):
        return f"{word!r} begins with a dash that is no hyphen, as texts on the web do; write - or --."
    if word.isdecimal():
        return f"{word!r} belongs to no flag; for {word} ranks it is -n {word}."
    if (action := _action(parser, flag)) is not None:
        meant = f"{action.option_strings[0]} {value or ('' if action.nargs == 0 else following)}".rstrip()
        return f"{word!r} has no dash; did you mean {meant}?"
    return f"{word!r} belongs to no flag; lists are written with commas, such as --out model,history."
