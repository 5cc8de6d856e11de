"""Find the changes of a cell to a notebook's names, and to the objects behind them. Runs in ranks and in the kernel.

A rank records the notebook before its cell (`Baseline`, with an `Inventory` of the objects), and afterwards the
differences (`Delta`). An object is known by identity; its place is the path to it from a name (`ObjectPlace`). The
kernel, whose own objects have not changed meanwhile, finds its object at a place (`found_at`) and writes the change
into it (`writes_of`).

Reasons: docs/design/namespace.md
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from nbaccel.base.quantities import with_article
from nbaccel.base.values import attributes_of
from nbaccel.namespace.kind import CannotWrite, Change, IsSame, Kind, Stays, Step, Write
from nbaccel.namespace.kinds import ATTRIBUTES, Kinds, globals_of, is_found_by_name, part
from nbaccel.namespace.state_in_c import may_own_state_in_c
from nbaccel.namespace.wrappers import is_lightnings_callback, is_of_lightning, plain

__all__ = [
    "Baseline",
    "Delta",
    "Inventory",
    "ObjectPlace",
    "belongs_to_ipython",
    "found_at",
    "is_the_users",
    "no_collections",
    "writes_of",
]

_MOST_OBJECTS = 150_000
"""Objects that are read beside what is trained: half a second of a processor.

A limit of time would make what comes back depend on what else the machine does.
"""

_OF_MODULES = ("_modules", "_parameters", "_buffers")
_OF_TRAINING = frozenset({*_OF_MODULES, "state", "param_groups"})
"""Attributes of models and optimizers that lead to what is trained."""

_MANY = 1000
_CONTAINERS = (list, dict, tuple, deque)
_UNREAD = Kind()
"""The kind of an object that was found, and not read."""


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """The place of an object: a name, and the steps from it.

    Args:
        address: That of the object in the process that named the place; 0 if that is no copy of the kernel. For
            attributes, that of their owner: Python may make the dictionary of them only when it is read.

    Example:
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


_LONGEST_KEY = 40


def _index(key: Any) -> str:
    """Return a key as it is written, or the kind of one that is long: a tensor, or the text of one.

    Example:
        >>> _index("lr"), _index(3), _index("Parameter containing: " + "0.1 " * 20)
        ("'lr'", '3', 'a str')
    """
    if type(key) is str and key.isdigit():
        return key
    written = repr(key) if type(key) in (str, int, float, bool, bytes, tuple) else ""
    return (
        written if 0 < len(written) <= _LONGEST_KEY and "tensor(" not in written else with_article(type(key).__name__)
    )


