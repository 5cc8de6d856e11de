"""SetUpAnew: sets up again, or refuses, objects of other libraries from the notebook, at their first use.

Runs in ranks.

A library asks once how many processes there are, and stores the answer in its objects. Those that a rank inherited, or
that were sent to it, say "one". They are distinguished by identity from the objects that this process makes: nothing is
written into them, and pickles, copies and dictionaries of them are unchanged.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from types import CodeType
from typing import Any, NoReturn

from nbaccel.errors import NotInRanks

__all__ = ["SetUpAnew", "name_of", "names_in", "refuse"]


class SetUpAnew:
    """Watches attributes of a class, through which its objects are seen before they are used.

    attributes: names in the dictionary of an object; an object that has none of them yet is being made here.
    renew: called once with each object that came from the notebook, before the attribute is read or set. It may read
    and set the attributes itself. If it raises, it is called again at the next use.
    """

    def __init__(self, attributes: Sequence[str], renew: Callable[[Any], None]) -> None:
        self._attributes = attributes
        self._renew = renew
        self._own: dict[int, weakref.ref[Any]] = {}  # by id: not every class has a hash

    def watch(self, kind: type) -> None:
        """Watch the objects of `kind`, and of its subclasses, from now on."""
        for name in self._attributes:
            setattr(kind, name, _Watched(self, name, vars(kind).get(name)))

    def add(self, value: object) -> None:
        """Record that this process made `value`, or has set it up."""
        key = id(value)
        self._own[key] = weakref.ref(value, lambda _: self._own.pop(key, None))

    def __contains__(self, value: object) -> bool:
        return id(value) in self._own

    def meet(self, value: object) -> None:
        """Set `value` up again if it came from the notebook."""
        if value in self:
            return
        came = any(name in vars(value) for name in self._attributes)
        self.add(value)
        if came:
            try:
                self._renew(value)
            except BaseException:
                del self._own[id(value)]
                raise


class _Watched:
    """One attribute. default: that of the class, used if it is a cached property."""

    def __init__(self, anew: SetUpAnew, name: str, default: Any) -> None:
        self._anew = anew
        self._name = name
        self._default = default

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self if self._default is None else self._default
        self._anew.meet(owner)
        values = vars(owner)
        if self._name not in values:
            if not isinstance(self._default, cached_property):
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {self._name!r}")
            values[self._name] = self._default.func(owner)
        return values[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        self._anew.meet(owner)
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        try:
            del vars(owner)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


def refuse(value: object, why: str) -> NoReturn:
    """Raise `NotInRanks` for an object of the notebook, with the line to move.

    why: a clause that says what cannot be set up anew.
    """
    kind = type(value).__name__
    line = f"{name_of(value) or kind.lower()} = {kind}(...)"
    raise NotInRanks(
        f"this {kind} was made in an earlier cell, outside of the ranks, and {why}. Move the line `{line}` into this "
        "cell, or into the function that the ranks run."
    )


def name_of(value: object) -> str | None:
    """Return the notebook's name for `value`; None if it has none."""
    names = (name for name, held in list(vars(sys.modules["__main__"]).items()) if held is value)
    return next((name for name in names if not name.startswith("_")), None)


def names_in(code: CodeType) -> set[str]:
    """Return names of attributes and globals in a function's code, and in the functions inside it."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(names_in, nested))
