"""HeadState: the objects of a notebook at the head of a cell's outermost loop. Runs in ranks.

A checkpoint of a cell is the difference to this state (`difference`), which the statements before the loop make again
when a run goes on. Objects are found and compared by `namespace.inventory`; here are the names that count, the texts
that stand for places in a file, and the sums by which a run that goes on shows that it is the same one.

Roots: the names of the notebook, and locals of the functions on the way to the loop. A local of function i, counted
from the cell, is named "i:name".
"""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nbaccel.base.quantities import with_article
from nbaccel.errors import CannotSave
from nbaccel.namespace.inventory import Inventory, ObjectPlace, is_the_users, no_collections
from nbaccel.namespace.kind import Kind, Stays, Step, Write
from nbaccel.namespace.kinds import Kinds

__all__ = [
    "CODE",
    "COPY",
    "OF_THE_SCREEN",
    "SCALARS",
    "HeadState",
    "KindsOfCells",
    "Seen",
    "is_refused_name",
    "local_name",
    "shown",
    "text_of",
    "users_roots",
]

SCALARS = frozenset({type(None), bool, int, float, str})
"""Types of values that JSON has."""

CODE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, types.CellType, type),
    *(types.CodeType, types.FrameType, classmethod, staticmethod, property, functools.partial),
)
"""Types of objects that run code or lead to it: no file names one, not even one that the notebook has."""

_MOST_SUMS = 2_000
"""Objects of one root with a sum of their own, by which a message can name them; the others have one together."""


def local_name(root: str) -> str:
    """Return the name that the user wrote for a root.

    Example:
        >>> local_name("model"), local_name("1:model")
        ('model', 'model')
    """
    return root.rpartition(":")[2]


def users_roots(roots: Mapping[str, Any], compared: Collection[str] | None = None) -> dict[str, Any]:
    """Return the roots that are the user's, sorted: those in `compared` first, and globals before locals."""
    users = [root for root in roots if is_the_users(local_name(root))]
    users.sort(key=lambda root: (compared is not None and root not in compared, ":" in root, root))
    return {root: roots[root] for root in users}


def shown(place: ObjectPlace) -> str:
    """Return a place as a person writes it."""
    name = "a copy of a model" if place.name.startswith(COPY) else local_name(place.name)
    return str(ObjectPlace(name, place.steps))


COPY = "="
"""Beginning of the roots of copies of models, which no name has."""


def is_refused_name(name: Any) -> bool:
    """Return whether a key of a dictionary or an attribute may not be in a file: ``__class__``, ``__reduce__`` ..."""
    return type(name) is str and name.startswith("__") and name.endswith("__")


class _Scaler(Kind):
    """Gradient scalers of torch, by their state dict: what else they have counts within one step."""

    is_data = True

    def mark(self, obj: Any) -> dict[str, Any]:
        return dict(obj.state_dict())

    def change(self, obj: Any, mark: dict[str, Any]) -> tuple[dict[str, Any]] | None:
        now = self.mark(obj)
        return None if now == mark else (now,)

    def writing(self, obj: Any, change: tuple[dict[str, Any]]) -> Write:
        (state,) = change
        if state.keys() != obj.state_dict().keys() or not all(type(each) in (int, float) for each in state.values()):
            raise ValueError("it is not the state of a gradient scaler")
        return lambda: obj.load_state_dict(state)


class _LoaderIterator(Kind):
    """Iterators of loaders: whether they have moved. One that a root has comes back by its position."""

    def mark(self, obj: Any) -> int:
        return int(obj._num_yielded)

    def change(self, obj: Any, mark: int) -> None:
        if int(obj._num_yielded) != mark:
            raise Stays("give it a name: it = iter(loader)")


SCALER, _LOADER_ITERATOR = _Scaler(), _LoaderIterator()
_TUPLE = Kinds().of(())
_PASSED_OVER = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, type(threading.Lock()))
"""Objects whose state follows from that of others. So does a tokenizer's: each call sets its padding anew."""


class KindsOfCells(Kinds):
    """Kinds of objects in a checkpoint of a cell."""

    def of(self, obj: Any) -> Kind | None:
        if (kind := super().of(obj)) is None or kind is _TUPLE:
            return kind
        if issubclass(type(obj), _PASSED_OVER) or type(obj).__module__.partition(".")[0] == "tokenizers":
            return None
        if issubclass(type(obj), _BaseDataLoaderIter):
            return _LOADER_ITERATOR
        return SCALER if issubclass(type(obj), torch.amp.GradScaler) else kind