def writes_of(
    changes: Mapping[str, Change], placed: Callable[[tuple[Any, ...]], Any]
) -> tuple[list[Write], dict[str, str]]:
    """Prepare writing `changes` into the notebook's objects; return the writes, and the other keys with reasons.

    Args:
        placed: Finds an object by its token.  The reason is "" where nothing differs. Nothing is written until
            everything is prepared: the writes run no code of the user's.
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
        except IsSame:
            refused[key] = ""
        except Exception as error:  # also from the hash of a key
            refused[key] = str(error)
    return writes, refused


def found_at(place: ObjectPlace, namespace: Mapping[str, Any]) -> Any:
    """Return the object at `place`.

    Raises:
        LookupError: There is nothing, or another object.

    Example:
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

    Args:
        is_copy: This process is a copy of the kernel, so objects have the same addresses as there.
        most: Objects that are read. What is trained does not count, and is always read: models, optimizers, and what
            they lead to. Of the others each name gets its share first, without containers of more than 1,000 elements.
        kinds: Says how objects are read; `Kinds` by default.

    Attributes:
        takes_gradients: See `Places`.
        unlooked: Names that lead to more objects, and, after `changes`, places of objects that could not be compared,
            each with the reason. Changes of objects that only these names lead to are not known.
        stayed: After `changes`, places of objects that have changed and cannot be changed in the notebook, and why.
    """

    def __init__(
        self,
        names: Iterable[str],
        namespace: Mapping[str, Any],
        *,
        is_copy: bool = True,
        most: int = _MOST_OBJECTS,
        kinds: Kinds | None = None,
    ) -> None:
        self.takes_gradients = True
        self._namespace = namespace
        self._classes: set[int] = set()  # whose code was read
        self._is_copy = is_copy
        self._objects: list[Any] = []  # kept, so that no id is used twice
        self._kind_of_each = kinds or Kinds()
        self._kinds: list[Kind | None] = []
        self._marks: list[Any] = []
        self._ways: list[tuple[int, Step] | str] = []  # to each object: the one before and the step; or the name
        self._index: dict[int, int] = {}
        self._incomparable: list[Any] = []
        self._read = 0
        self._of_training: deque[int] = deque()  # to be read whatever else there is
        self._waiting: deque[int] = deque()
        self.unlooked: dict[str, str] = {}
        self.stayed: dict[str, str] = {}
        names = [name for name in names if name in namespace]
        large: deque[int] = deque()
        many = sys.maxsize if most == sys.maxsize else _MANY  # without a limit no name takes from others
        with no_collections():
            for number, name in enumerate(names, 1):
                self._add(namespace[name], name)
                large += self._look(most * number // len(names), many)
            self._waiting = large
            left = self._look(most)
            for index in [index for index in left if _is_trained(self._objects[index])]:
                self._of_training.append(index)
                left += self._look(0)
        for index in left:
            if self._kinds[index] is _UNREAD and self._kind_of_each.of(self._objects[index]) is not None:
                self.unlooked[self._name(index)] = f"more than {most:,} objects: name it in --out"

    def __len__(self) -> int:
        return len(self._objects)

    def token(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the replacement of an object in a pickle: its `ObjectPlace`, as a tuple; None for a new object."""
        place = self.place(obj)
        return None if place is None else (place.name, place.steps, place.address)

    def tensors(self) -> Iterator[Any]:
        """Yield the tensors among the objects whose memory is laid out as it was."""
        for obj, kind, mark in zip(self._objects, self._kinds, self._marks, strict=True):
            if kind is not None and kind.keeps_memory(obj, mark):
                yield obj

    def place(self, obj: Any) -> ObjectPlace | None:
        """Return the place of an object; None for a new one, and for a value."""
        index = self._index.get(id(obj))
        if index is None or (self._kinds[index] is None and is_found_by_name(obj)):
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

    def seen(self) -> Iterator[tuple[Any, Kind | None, Any]]:
        """Yield the objects that were read, in the order of the walk, each with its kind and its mark."""
        yield from zip(self._objects, self._kinds, self._marks, strict=True)

    def changes(self) -> Iterator[Change]:
        """Yield the change of each object that has changed; `unlooked` names those that cannot be compared.

        Called once.
        """
        for obj, kind, mark in zip(self._objects, self._kinds, self._marks, strict=True):
            if kind is None:
                continue
            try:
                content = kind.change(obj, mark)
            except Stays as why:
                self.stayed[str(self.place(obj))] = str(why)
                continue
            except Exception:  # an object of a library with inconsistent answers
                self._incomparable.append(obj)
                continue
            if content is not None and (token := self.token(obj)) is not None:
                yield Change(token, content)
            if content is None and (doubt := kind.doubt(obj, mark)) and self.is_near(obj):
                self.unlooked[str(self.place(obj))] = doubt
        for obj in self._incomparable:
            self.unlooked[str(self.place(obj))] = f"{with_article(type(obj).__name__)} cannot be compared"

    def is_near(self, obj: Any) -> bool:
        """Return whether a name has the object, or an object that does not say itself what its state is."""
        place = self.place(obj)
        words = [] if place is None else [word for word, _ in place.steps]
        if place is None or words not in ([], ["attributes", "value"]):
            return False
        return not words or not may_own_state_in_c(type(self._namespace.get(place.name)))

    def _name(self, index: int) -> str:
        while type(way := self._ways[index]) is tuple:
            index = way[0]
        assert isinstance(way, str)
        return way

    def _add(self, obj: Any, way: tuple[int, Step] | str) -> None:
        if id(obj) not in self._index:
            index = self._index[id(obj)] = len(self._objects)
            self._objects.append(obj)
            self._kinds.append(_UNREAD)
            self._marks.append(None)
            self._ways.append(way)
            (self._of_training if _is_trained(obj) else self._waiting).append(index)

    def _look(self, most: int, many: int = sys.maxsize) -> list[int]:
        """Read all added objects and those that they lead to, until `most` are read; return those that are left.

        Args:
            many: Containers with more elements are left, too.
        """
        objects, kinds, ways, known = self._objects, self._kinds, self._ways, self._index
        kind_of, seen, of_training, waiting = self._kind_of_each.of, self._classes, self._of_training, self._waiting
        left: list[int] = []
        while of_training or (waiting and self._read < most):
            is_of_training = bool(of_training)
            index = of_training.popleft() if is_of_training else waiting.popleft()
            obj = objects[index]
            if not is_of_training:
                if type(obj) in _CONTAINERS and len(obj) > many:
                    left.append(index)
                    continue
                is_of_training = _is_trained(obj)
            if kinds[index] is not _UNREAD:
                continue
            kind = kind_of(obj)
            parts: Iterable[tuple[Step, Any]] = ()
            if kind is not None:
                try:
                    self._marks[index], parts = kind.mark(obj), kind.parts(obj)
                except Exception:  # for example another class of tensors
                    kind = None
                    self._incomparable.append(obj)
            kinds[index] = kind
            if not is_of_training:
                self._read += 1 if kind is None else kind.cost
            if (code := obj if type(obj) is FunctionType else type(obj)) is obj or id(code) not in seen:
                seen.add(id(code))
                for name in globals_of(code, self._namespace):
                    self._add(self._namespace[name], name)
            way = ways[index]
            are_attributes = type(way) is tuple and way[1][0] == "attributes"
            for step, each in parts:
                if id(each) not in known:
                    leads_on = is_of_training and (not are_attributes or step[1] in _OF_TRAINING)
                    (of_training if leads_on else waiting).append(len(objects))
                    known[id(each)] = len(objects)
                    objects.append(each)
                    kinds.append(_UNREAD)
                    self._marks.append(None)
                    ways.append((index, step))
        left += waiting
        waiting.clear()
        return left


