"""Find the changes of a cell to a notebook's names, and to the objects behind them. Runs in ranks and in the kernel.

A rank records the notebook before its cell (`Baseline`, with an `Inventory` of the objects), and afterwards the
differences (`Delta`). An object is known by identity; its place is the path to it from a name (`ObjectPlace`). The
kernel, whose own objects have not changed meanwhile, finds its object at a place (`found_at`) and writes the change
into it (`writes_of`).
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from nbaccel.launch.objects.kind import CannotWrite, Change, Kind, Step, Write
from nbaccel.launch.objects.kinds import ATTRIBUTES, Kinds, attributes_of, globals_of, is_found_by_name, part
from nbaccel.launch.objects.wrappers import is_lightnings_callback, is_of_lightning, plain
from nbaccel.quantities import with_article

__all__ = [
    "Baseline",
    "Delta",
    "Inventory",
    "ObjectPlace",
    "belongs_to_ipython",
    "found_at",
    "no_collections",
    "writes_of",
]

_MOST_OBJECTS = 300_000
_MOST_SECONDS = 0.3
_OF_MODULES = ("_modules", "_parameters", "_buffers")
_MANY = 1000
_LOOKS = 256
"""Objects between two checks of the time."""


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """The place of an object: a name, and the steps from it.

    address: that of the object in the process that named the place; 0 if that is no copy of the kernel. For attributes,
    that of their owner: Python may make the dictionary of them only when it is read.

    >>> str(ObjectPlace("trainer", (("attributes", None), ("value", "model"))))
    'trainer.model'
    """

    name: str
    steps: tuple[Step, ...] = ()
    address: int = 0

    def __str__(self) -> str:
        text, is_attribute = self.name, False
        for word, key in self.steps:
            if is_attribute and key in _OF_MODULES:
                continue  # its entries are attributes of the module
            if word in ("item", "at", "value"):
                text += f".{key}" if is_attribute and not str(key).isdigit() else f"[{_index(key)}]"
            elif key is not None:
                text += f".{key}"
            is_attribute = word == "attributes"
        return text


def _index(key: Any) -> str:
    return key if type(key) is str and key.isdigit() else repr(key)


def _elements(obj: Any) -> int:
    """Return the length of a large container, which is read after the others; 0 for anything else."""
    for kind in (list, dict, tuple, deque):
        if issubclass(type(obj), kind):
            return length if (length := kind.__len__(obj)) > _MANY else 0
    return 0


def writes_of(
    changes: Mapping[str, Change], placed: Callable[[tuple[Any, ...]], Any]
) -> tuple[list[Write], dict[str, str]]:
    """Prepare writing `changes` into the notebook's objects; return the writes, and the other keys with reasons.

    placed: finds an object by its token.  Nothing is written until everything is prepared: the writes run no code of
    the user's.
    """
    writes: list[Write] = []
    refused: dict[str, str] = {}
    kinds = Kinds()
    for key, change in changes.items():
        try:
            obj = placed(change.token)
            kind = kinds.of(obj)
            if kind is None:
                raise CannotWrite(f"it is {with_article(type(obj).__name__)} here")
            writes.append(kind.writing(obj, change.content))
        except Exception as error:  # also from the hash of a key
            refused[key] = str(error)
    return writes, refused


def found_at(place: ObjectPlace, namespace: Mapping[str, Any]) -> Any:
    """Return the object at `place`.

    Raises:
        LookupError: there is nothing, or another object.

    >>> found_at(ObjectPlace("x", (("value", "a"), ("item", 1))), {"x": {"a": [5, [6]]}})
    [6]
    """
    try:
        obj = owner = namespace[place.name]
        for step in place.steps:
            obj = part(obj, step)
            if step[0] != "attributes":
                owner = obj
    except LookupError:
        raise LookupError(f"{place} is not there any more") from None
    if place.address and id(owner) != place.address:
        raise LookupError(f"{place} is another object by now")
    return obj


class Inventory:
    """The objects that `names` of a namespace lead to now, also through names in the notebook's functions and classes.

    Objects that an object makes on request are not followed, as in `nbytes`: containers are read by the methods of the
    builtin types, other objects by their attributes.

    is_copy: this process is a copy of the kernel, so objects have the same addresses as there.
    takes_gradients: see `Places`.
    unlooked: names that lead to more objects than there was time for, and, after `changes`, places of objects that
    could not be compared, each with the reason. Changes of objects that only these names lead to are not known.
    """

    def __init__(
        self,
        names: Iterable[str],
        namespace: Mapping[str, Any],
        *,
        is_copy: bool = True,
        seconds: float = _MOST_SECONDS,
    ) -> None:
        self.takes_gradients = True
        self._namespace = namespace
        self._classes: set[int] = set()  # whose code was read
        self._is_copy = is_copy
        self._objects: list[Any] = []  # kept, so that no id is used twice
        self._kind_of_each = Kinds()
        self._kinds: list[Kind | None] = []
        self._marks: list[Any] = []
        self._ways: list[tuple[int, Step] | str] = []  # to each object: the one before and the step; or the name
        self._index: dict[int, int] = {}
        self._incomparable: list[Any] = []
        self.unlooked: dict[str, str] = {}
        until = time.monotonic() + seconds
        with no_collections():
            for name in sorted(names, key=lambda name: _elements(namespace.get(name))):
                if name in namespace:
                    self._add(namespace[name], name)
                    if self.unlooked and self._kind_of_each.of(namespace[name]) is None:
                        continue  # a value, a module: nothing to look at
                    if self.unlooked or not self._look(until):
                        self.unlooked[name] = "too large to be compared"

    def __len__(self) -> int:
        return len(self._objects)

    def token(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the replacement of an object in a pickle: its `ObjectPlace`, as a tuple; None for a new object."""
        place = self.place(obj)
        return None if place is None else (place.name, place.steps, place.address)

    def tensors(self) -> Iterator[Any]:
        """Yield the tensors among the objects whose memory is laid out as it was."""
        for obj, kind, mark in zip(self._objects, self._kinds, self._marks, strict=False):
            if kind is not None and kind.keeps_memory(obj, mark):
                yield obj

    def place(self, obj: Any) -> ObjectPlace | None:
        """Return the place of an object; None for a new one, and for a value."""
        index = self._index.get(id(obj))
        if index is None or (index < len(self._kinds) and self._kinds[index] is None and is_found_by_name(obj)):
            return None
        steps: list[Step] = []
        owner = index
        while type(way := self._ways[index]) is tuple:
            index, step = way
            if step[0] == "attributes" and not steps:
                owner = index
            steps.append(step)
        assert isinstance(way, str)
        return ObjectPlace(way, tuple(reversed(steps)), id(self._objects[owner]) if self._is_copy else 0)

    def changes(self) -> Iterator[Change]:
        """Yield the change of each object that has changed; `unlooked` names those that cannot be compared.

        Called once.
        """
        for obj, kind, mark in zip(self._objects, self._kinds, self._marks, strict=False):
            if kind is None:
                continue
            try:
                content = kind.change(obj, mark)
            except Exception:  # an object of a library with inconsistent answers
                self._incomparable.append(obj)
                continue
            if content is not None and (token := self.token(obj)) is not None:
                yield Change(token, content)
        for obj in self._incomparable:
            self.unlooked[str(self.place(obj))] = f"{with_article(type(obj).__name__)} cannot be compared"

    def _add(self, obj: Any, way: tuple[int, Step] | str) -> None:
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self._objects)
            self._objects.append(obj)
            self._ways.append(way)

    def _look(self, until: float) -> bool:
        """Read all added objects and those that they lead to; return False if the time was not enough."""
        objects, kinds, marks, ways, known = self._objects, self._kinds, self._marks, self._ways, self._index
        kind_of, seen = self._kind_of_each.of, self._classes
        while (index := len(kinds)) < len(objects):
            if not index % _LOOKS and time.monotonic() > until:
                return False
            obj = objects[index]
            kind = kind_of(obj)
            mark: Any = None
            parts: Iterable[tuple[Step, Any]] = ()
            if kind is not None:
                try:
                    mark, parts = kind.mark(obj), kind.parts(obj)
                except Exception:  # for example another class of tensors
                    kind = None
                    self._incomparable.append(obj)
            kinds.append(kind)
            marks.append(mark)
            if (code := obj if type(obj) is FunctionType else type(obj)) is obj or id(code) not in seen:
                seen.add(id(code))
                for name in globals_of(code, self._namespace):
                    self._add(self._namespace[name], name)
            for step, each in parts:
                if id(each) not in known:
                    known[id(each)] = len(objects)
                    objects.append(each)
                    ways.append((index, step))
                    if len(objects) > _MOST_OBJECTS:
                        return False
        return True


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch the garbage collector off while the block runs, and on again if it was on.

    The collector's lists are left as they are: `gc.freeze` and `gc.unfreeze` in the kernel would move the young garbage
    of every cell into the oldest generation, which is collected once in dozens of cells.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_NAMES_OF_MODULES = frozenset(
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

    Names are found by comparing namespaces, so any way of binding counts: a statement, a magic, or ``globals()``.

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
    return name not in _NAMES_OF_MODULES and not belongs_to_ipython(name)


def belongs_to_ipython(name: str) -> bool:
    """Return whether IPython uses this name in a notebook: for history, displays, and commands to quit.

    >>> belongs_to_ipython("_i12"), belongs_to_ipython("_dh"), belongs_to_ipython("_hidden")
    (True, True, False)
    """
    return name in {"In", "Out", "get_ipython", "exit", "quit", "open", "display"} or (
        name.startswith("_") and name.strip("_i0123456789dhost") == ""
    )
