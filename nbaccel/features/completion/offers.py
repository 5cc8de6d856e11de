"""The offers of Tab: flags, their choices and names on the line of a magic, and names of the Accelerator in its cell.

On the line nothing else is offered: IPython's own completers, which take `--` for Python, are suppressed. The kernel
has no `accelerator`; the names that ranks will have under it are read from the source of its class, since Tab must not
wait for torch, which takes seconds to import. Nothing is added to the notebook's names. Runs in the kernel.

IPython replaces the text since the last delimiter, and `,` and `=` are delimiters, so the offers replace the same text.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nbaccel.notebook.completion import MAGICS, MEMBER
from nbaccel.notebook.shell_hooks import ACCELERATOR, is_code
from nbaccel.options.flags import EXAMPLES
from nbaccel.options.parsing import COMMANDS, SAVE, keys

__all__ = ["HelpMember", "Offers", "candidates", "public_members"]

_MODULE, _CLASS = "nbaccel.train.accelerator", "Accelerator"
_MEMBER = re.compile(MEMBER, re.DOTALL)


def candidates(parser: argparse.ArgumentParser, line: str, symbol: str, names: Iterable[str]) -> list[str]:
    """Return the completions of `symbol`, the unfinished end of `line`.

    Args:
        names: The variables of the notebook.
    """
    words = line.removesuffix(symbol).replace("=", " ").split()
    if not words:  # the magic itself is still being written
        return []
    match words:
        case ["%accelerate"]:
            return [word for word in COMMANDS if word.startswith(symbol)]
        case ["%accelerate", "config", *_]:
            return _settings(parser, line.removesuffix(symbol), symbol)
        case ["%accelerate", "push" | "pull" | "estimate", *_]:
            return _variables(names, symbol)
        case ["%accelerate", command, *_] if command != "start":
            return []
    return _flags(parser, words, symbol, names)


def _variables(names: Iterable[str], symbol: str) -> list[str]:
    return sorted(name for name in names if name.startswith(symbol) and not name.startswith("_"))


def _flags(parser: argparse.ArgumentParser, words: list[str], symbol: str, names: Iterable[str]) -> list[str]:
    """Return flags, or values of the flag that was written."""
    action = _open_flag(parser, words)
    if action is not None:
        variables = _variables(names, symbol) if action.metavar == "NAMES" else []
        return [*variables, *(_values(action, symbol) if words[-1] in action.option_strings else [])]
    return sorted(flag for other in parser._actions for flag in other.option_strings if flag.startswith(symbol or "--"))


def _settings(parser: argparse.ArgumentParser, before: str, symbol: str) -> list[str]:
    """Return completions of `%accelerate config`: a key, or after `=` one of its values."""
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
    """Return the flag whose value is being written, or could go on after a comma."""
    for back, word in enumerate(reversed(words)):
        action = next((action for action in parser._actions if word in action.option_strings), None)
        if action is not None:
            is_open = back == 0 or words[-1].endswith(",")
            return action if is_open and action.nargs != 0 else None
        if back and not word.endswith(","):
            return None
    return None


class Offers:
    """Answers of one shell to what IPython asks about a line.

    Args:
        shell: The shell.
        parser: The parser of the flags.
    """

    def __init__(self, shell: Any, parser: argparse.ArgumentParser) -> None:
        self._shell = shell
        self._parser = parser

    # --- IPython since 8.6 --------------------------------------------------------------------------------------

    def match(self, context: Any) -> dict[str, Any]:
        from IPython.core.completer import SimpleCompletion

        line = context.text_until_cursor
        symbol = _unfinished(line)
        found: list[tuple[str, str]] = []
        if line.startswith(MAGICS):
            offered = candidates(self._parser, line, symbol, self._shell.user_ns)
            found = [(text, _kind(text, line)) for text in offered]
            if not found and line != symbol:
                return {"completions": _Nothing(), "matched_fragment": symbol, "suppress": True}
        elif member := self._member(line, context.full_text):
            symbol = member[1]
            found = [(each.name, each.kind) for each in public_members() if each.name.startswith(symbol)]
        return {
            "completions": [SimpleCompletion(text=text, type=kind) for text, kind in found],
            "matched_fragment": symbol,
            "ordered": True,
            "suppress": bool(found),
        }

    def _member(self, line: str, cell: str) -> re.Match[str] | None:
        """Return the match of `accelerator.` and the text after it at the end of `line`, if the name is the ranks'."""
        first = next(filter(is_code, cell.splitlines()), "")
        if not first.startswith("%%accelerate") or ACCELERATOR in self._shell.user_ns:
            return None
        return _MEMBER.match(line)

    # --- IPython before -----------------------------------------------------------------------------------------

    def complete(self, event: Any) -> list[str]:
        return candidates(self._parser, event.text_until_cursor, event.symbol, self._shell.user_ns)

    def complete_member(self, event: Any) -> list[str]:
        """Complete in every cell, since IPython does not pass the cell: no other cell has that name."""
        if ACCELERATOR in self._shell.user_ns or _MEMBER.match(event.text_until_cursor) is None:
            return []
        return [f"{ACCELERATOR}.{member.name}" for member in public_members()]


class _Nothing(list[Any]):
    """An empty answer that IPython does not ignore: for a list without length it would ask other completers."""

    def __len__(self) -> int:
        return 1


def _unfinished(line: str) -> str:
    """Return the end of `line` that a completion replaces.

    Example:
        >>> [_unfinished(line) for line in ("%%accelerate --ch", "%%accelerate --out a,b", "%%accelerate -n ")]
        ['--ch', 'b', '']
    """
    return re.split(r"[\s,=]", line)[-1]


def _kind(text: str, line: str) -> str:
    """Return the kind that a front end shows beside a completion of `line`."""
    if text.startswith("-"):
        return "flag"
    is_first = len(line.removesuffix(_unfinished(line)).split()) == 1
    return "command" if is_first and line.startswith("%accelerate") else "setting" if text.endswith("=") else "value"


class HelpMember(NamedTuple):
    """A public name of the Accelerator.

    Args:
        kind: "function" or "property".
    """

    name: str
    kind: str


@functools.cache
def public_members() -> tuple[HelpMember, ...]:
    """Return every public method and property of the class and its bases, by name."""
    members = {member.name: member for member in _members_of(_MODULE, _CLASS)}
    return tuple(members[name] for name in sorted(members))


def _members_of(module: str, name: str) -> Iterator[HelpMember]:
    spec = find_spec("nbaccel")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    homes = {
        alias.asname or alias.name: (each.module, alias.name)
        for each in tree.body
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("nbaccel.")
        for alias in each.names
    }
    here = {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
    for base in node.bases:
        if isinstance(base, ast.Name) and (base.id in homes or base.id in here):
            home, base_name = homes.get(base.id, (module, base.id))
            yield from _members_of(str(home), base_name)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            marks = {mark.id for mark in each.decorator_list if isinstance(mark, ast.Name)}
            yield HelpMember(each.name, "property" if marks & {"property", "cached_property"} else "function")