def _is_trained(obj: Any) -> bool:
    """Return whether it is a model, an optimizer, or a tensor that requires a gradient."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(type(obj), (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return False
    return not issubclass(type(obj), torch.Tensor) or bool(torch.Tensor.requires_grad.__get__(obj))


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

    Args:
        bound: Names that are new, or bound to other objects than before; wrappers of training do not count as other
            objects.
        deleted: Names that are gone.
        changes: The changes of objects that the notebook has, at any depth.
        unlooked: Names, and places, of objects that could not be compared, each with the reason.
        staying: Places of objects that have changed and stay in their rank, each with the reason.
    """

    bound: Mapping[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    unlooked: Mapping[str, str] = field(default_factory=dict)
    staying: Mapping[str, str] = field(default_factory=dict)


class Baseline:
    """The names of a notebook before a cell, and the objects that those in `mentioned` lead to.

    Names are found by comparing namespaces, so any way of binding counts: a statement, a magic, or ``globals()``.

    Args:
        is_copy: This process is a copy of the kernel.

    Attributes:
        inventory: Of these objects.

    Example:
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
                if is_the_users(name) and not _is_as_before(name, value, before)
            },
            [name for name in before if name not in now and is_the_users(name)],
            changes,
            self.inventory.unlooked,
            self.inventory.stayed
            | {
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


_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
"""Begins of names that torch.compile binds in the namespace of the code that it compiles."""


def is_the_users(name: str) -> bool:
    """Return whether a name of the notebook is the user's, not one of Python, IPython or torch.compile."""
    return name not in _NAMES_OF_MODULES and not name.startswith(_OF_DYNAMO) and not belongs_to_ipython(name)


def belongs_to_ipython(name: str) -> bool:
    """Return whether IPython uses this name in a notebook: for history, displays, and commands to quit.

    Example:
        >>> belongs_to_ipython("_i12"), belongs_to_ipython("_dh"), belongs_to_ipython("_hidden")
        (True, True, False)
    """
    return name in {"In", "Out", "get_ipython", "exit", "quit", "open", "display"} or (
        name.startswith("_") and name.strip("_i0123456789dhost") == ""
    )
