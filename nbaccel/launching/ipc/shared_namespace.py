"""SharedNamespace: the names that persistent ranks keep from one task to the next. Used by both.

There is one in the kernel, and one in each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbaccel.launching.ipc.kernel_state import cell_sources
from nbaccel.launching.ipc.user_code import DEFINED, by_reference_of

__all__ = ["SharedNamespace"]


class SharedNamespace:
    """The names of one side, and the classes and functions that both sides know.

    Names are stored in the rank; the kernel sends a name that a rank lacks with the first cell that reads it. Classes
    and functions of the notebook that a rank has received are known by the same name on both sides. So only that name
    is sent, and an object that comes back is of the notebook's own class.

    Args:
        namespace: The notebook's names in the kernel, the rank's own in a rank.

    Attributes:
        there: In the kernel, the names that all working ranks have.
        unpulled: In the kernel, what was made or trained in ranks that live on, and not brought back, by name: in
            words, and a number for its parameters.

    Example:
        >>> home = SharedNamespace({})
        >>> home.learn({"x": 1, "twice": by_reference_of})
        >>> home.find("name:twice")
        Traceback (most recent call last):
        ...
        KeyError: 'name:twice'
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.there: frozenset[str] = frozenset()
        self.unpulled: dict[str, tuple[str, int]] = {}
        self._known: dict[str, Any] = {}
        self._cells: frozenset[str] = frozenset()

    def learn(self, values: Mapping[str, Any]) -> None:
        """Record that the peer now holds `values` under the same names."""
        self._known |= {name: _behind(name, values) for name in by_reference_of(values).values()}

    def forget(self) -> None:
        """Record that the peer holds nothing."""
        self._known.clear()

    def learn_cells(self) -> None:
        """Record that the peer has the lines of the notebook's cells that have run by now."""
        self._cells = frozenset(cell_sources())

    def new_cells(self) -> dict[str, list[str]]:
        """Return the lines of later cells. Each task sends all of them: a rank may not have taken part in the last."""
        return {name: lines for name, lines in cell_sources().items() if name not in self._cells}

    @property
    def by_reference(self) -> dict[int, str]:
        """Return the names of the objects that both sides know, by the id of the object."""
        return {id(value): name for name, value in self._known.items()}

    def find(self, name: str) -> Any:
        """Return this side's object for a name that both sides know.

        Raises:
            KeyError: The name is not known.
        """
        return self._known[name]

    def outdated(self, names: Iterator[str] | list[str]) -> list[str]:
        """Return the classes and functions among `names` that were redefined on this side after the peer got them."""
        changed = []
        for name in names:
            value, known = self.namespace.get(name), self._known.get(f"name:{name}")
            if known is not None and value is not known and issubclass(type(value), DEFINED):
                changed.append(name)
        return changed


def _behind(anchor: str, namespace: Mapping[str, Any]) -> Any:
    kind, _, name = anchor.partition(":")
    return type(namespace[name]) if kind == "type" else namespace[name]
