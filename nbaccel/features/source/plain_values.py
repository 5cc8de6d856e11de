"""Turn settings into marks that can be compared, without data and places. Used in every process; runs no code.

A mark is readable where a value is short, so that a message can say what it was. Passwords and the like are hashed, or
left out. Which values code reads is not known here: see `source_mark`.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath
from typing import Any

__all__ = ["LONG", "VALUE", "is_a", "is_place", "is_plain", "is_secret", "mark_of_value", "parts_of", "short_hash"]

VALUE, LONG = "= ", "# "
"""Beginnings of the marks of values: of those that stand there as they are, and of hashes."""

_LONGEST_VALUE = 60
_MOST_IN_CONTAINER = 100
"""Values in a list, a dict or a set that still are settings; more of them are data."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_CONTAINERS = (tuple, list, set, frozenset, dict)
_ALSO_PLAIN = ("torch.dtype", "builtins.range", "decimal.Decimal", "fractions.Fraction", "datetime.date",
               "datetime.datetime", "datetime.timedelta")  # fmt: skip
_DEVICE = re.compile(r"(cpu|cuda|mps|xla|xpu)(:\d+)?")
_SECRET = re.compile(r"api_?key|secret|passw|credential|(hf|api|auth|access)_?token", re.IGNORECASE)
"""Names whose texts are in no file."""

_NO_SECRET = re.compile(r"secretar|secretion|prompt", re.IGNORECASE)
_BLANK = re.compile(r"\s")
_BEFORE_PLACE = re.compile(r" of | in ")
"""Between the name of an argument and that of its function, as in "prompt of has_secret()"."""

_LIKE_A_SECRET = re.compile(r"[^\s'\"]{20}")
"""So many characters without a blank, as tokens have: such a text counts, and only its hash is written."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_LARGEST = 10**100
"""Numbers from here on are written in hexadecimal: Python refuses decimals of some thousand digits."""


def mark_of_value(name: str, value: Any, is_strict: bool) -> str:
    """Return the mark of a value; empty if it does not count.

    Args:
        name: Under which code reads it.
        is_strict: Containers of any length, and places, count.

    Example:
        >>> mark_of_value("MAX_TOKENS", 32, False), mark_of_value("device", "cuda:1", False)
        ('= 32', '')
    """
    is_hidden = type(value) in (str, bytes) and _SECRET.search(name) is not None
    if not is_strict and (is_secret(name, value) or is_place(value) or _is_data(value)):
        return ""
    try:
        text = _text_of(value)
    except (_NotCounted, RecursionError, RuntimeError):  # it contains itself, or a thread changes it
        return ""
    is_short = len(text) <= _LONGEST_VALUE and not (is_hidden or _LIKE_A_SECRET.search(text))
    return VALUE + text if is_short else f"{LONG}{type(value).__name__} {short_hash(text)}"


def short_hash(text: str) -> str:
    """Return a hash that is as short as a mark may be."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def is_a(value: Any, *kinds: type) -> bool:
    """Return whether a value is of one of these classes; a proxy, which says that it is, may run code for that."""
    return issubclass(type(value), kinds)


class _NotCounted(Exception):
    """A value holds data, a model, or another object."""


def is_plain(value: Any) -> bool:
    """Return whether a value may count by its content."""
    kind = type(value)
    return (
        kind in _PLAIN
        or kind in _CONTAINERS
        or is_a(value, enum.Enum, re.Pattern, PurePath)
        or _is_tuple(value)
        or (kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"))
        or f"{kind.__module__}.{kind.__name__}" in _ALSO_PLAIN
    )


def _is_tuple(value: Any) -> bool:
    return type(value) is tuple or (is_a(value, tuple) and hasattr(type(value), "_fields"))


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value is a password or the like: it has no blanks, and its own name says so.

    Example:
        >>> is_secret("api_key", "abc"), is_secret("PASSWORD_PROMPT", "Say it."), is_secret("x of is_secret()", "abc")
        (True, False, False)
    """
    if type(value) not in (str, bytes):
        return False
    own = _BEFORE_PLACE.split(name)[0].rpartition(".")[2]
    text = value if type(value) is str else value.decode("latin-1")
    return bool(_SECRET.search(own)) and not (_NO_SECRET.search(own) or _BLANK.search(text))


def is_place(value: Any) -> bool:
    """Return whether a value says where something runs or lies: another session may have another one.

    Example:
        >>> is_place("cuda:1"), is_place(PurePath("data")), is_place("data")
        (True, True, False)
    """
    kind = type(value)
    if kind is str:
        return _DEVICE.fullmatch(value) is not None
    return is_a(value, PurePath) or f"{kind.__module__}.{kind.__name__}" == "torch.device"


def _is_data(value: Any) -> bool:
    if type(value) not in (list, dict, set):
        return False
    return sum(1 for _ in islice(parts_of(value), _MOST_IN_CONTAINER + 1)) > _MOST_IN_CONTAINER


def parts_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in a container, and in containers in it, each with its place in words."""
    kind = type(value)
    if kind is dict:
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif kind is list or _is_tuple(value):
        pairs = enumerate(value)
    else:
        pairs = (("", each) for each in value) if kind in (set, frozenset) else ()
    for key, each in pairs:
        place = f"{path}[{key!r}]" if type(key) in (str, int) else path
        yield place, each
        yield from parts_of(each, place)


def _text_of(value: Any) -> str:
    """Return a value as text, equal for equal values in all processes and versions of Python.

    Raises:
        _NotCounted: It holds something that does not count.
    """
    kind = type(value)
    if kind is str:
        return repr(value) if value.isascii() else json.dumps(value, ensure_ascii=False)
    if kind is int:
        return str(value) if -_LARGEST < value < _LARGEST else hex(value)
    if kind in _PLAIN or f"{kind.__module__}.{kind.__name__}" in _ALSO_PLAIN:
        return repr(value)
    if is_a(value, *_FUNCTIONS):
        return str(value.__name__)
    if is_a(value, enum.Enum):
        return f"{kind.__name__}.{value.name} {_text_of(value.value)}"
    if is_a(value, PurePath):
        return _text_of(str(value))
    if is_a(value, re.Pattern):
        return f"re.compile({_text_of(value.pattern)}, {int(value.flags)})"
    if kind is dict:
        return f"{{{', '.join(sorted(f'{_text_of(key)}: {_text_of(each)}' for key, each in value.items()))}}}"
    if kind in (set, frozenset):
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if kind is list or _is_tuple(value):
        opening, closing = "[]" if kind is list else "()"
        return f"{opening}{', '.join(map(_text_of, value))}{closing}"
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return f"{kind.__name__}({value.item()!r})"
    raise _NotCounted