def stateless(value: Any) -> str | None:
    """Return why no file holds a value that has no state of its own; None if it may have one."""
    kind = type(value)
    if issubclass(kind, CODE):
        return "code that was made in the loop"
    if isinstance(value, io.IOBase):
        mode = getattr(value, "mode", "")
        is_at_its_end = value.closed or (isinstance(mode, str) and mode.startswith("a"))
        return "a file" if is_at_its_end or (value.seekable() and not value.tell()) else None
    if issubclass(kind, types.GeneratorType):
        return "a generator that has ended" if value.gi_frame is None else None
    if hasattr(kind, "__next__"):
        return None
    is_shown = f"{kind.__module__}.".startswith(OF_THE_SCREEN)
    return f"{with_article(kind.__name__)} of this process" if is_shown or KindsOfCells().of(value) is None else None


def _begins_anew(file: io.IOBase) -> bool:
    """Return whether opening a file once more would lose what it has; not of the process's own output."""
    mode, name = getattr(file, "mode", ""), getattr(file, "name", "<>")
    is_on_disk = isinstance(name, str) and not name.startswith("<")
    return is_on_disk and not file.closed and isinstance(mode, str) and not {"w", "x"}.isdisjoint(mode)


OF_THE_SCREEN = ("IPython.", "ipywidgets.", "logging.", "matplotlib.", "tqdm.")
"""Modules whose objects show something: a run that goes on shows it from where it is."""


class Seen(NamedTuple):
    """An object at the head, its kind, the mark of its state there, and its place."""

    obj: Any
    kind: Kind
    mark: Any
    place: ObjectPlace


