"""OldValues: what the notebook had under the names of `--out` when a cell began. Runs in ranks.

Ranks begin with the notebook's values, so a run that ends early, or one of a sweep, would bring back an earlier result
as its own. A name counts as left if the cell has bound it, or may have changed the object that was there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from types import CodeType
from typing import Any

from nbaccel.namespace.names import (
    READ_BY_TEXT,
    codes_of,
    names_in_magics,
    names_read,
    read_before_made,
    with_their_own,
)
from nbaccel.namespace.parameters import mark
from nbaccel.namespace.wrappers import plain

__all__ = ["OldValues"]

_MOST_PARTS, _MOST_LAYERS = 100, 5
_MOST_COMPARED = 2000
_UNCHANGEABLE = (bool, int, float, complex, str, bytes, type(None))


class OldValues:
    """The values of `names` in a namespace, before the code runs there.

    Numbers and texts that the code does not read are taken out of the namespace while it runs. Python has only one
    object for the number 5, so nobody could see afterwards that the code has bound a 5 to a name that had one.

    Args:
        code, parts: The cell, and what it compiles to.
        is_strict: A run that ends without an error, too, leaves only names that it has bound or read: a run of a sweep.

    Attributes:
        untouched: The names that the code has neither bound nor changed; known after `compared`.

    Example:
        >>> space = {"score": 5, "best": 3}
        >>> old = OldValues(["score", "best"], space, code := "best = max(best, 2)", [compile(code, "", "exec")], True)
        >>> with old.compared():
        ...     exec(code, space)
        >>> old.untouched
        {'score'}
    """

    def __init__(
        self,
        names: Sequence[str],
        namespace: dict[str, Any],
        code: str,
        parts: Sequence[CodeType],
        is_strict: bool = False,
    ) -> None:
        self._namespace = namespace
        self._is_strict = is_strict
        self._values = {name: namespace[name] for name in names if name in namespace}
        self._marks = {name: _mark_of(value) for name, value in self._values.items()}
        self._taken_out: set[str] = set()
        self.untouched: set[str] = set()
        self._read = set(self._values)
        if not self._values or READ_BY_TEXT & names_read(parts):
            return
        self._read &= read_before_made(code, namespace) | with_their_own(names_in_magics(code), namespace)
        plain_ones = {name for name, value in self._values.items() if type(value) in _UNCHANGEABLE} - self._read
        self._taken_out = plain_ones - _read_by_functions(namespace) if plain_ones else set()
        for name in self._taken_out:
            del namespace[name]

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Record in `untouched` the names that the code in this block leaves as they were, also if it raises.

        If the block ends without an error, `untouched` is empty. With `is_strict` it then has the names that were taken
        out of the namespace, or deleted, and that the code has not bound again.
        """
        has_finished = False
        try:
            yield
            has_finished = True
        finally:
            if not has_finished or self._is_strict:
                self.untouched = {name for name in self._values if self._is_untouched(name, has_finished)}
            for name in self._taken_out - self._namespace.keys():
                self._namespace[name] = self._values[name]

    def _is_untouched(self, name: str, has_finished: bool) -> bool:
        if name not in self._namespace:
            return True
        old = self._values[name]
        if has_finished or name in self._taken_out or self._namespace[name] is not old:
            return False
        if type(old) in _UNCHANGEABLE:
            return True
        is_same = self._marks[name] is not None and self._marks[name] == _mark_of(old)
        return is_same and (name not in self._read or _is_flat(old))


def _read_by_functions(namespace: dict[str, Any]) -> set[str]:
    """Return the names that functions of the notebook read, which the code may call without naming them: callbacks."""
    found: set[str] = set()
    for value in list(namespace.values()):
        with suppress(Exception):  # a class of the user's may raise anything
            for each in _callables_in(value):
                found |= names_read(list(codes_of(each)))
    return found


def _callables_in(value: Any) -> Iterator[Any]:
    """Yield a value, and those that it holds, without what decorators have put around them."""
    kind = type(value)
    held = value.values() if kind is dict else value if kind in (list, tuple) else ()
    for each in (value, *islice(held, _MOST_PARTS)):
        for _ in range(_MOST_LAYERS):
            yield each
            is_partial = type(each) is functools.partial
            each = each.func if is_partial else getattr(each, "__wrapped__", None) if callable(each) else None


def _is_flat(value: Any) -> bool:
    """Return whether a change of a value, in it or below it, would be seen in its mark."""
    if type(value) not in (list, tuple, set, dict) or len(value) > _MOST_COMPARED:
        return False
    parts = [*value, *value.values()] if type(value) is dict else value
    return all(type(part) in _UNCHANGEABLE for part in parts)


def _mark_of(value: Any) -> int | None:
    try:
        return mark(plain(value))
    except Exception:  # a class of the user's may raise anything
        return None
