"""Replacement: a function that takes another one's place in a module. Made in the kernel, put in place in ranks.

A rank that makes a function copies a page of the kernel's for each object that it uses for that. So it is made once,
before the first fork of all: a forked rank only puts it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Replacement"]

_Function = Callable[..., Any]


class Replacement:
    """One function, and what takes its place. Nothing is changed before `put`.

    Args:
        holders: The modules that have the function, under one name.
        name: That name.
        wraps: Returns the new function for the old one.
    """

    def __init__(self, holders: Sequence[Any], name: str, wraps: Callable[[_Function], _Function]) -> None:
        self._holders = holders
        self._name = name
        self._wraps = wraps
        self._old = getattr(holders[0], name)
        self._new = wraps(self._old)

    def put(self) -> None:
        """Put the new function there; it is made anew where another one has taken the old one's place since."""
        now = getattr(self._holders[0], self._name)
        new = self._new if now is self._old else self._wraps(now)
        for holder in self._holders:
            setattr(holder, self._name, new)
