"""Home: the namespace that persistent ranks keep from one task to the next. One in the kernel, and one in each rank.

Names are stored in the rank; the kernel sends a name that a rank lacks with the first cell that reads it. Classes and
functions of the notebook that a rank has received are known by the same name on both sides. So only that name is sent,
and an object that comes back is of the notebook's own class.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Home", "anchors_of"]

_DEFINED = (type, types.FunctionType)


class Home:
    """The names of one side, and the classes and functions that both sides know.

    namespace: the notebook's in the kernel, the rank's own in a rank.
    there: in the kernel, the names that all working ranks have.

    >>> home = Home({})
    >>> home.learn({"x": 1, "twice": anchors_of})
    >>> home.find("name:twice")
    Traceback (most recent call last):
    ...
    KeyError: 'name:twice'
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.there: frozenset[str] = frozenset()
        self._known: dict[str, Any] = {}

    def learn(self, values: Mapping[str, Any]) -> None:
        """Record that the peer now holds `values` under the same names."""
        self._known |= {name: _behind(name, values) for name in anchors_of(values).values()}

    def forget(self) -> None:
        """Record that the peer holds nothing."""
        self._known.clear()

    @property
    def anchors(self) -> dict[int, str]:
        """Return the names of the objects that both sides know, by the id of the object."""
        return {id(value): name for name, value in self._known.items()}

    def find(self, name: str) -> Any:
        """Return this side's object for a name that both sides know.

        Raises:
            KeyError: the name is not known.
        """
        return self._known[name]

    def outdated(self, names: Iterator[str] | list[str]) -> list[str]:
        """Return the classes and functions among `names` that were redefined on this side after the peer got them."""
        changed = []
        for name in names:
            value, known = self.namespace.get(name), self._known.get(f"name:{name}")
            if known is not None and value is not known and issubclass(type(value), _DEFINED):
                changed.append(name)
        return changed


def anchors_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return names by id: classes and functions of the notebook, and the classes of its objects that no name leads to.

    Without this a class of the notebook would come back as a copy, and `type(model) is Net` would be False. A proxy
    counts as an object of its own class: asking it for its ``__class__`` runs code, which may fail or take long.
    """
    anchors: dict[int, str] = {}
    for name, value in list(namespace.items()):
        kind = type(value)
        if kind.__module__ == "__main__":
            anchors.setdefault(id(kind), f"type:{name}")
    for name, value in list(namespace.items()):
        if issubclass(type(value), _DEFINED) and value.__module__ == "__main__":
            anchors[id(value)] = f"name:{name}"
    return anchors


def _behind(anchor: str, namespace: Mapping[str, Any]) -> Any:
    kind, _, name = anchor.partition(":")
    return type(namespace[name]) if kind == "type" else namespace[name]