class HeadState:
    """Objects that `roots` lead to now, their places, and marks by which their changes are found later.

    Args:
        roots: Values by root, see above; those of Python and IPython are left out.
        are_names: They are sorted; otherwise they count as they come.
        compared: Those that a run which goes on has to have in the same state, however its ranks are started, see
            `CellNames`; None for all. Places of objects begin at one of these where possible.

    Attributes:
        roots: Without these, sorted. Globals are before locals: a function whose call is over has none when a run goes
            on.

    Example:
        >>> history = []
        >>> head = HeadState({"history": history})
        >>> history.append(0.5)
        >>> [content for _, content in head.changes()]
        [(0, 0, [0.5])]
    """

    def __init__(
        self, roots: Mapping[str, Any], are_names: bool = True, compared: Collection[str] | None = None
    ) -> None:
        self.roots = users_roots(roots, compared) if are_names else dict(roots)
        self._compared = self.roots.keys() if compared is None else frozenset(compared)
        self._kinds = KindsOfCells()
        self._inventory = Inventory(self.roots, self.roots, is_copy=False, most=sys.maxsize, kinds=self._kinds)
        self._objects: dict[str, Seen] = {}
        self._digests: dict[str, Any] = {}
        self._frames: int | None = None

    def keep_frames(self, number: int) -> None:
        """Note that a run which goes on has only so many of the frames at its head: calls have ended since.

        What a local of another frame led to is no object of the head any more. Where something new still leads to it,
        such as the name of what the function returned, it is new.
        """
        self._frames = number

    def has(self, root: str) -> bool:
        """Return whether a run that goes on has a root at its head."""
        return root in self.roots and not self._has_ended(root)

    def _has_ended(self, root: str) -> bool:
        """Return whether a root is a local of a call that has ended."""
        frame, is_local, _ = root.partition(":")
        return bool(is_local) and self._frames is not None and int(frame) >= self._frames

    def _found(self, obj: Any) -> ObjectPlace | None:
        place = self._inventory.place(obj)
        return None if place is None or self._has_ended(place.name) else place

    def place(self, obj: Any) -> ObjectPlace | None:
        """Return the place of an object to which a file may refer; None for a new one, for code, and for a value."""
        is_code = issubclass(type(obj), CODE) or self._kinds.of(obj) is None
        return None if is_code else self._found(obj)

    def place_of_any(self, obj: Any) -> ObjectPlace | None:
        """Return the place of an object, also of code; None for a new one."""
        return self._found(obj)

    def place_of_class(self, kind: type) -> ObjectPlace | None:
        """Return the place of a class of the notebook, or the name by which the notebook has one of a module."""
        if (place := self._found(kind)) is not None:
            return place
        return next((ObjectPlace(root) for root, value in self.roots.items() if value is kind), None)

    def tensors(self) -> Iterator[Any]:
        """Yield the tensors of which others may be views."""
        return self._inventory.tensors()

    def objects(self) -> Mapping[str, Seen]:
        """Return objects with their kinds and marks, by the text of their place."""
        if not self._objects:
            for obj, kind, mark in self._inventory.seen():
                place = self._inventory.place(obj)
                if place is not None and (kind is not None or type(obj) is type):
                    self._objects[text_of(place)] = Seen(obj, kind or Kind(), mark, place)
            for root, value in self.roots.items():
                if issubclass(type(value), type):
                    self._objects.setdefault(text_of(ObjectPlace(root)), Seen(value, Kind(), None, ObjectPlace(root)))
        return self._objects

    def present_objects(self) -> Mapping[str, Seen]:
        """Return those of `objects` that a run which goes on has at its head, see `keep_frames`."""
        return {text: seen for text, seen in self.objects().items() if not self._has_ended(seen.place.name)}

    def compared(self) -> Iterator[tuple[str, Seen]]:
        """Yield those of `objects` that a run which goes on has to have in the same state, with the text of the place.

        Others are those of names that the cell does not read: a rank that starts from a clean process has none.
        """
        compared = self._compared
        yield from ((text, each) for text, each in self.present_objects().items() if each.place.name in compared)

    def compared_roots(self) -> dict[str, Any]:
        """Return the roots that are compared."""
        return {root: value for root, value in self.roots.items() if root in self._compared and self.has(root)}

    def changes(self) -> Iterator[tuple[Seen, Any]]:
        """Yield the objects that have changed, each with the content of the change.

        None is left out, however many there are.

        Raises:
            CannotSave: It cannot be known whether one has changed, or the change cannot be written.
        """
        self.refuse_open_files()
        with no_collections():
            for obj, kind, mark in self._inventory.seen():
                if kind is None or (kind is _LOADER_ITERATOR and any(obj is each for each in self.roots.values())):
                    continue
                try:
                    content = kind.change(obj, mark)
                except Exception as error:  # also of a library with inconsistent answers
                    raise CannotSave(self._why_not(obj, error)) from error
                if content is not None and (place := self._found(obj)) is not None:
                    yield Seen(obj, kind, mark, place), content

    def refuse_open_files(self) -> None:
        """Refuse files that were opened before the head: their statements run again, and would empty them.

        Raises:
            CannotSave: One is open for writing.
        """
        for obj, _, _ in self._inventory.seen():
            if issubclass(type(obj), io.IOBase) and _begins_anew(obj) and (file := self._inventory.place(obj)):
                raise CannotSave(
                    f"{shown(file)} is a file that is open for writing: a run that goes on would begin it anew. Open "
                    "it with mode 'a', which keeps what is in it"
                )

    def doubts(self) -> list[str]:
        """Return sentences about objects near the notebook's names of which it cannot be known whether they changed."""
        found = []
        for obj, kind, mark in self._inventory.seen():
            if kind is not None and (doubt := kind.doubt(obj, mark)) and self._inventory.is_near(obj):
                place = self._inventory.place(obj)
                assert place is not None, "it is near a name"
                if place.name in self._compared:
                    found.append(f"{shown(place)}: {doubt}, and is not in the checkpoint")
        return found

    def unreachable(self, roots: Mapping[str, Any]) -> list[str]:
        """Return the places of objects to which `roots` do not lead any more."""
        seen: dict[int, Any] = {}
        waiting = list(roots.values())
        with no_collections():
            while waiting:
                obj = waiting.pop()
                if id(obj) in seen or (kind := self._kinds.of(obj)) is None:
                    continue
                seen[id(obj)] = obj
                waiting += [part for _, part in kind.parts(obj)]
            objects = self.objects().items()
        return [text for text, each in objects if id(each.obj) not in seen]

    def _digest(self, text: str, seen: Seen) -> Any:
        """Return the sum of an object at the head, which is computed once."""
        if text not in self._digests:
            self._digests[text] = seen.kind.digest(seen.obj, seen.mark)
        return self._digests[text]

    def sums(self, without: Collection[str]) -> dict[str, Any]:
        """Return sums of the states at the head, by the text of the place.

        Tensors and arrays up to 4 MB by a CRC32, larger ones by sums over blocks (`namespace.arrays`), random
        generators, and the plain values in lists, tuples, sets and deques. Plain values of dictionaries and attributes
        are not among them: times and paths of a session are there.

        Args:
            without: Places to leave out: those that the checkpoint has.
        """
        found: dict[str, Any] = {}
        rest: dict[str, int] = {}
        count: Counter[str] = Counter()
        for text, seen in self.compared():
            if text in without or (digest := self._digest(text, seen)) is None:
                continue
            root = seen.place.name
            count[root] += 1
            if count[root] <= _MOST_SUMS:
                found[text] = digest
            else:
                rest[root] = zlib.crc32(repr((text, digest)).encode(), rest.get(root, 0))
        return found | {text_of(ObjectPlace(root, _REST)): total for root, total in rest.items()}

    def _why_not(self, obj: Any, error: Exception) -> str:
        place = self._inventory.place(obj)
        name = "an object" if place is None else shown(place)
        what = with_article(type(obj).__name__)
        if hasattr(type(obj), "__next__"):
            return (
                f"{name} is {what}: what it has handed out is known to nobody. Loop over what it reads itself, or give "
                "a loader's iterator a name: it = iter(loader)"
            )
        return f"{name} is {what}, and has changed in a way that no file of data can hold: {error}"


_REST: tuple[Step, ...] = (("the rest", None),)


def text_of(place: ObjectPlace) -> str:
    """Return the text that stands for a place in a file. It is looked up there, and never evaluated."""
    return repr((place.name, place.steps))
