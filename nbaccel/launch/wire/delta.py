"""Delta: the changes of a cell to a notebook's names, and to the objects behind them. Runs in ranks and in the kernel.

A rank records the notebook before its cell (`Baseline`), and afterwards the differences. Objects that the notebook has
are known by their places, see `inventory`; names are found by comparing namespaces, so any way of binding counts: a
statement, a magic, or ``globals()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.launch.wire.inventory import Inventory
from nbaccel.launch.wire.kind import Change
from nbaccel.launch.wire.kinds import ATTRIBUTES, attributes_of
from nbaccel.launch.wire.libraries import is_lightnings_callback, is_of_lightning
from nbaccel.launch.wire.wrappers import plain
from nbaccel.view.words import with_article

__all__ = ["Baseline", "Delta", "belongs_to_ipython"]

_OF_MODULES = frozenset(
    {"__annotations__", "__builtins__", "__conditional_annotations__", "__doc__", "__file__", "__loader__"}
    | {"__name__", "__package__", "__spec__", "__warningregistry__"}
)
"""Names that Python sets in every module."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The differences.

    bound: names that are new, or bound to other objects than before; wrappers of training do not count as other
    objects.
    deleted: names that are gone.
    changes: of objects that the notebook has, at any depth.
    unlooked: names, and places, of objects that could not be compared, each with the reason.
    staying: names of Lightning objects that know their rank and have changed, each with a description.
    """

    bound: Mapping[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    unlooked: Mapping[str, str] = field(default_factory=dict)
    staying: Mapping[str, str] = field(default_factory=dict)


class Baseline:
    """The names of a notebook before a cell, and the objects that those in `mentioned` lead to.

    inventory: of these objects.  is_copy: this process is a copy of the kernel.

    >>> names = {"a": [1], "b": 2}
    >>> baseline = Baseline(names, names)
    >>> names["a"].append(3); del names["b"]; names["c"] = names["a"]
    >>> delta = baseline.delta()
    >>> delta.bound, delta.deleted, [change.content for change in delta.changes]
    ({'c': [1, 3]}, ['b'], [(1, 1, [3])])
    """

    def __init__(self, namespace: dict[str, Any], mentioned: Iterable[str], *, is_copy: bool = True) -> None:
        self._namespace = namespace
        self._names = dict(namespace)
        mentioned = list(mentioned)
        self._of_lightning = {
            name: _marks(value)
            for name in mentioned
            if is_of_lightning(type(value := namespace.get(name))) and not is_lightnings_callback(type(value))
        }
        self.inventory = Inventory(mentioned, namespace, is_copy=is_copy)

    def delta(self) -> Delta:
        """Return the differences since then."""
        before, now = self._names, dict(self._namespace)
        changes = list(self.inventory.changes())
        return Delta(
            {
                name: value
                for name, value in now.items()
                if _is_the_users(name) and not _is_as_before(name, value, before)
            },
            [name for name in before if name not in now and _is_the_users(name)],
            changes,
            self.inventory.unlooked,
            {
                name: f"{with_article(type(before[name]).__name__)} that knows its rank"
                for name, marks in self._of_lightning.items()
                if now.get(name) is before[name] and any(ATTRIBUTES.change(*each) is not None for each in marks)
            },
        )


def _marks(obj: Any) -> list[tuple[dict[str, Any], Any]]:
    """Return the attributes of a Lightning object, and of its own Lightning attributes, each with their mark."""
    parts = (attributes_of(obj) or {}).values()
    found = [attributes_of(each) for each in (obj, *(part for part in parts if is_of_lightning(type(part))))]
    return [(attributes, ATTRIBUTES.mark(attributes)) for attributes in found if attributes is not None]


def _is_as_before(name: str, value: Any, before: Mapping[str, Any]) -> bool:
    """Return whether the name has the object that it had; a wrapper of training does not count as another object."""
    return name in before and (before[name] is value or plain(before[name]) is plain(value))


def _is_the_users(name: str) -> bool:
    return name not in _OF_MODULES and not belongs_to_ipython(name)


def belongs_to_ipython(name: str) -> bool:
    """Return whether IPython uses this name in a notebook: for history, displays, and commands to quit.

    >>> belongs_to_ipython("_i12"), belongs_to_ipython("_dh"), belongs_to_ipython("_hidden")
    (True, True, False)
    """
    return name in {"In", "Out", "get_ipython", "exit", "quit", "open", "display"} or (
        name.startswith("_") and name.strip("_i0123456789dhost") == ""
    )
