"""Completion: flags, their choices and variable names on the `%%accelerate` line. Runs in the kernel, at Tab.

IPython replaces the text since the last delimiter, and `,` and `=` delimit; so does what is offered here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from nbaccel.notebook.flags import EXAMPLES
from nbaccel.notebook.mistakes import COMMANDS
from nbaccel.notebook.parsing import SAVE, keys

__all__ = ["Completer", "candidates"]

_MAGICS = ("%accelerate", "%%accelerate")
_HOOK = "complete_command"


def candidates(parser: argparse.ArgumentParser, line: str, symbol: str, names: Iterable[str]) -> list[str]:
    """What may stand for `symbol`, the unfinished end of `line`.

    names: the variables of the notebook.
    """
    words = line.removesuffix(symbol).replace("=", " ").split()
    if not words:  # the magic itself is still being written
        return []
    match words:
        case ["%accelerate"]:
            return [word for word in COMMANDS if word.startswith(symbol)]
        case ["%accelerate", "config", *_]:
            return _settings(parser, line.removesuffix(symbol), symbol)
        case ["%accelerate", "push" | "pull", *_]:
            return _variables(names, symbol)
        case ["%accelerate", command, *_] if command != "start":
            return []
    return _flags(parser, words, symbol, names)


def _variables(names: Iterable[str], symbol: str) -> list[str]:
    return sorted(name for name in names if name.startswith(symbol) and not name.startswith("_"))


def _flags(parser: argparse.ArgumentParser, words: list[str], symbol: str, names: Iterable[str]) -> list[str]:
    """A flag, or what may follow the one that was written."""
    action = _open_flag(parser, words)
    if action is not None:
        variables = _variables(names, symbol) if action.metavar == "NAMES" else []
        return [*variables, *(_values(action, symbol) if words[-1] in action.option_strings else [])]
    return sorted(flag for other in parser._actions for flag in other.option_strings if flag.startswith(symbol or "--"))


def _settings(parser: argparse.ArgumentParser, before: str, symbol: str) -> list[str]:
    """What may follow in a `%accelerate config`: a key, or behind `=` one of its values."""
    if not before.endswith("="):
        return sorted(word for word in (*(f"{key}=" for key in keys(parser)), SAVE) if word.startswith(symbol))
    key = before.split()[-1].removesuffix("=")
    action = next((action for action in parser._actions if f"--{key}" in action.option_strings), None)
    if action is None:
        return []
    if action.nargs == 0:
        return [word for word in ("true", "false") if word.startswith(symbol)]
    return _values(action, symbol)


def _values(action: argparse.Action, symbol: str) -> list[str]:
    values = action.choices or EXAMPLES.get(action.dest, ())
    return [str(value) for value in values if str(value).startswith(symbol)]


def _open_flag(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Action | None:
    """The flag whose value is being written, or could go on after a comma."""
    for back, word in enumerate(reversed(words)):
        action = next((action for action in parser._actions if word in action.option_strings), None)
        if action is not None:
            is_open = back == 0 or words[-1].endswith(",")
            return action if is_open and action.nargs != 0 else None
        if back and not word.endswith(","):
            return None
    return None


class Completer:
    """Completes in one shell between `install` and `remove`."""

    def __init__(self, shell: Any, parser: argparse.ArgumentParser) -> None:
        self._shell = shell
        self._parser = parser

    def _complete(self, shell: Any, event: Any) -> list[str]:
        line = event.text_until_cursor
        return candidates(self._parser, line, event.symbol, shell.user_ns)

    def install(self) -> None:
        # IPython binds what it is given to the shell, which only a plain function lets it do.
        self._hook: Callable[..., Any] = lambda shell, event: self._complete(shell, event)
        for magic in _MAGICS:
            self._shell.set_hook(_HOOK, self._hook, str_key=magic)

    def remove(self) -> None:
        """IPython has no opposite of `set_hook`: take ours out of its chains."""
        for magic in _MAGICS:
            dispatcher = self._shell.strdispatchers[_HOOK].strs[magic]
            dispatcher.chain[:] = [link for link in dispatcher.chain if link[1].__func__ is not self._hook]
