"""Kinds: how the objects of a notebook are read, by their type. Runs in ranks and in the kernel.

Containers are read and written by the methods of the builtin types, other objects by their attributes and slots:
nothing here runs code of the user's, and only the true type counts, because a proxy's ``__class__`` is a property like
any other. Objects that keep their values in plain memory are in `arrays`.
"""

from __future__ import annotations

import array
import contextlib
import functools
import io
import itertools
import operator
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nbaccel.base.quantities import with_article
from nbaccel.base.values import attributes_of
from nbaccel.namespace.arrays import ARRAY, ARRAY_OF_A_CLASS, kind_of_memory
from nbaccel.namespace.kind import CannotWrite, Entries, Kind, Step, Write
from nbaccel.namespace.library_objects import tensor_of_script
from nbaccel.namespace.open_files import kind_of_file
from nbaccel.namespace.process_objects import (
    CLOSED,
    VALUES,
    belongs_to_its_process,
    kind_in_c,
    kind_of_process_object,
    referent,
    trait_of,
)
from nbaccel.namespace.state_in_c import Owner, keeps_state_in_c, may_own_state_in_c
from nbaccel.namespace.wrappers import is_accelerator, is_lightnings_callback, is_put_there, plain, users_class, wraps

__all__ = [
    "ATTRIBUTES",
    "Kinds",
    "globals_of",
    "is_found_by_name",
    "is_read_by_attributes",
    "part",
    "slots_of",
]

_ATTRIBUTES: Step = ("attributes", None)

_EXACT_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
)
"""Types of immutable values that are the same if they are equal."""

_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of keys by which a value can be found again."""

_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__slotnames__"}
)
"""Attributes that are no state of a class; a pickle of an object gives its class the last one."""


class _Dict(Kind):
    """Dictionaries of every class; also those of an object's attributes.

    Keys are known by identity: a dictionary keeps the one that it was given first.

    Args:
        methods: The class of Python's own whose methods read it: an OrderedDict has its own order.
    """

    is_data = True

    def __init__(self, methods: Any = dict) -> None:
        self._methods = methods

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        keys, values = self._methods.keys(obj), self._methods.values(obj)
        if _EXACT_VALUES.issuperset(map(type, values)) and _KEYS.issuperset(map(type, keys)):
            return ()
        return self._parts(keys, values)

    @staticmethod
    def _parts(keys: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[Step, Any]]:
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            if type(value) not in _EXACT_VALUES:
                yield (("value", key) if type(key) in _KEYS else ("at", index)), value
            if type(key) not in _KEYS:
                yield ("key", index), key

    def mark(self, obj: Any) -> tuple[list[Any], list[Any]]:
        return list(self._methods.keys(obj)), list(self._methods.values(obj))

    def change(self, obj: Any, mark: tuple[list[Any], list[Any]]) -> Entries | None:
        keys, values = self.mark(obj)
        are_keys = len(keys) == len(mark[0]) and not any(map(operator.is_not, keys, mark[0]))
        if are_keys and not any(map(operator.is_not, values, mark[1])):
            return None
        now, before = _own_entries(keys, values), _own_entries(*mark)
        # Keys stay where they are as long as they come in the order that they had: the others are put in anew.
        left, stay = iter(before), []
        for key in now:
            if all(other != key for other in left):
                break
            stay.append(key)
        anew = list(now)[len(stay) :]
        changed = [key for key in stay if not _is_same(now[key][1], before[key][1])] + anew
        there = set(map(id, keys))  # also those that training has added
        removed = [key for key in before if key not in there] + [key for key in anew if key in before]
        if not removed and not changed:
            return None
        return Entries(
            [before[key][0] for key in removed], [now[key][0] for key in changed], [now[key][1] for key in changed]
        )

    def writing(self, obj: Any, change: Entries) -> Write:
        methods = self._methods
        new, there = dict.fromkeys(change.keys), dict.fromkeys(methods.keys(obj))  # it hashes the keys, here already
        removed = [key for key in change.removed if key in there]

        def write() -> None:
            for key in removed:
                methods.pop(obj, key, None)
            for key, value in zip(new, change.values, strict=True):
                methods.__setitem__(obj, key, value)

        return write


def _own_entries(keys: Iterable[Any], values: Iterable[Any]) -> dict[int, tuple[Any, Any]]:
    """Return key and value by the id of the key, without entries that training has added."""
    pairs = zip(keys, values, strict=True)
    return {id(key): (key, value) for key, value in pairs if not is_put_there(key, value)}


class _List(Kind):
    is_data = True

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        return _items(list.__iter__, obj)

    def mark(self, obj: Any) -> Any:
        return list.copy(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        """Return the old length, the number of first elements that stay, and the other elements."""
        now = list.copy(obj)
        if len(now) == len(mark) and not any(map(operator.is_not, now, mark)):
            return None
        pairs = enumerate(zip(now, mark, strict=False))
        stay = next((index for index, (new, old) in pairs if not _is_same(new, old)), min(len(now), len(mark)))
        return None if stay == len(now) == len(mark) else (len(mark), stay, now[stay:])

    def writing(self, obj: Any, change: Any) -> Write:
        before, stay, rest = change
        if list.__len__(obj) != before:
            raise CannotWrite("the notebook has changed it meanwhile")
        return lambda: list.__setitem__(obj, slice(stay, None), rest)

    def digest(self, obj: Any, mark: Any) -> Any:
        return _digest_of_elements(mark)


class _Deque(_List):
    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        return _items(deque.__iter__, obj)

    def mark(self, obj: Any) -> Any:
        return list(deque.__iter__(obj))

    def change(self, obj: Any, mark: Any) -> Any:
        now = list(deque.__iter__(obj))
        is_same = len(now) == len(mark) and all(map(_is_same, now, mark))
        return None if is_same else (len(mark), now)

    def writing(self, obj: Any, change: Any) -> Write:
        before, now = change
        if deque.__len__(obj) != before:
            raise CannotWrite("the notebook has changed it meanwhile")

        def write() -> None:
            deque.clear(obj)
            deque.extend(obj, now)

        return write


class _Tuple(Kind):
    is_data = True

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        return _items(tuple.__iter__, obj)

    def digest(self, obj: Any, mark: Any) -> Any:
        return _digest_of_elements(list(tuple.__iter__(obj)))


class _Set(Kind):
    """Sets. The elements are not read: elements of sets seldom change."""

    is_data = True

    def mark(self, obj: Any) -> Any:
        return {id(element): element for element in set.__iter__(obj)}

    def change(self, obj: Any, mark: Any) -> Any:
        if len(mark) == set.__len__(obj) and all(id(element) in mark for element in set.__iter__(obj)):
            return None
        return (list(set.__iter__(obj)),)

    def writing(self, obj: Any, change: Any) -> Write:
        new = set(change[0])  # computes the hashes of its elements, here and not below

        def write() -> None:
            set.clear(obj)
            set.update(obj, new)

        return write

    def digest(self, obj: Any, mark: Any) -> Any:
        is_plain = _EXACT_VALUES.issuperset(map(type, mark.values()))  # others have no order
        return _digest_of_elements(sorted(mark.values(), key=repr)) if is_plain else [len(mark)]


class _Objects(Kind):
    """Arrays of objects."""

    is_data = True

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        return _items(list.__iter__, obj.ravel().tolist())

    def mark(self, obj: Any) -> Any:
        return obj.shape, obj.ravel().tolist()

    def change(self, obj: Any, mark: Any) -> Any:
        shape, objects = self.mark(obj)
        return None if shape == mark[0] and all(map(_is_same, objects, mark[1])) else (shape, objects)

    def writing(self, obj: Any, change: Any) -> Write:
        shape, objects = change
        if obj.shape != shape or not obj.flags.writeable:
            raise CannotWrite(f"its shape was {list(obj.shape)}, and is {list(shape)}")

        def write() -> None:
            for index, each in enumerate(objects):
                obj.flat[index] = each

        return write


class _Bytes(Kind):
    """Bytearrays, and arrays of the standard library."""

    is_data = True

    def mark(self, obj: Any) -> bytes:
        return bytes(memoryview(obj).cast("B"))

    def change(self, obj: Any, mark: bytes) -> Any:
        return None if self.mark(obj) == mark else (obj[:],)

    def digest(self, obj: Any, mark: bytes) -> Any:
        return [len(mark), zlib.crc32(mark)]

    def writing(self, obj: Any, change: Any) -> Write:
        def write() -> None:
            obj[:] = change[0]

        return write


class _Object(Kind):
    """Objects of a class: attributes, slots, and the class itself, which an object may change."""

    is_data = True

    def __init__(self, slots: dict[str, Any]) -> None:
        self._slots = slots

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        if (attributes := attributes_of(obj)) is not None:
            yield _ATTRIBUTES, attributes
        for name, value in self._values(obj).items():
            yield ("slot", name), value

    def mark(self, obj: Any) -> Any:
        return users_class(type(obj)), self._values(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        kind, before = mark
        changed = {name: value for name, value in now[1].items() if name not in before or value is not before[name]}
        gone = [name for name in before if name not in now[1]]
        if now[0] is kind and not changed and not gone:
            return None
        return (None if now[0] is kind else now[0]), changed, gone

    def writing(self, obj: Any, change: Any) -> Write:
        kind, changed, gone = change
        if kind is not None and not isinstance(kind, type):
            raise CannotWrite("its class would be none")
        values = [(self._slots[name], value) for name, value in changed.items()]
        removed = [self._slots[name] for name in gone]

        def write() -> None:
            if kind is not None:
                object.__setattr__(obj, "__class__", kind)
            for slot, value in values:
                slot.__set__(obj, value)
            for slot in removed:
                with contextlib.suppress(AttributeError):
                    slot.__delete__(obj)

        return write

    def _values(self, obj: Any) -> dict[str, Any]:
        found = {}
        for name, slot in self._slots.items():
            try:
                found[name] = slot.__get__(obj)
            except AttributeError:
                continue
        return found


class _Class(Kind):
    """Classes of the notebook: the values of their attributes."""

    is_data = True

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        return ((("class", name), value) for name, value in self.mark(obj).items())

    def mark(self, obj: Any) -> dict[str, Any]:
        own = type.__dict__["__dict__"].__get__(obj)
        return {name: value for name, value in own.items() if name not in _OF_EVERY_CLASS}

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        changed = {name: value for name, value in now.items() if name not in mark or not _is_same(value, mark[name])}
        gone = [name for name in mark if name not in now]
        return (changed, gone) if changed or gone else None

    def writing(self, obj: Any, change: Any) -> Write:
        changed, gone = change

        def write() -> None:
            for name, value in changed.items():
                type.__setattr__(obj, name, value)
            for name in gone:
                with contextlib.suppress(AttributeError):
                    type.__delattr__(obj, name)

        return write


class _Function(Kind):
    """Functions of the notebook: their attributes, defaults, and the variables that they share with others."""

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        yield _ATTRIBUTES, obj.__dict__
        for index, cell in enumerate(obj.__closure__ or ()):
            yield ("closure", index), cell
        if obj.__defaults__ is not None:
            yield ("defaults", None), obj.__defaults__
        if obj.__kwdefaults__ is not None:
            yield ("keywords", None), obj.__kwdefaults__


class _Cell(Kind):
    """A variable of a function that functions inside of it share."""

    is_data = True

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        yield from ((("contents", None), value) for value in self.mark(obj))

    def mark(self, obj: Any) -> tuple[Any, ...]:
        try:
            return (obj.cell_contents,)
        except ValueError:  # not bound yet
            return ()

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        return None if len(now) == len(mark) and all(map(_is_same, now, mark)) else (now,)

    def writing(self, obj: Any, change: Any) -> Write:
        def write() -> None:
            if change[0]:
                obj.cell_contents = change[0][0]
            else:
                del obj.cell_contents

        return write


class _Method(Kind):
    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        yield ("self", None), obj.__self__


class _Partial(Kind):
    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        if (attributes := attributes_of(obj)) is not None:
            yield _ATTRIBUTES, attributes
        for name in ("func", "args", "keywords"):
            yield ("partial", name), _of_partial(obj, name)


class _Wrapper(Kind):
    """Wrapper that training put around an object of the user's."""

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        yield ("wrapped", None), plain(obj)


# --- which kind -----------------------------------------------------------------------------------------------------


class Kinds:
    """Returns the kind of objects, and caches it by type for as long as it is used."""

    def __init__(self) -> None:
        # By the id of the type, which is kept meanwhile: a metaclass may define a hash.
        self._of_types: dict[int, tuple[type, Kind | None]] = {}

    def of(self, obj: Any) -> Kind | None:
        """Return the kind of `obj`; None for a value, and for an object that belongs to the process.

        Only its true type counts: a proxy's ``__class__`` is a property like any other.
        """
        found = self._of_types.get(id(type(obj)))
        if found is None:
            found = self._of_types[id(type(obj))] = (type(obj), _chosen(type(obj)))
        kind = found[1]
        if kind is _CLASS:
            return kind if type.__dict__["__module__"].__get__(obj) == "__main__" else None
        if kind is _FUNCTION:
            return kind if obj.__module__ == "__main__" or obj.__closure__ else None
        if kind is ARRAY and obj.dtype.hasobject:
            return _OBJECTS if obj.dtype.kind == "O" else None
        return kind


def is_read_by_attributes(kind: Kind) -> bool:
    """Return whether objects of a kind are read by their attributes, slots and, in a container, by their elements."""
    inner = kind._container if isinstance(kind, _Both) else None
    return isinstance(kind, _Object) or isinstance(inner, (Owner, _Dict, _List, _Tuple, _Set))


def is_found_by_name(obj: Any) -> bool:
    """Return whether a pickle contains only its name or its value."""
    return issubclass(type(obj), (*VALUES, types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType))


def globals_of(obj: Any, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of `namespace` that the code of a notebook's function may read; for a class, its methods'."""
    if type(obj) is types.FunctionType:
        if obj.__globals__ is namespace:
            yield from (name for name in _names_in(obj.__code__) if name in namespace)
        return
    for base in type.__dict__["__mro__"].__get__(obj):
        if type.__dict__["__module__"].__get__(base) == "__main__":
            yield from (name for name in (base.__name__,) if name in namespace)
            for value in type.__dict__["__dict__"].__get__(base).values():
                function = value.__func__ if type(value) in (staticmethod, classmethod) else value
                if type(function) is types.FunctionType:
                    yield from globals_of(function, namespace)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


def part(obj: Any, step: Step) -> Any:
    """Return the part of `obj` that a step leads to.

    Raises:
        LookupError: The object has no such part.

    Example:
        >>> part({"a": [1, 2]}, ("value", "a")), part((5, 6), ("item", 1))
        ([1, 2], 6)
    """
    word, key = step
    try:
        return _STEPS[word](obj, key)
    except LookupError:
        raise
    except Exception as error:  # an object of another class than the one that had this part
        raise LookupError(f"{with_article(type(obj).__name__)} has no part {step}") from error


def _element(obj: Any, index: int) -> Any:
    for kind in (list, tuple):
        if issubclass(type(obj), kind):
            return kind.__getitem__(obj, index)
    if issubclass(type(obj), deque):
        return deque.__getitem__(obj, index)
    return obj.ravel().tolist()[index]  # an array of objects


def _of_partial(obj: Any, name: str) -> Any:
    return vars(functools.partial)[name].__get__(obj)


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "attributes": lambda obj, _: attributes_of(obj),
    "value": lambda obj, key: dict.__getitem__(obj, key),
    "at": lambda obj, index: next(itertools.islice(dict.values(obj), index, None)),
    "key": lambda obj, index: next(itertools.islice(dict.keys(obj), index, None)),
    "item": _element,
    "slot": lambda obj, name: slots_of(type(obj))[name].__get__(obj),
    "class": lambda obj, name: type.__dict__["__dict__"].__get__(obj)[name],
    "closure": lambda obj, index: obj.__closure__[index],
    "defaults": lambda obj, _: obj.__defaults__,
    "keywords": lambda obj, _: obj.__kwdefaults__,
    "contents": lambda obj, _: obj.cell_contents,
    "self": lambda obj, _: obj.__self__,
    "partial": lambda obj, name: _of_partial(obj, name),
    "wrapped": lambda obj, _: plain(obj),
    "queued": lambda obj, index: obj.queue[index],
    "referent": referent,
    "below": getattr,
    "script": tensor_of_script,
    "trait": trait_of,
}

_DICT, _TUPLE, _WRAPPER, _CLASS, _FUNCTION, _OBJECTS = _Dict(), _Tuple(), _Wrapper(), _Class(), _Function(), _Objects()
ATTRIBUTES: Kind = _DICT
"""The kind of the attributes of an object."""
_OF_BUILTINS: tuple[tuple[type, Kind], ...] = (
    *((OrderedDict, _Dict(OrderedDict)), (dict, _DICT), (list, _List()), (deque, _Deque()), (tuple, _TUPLE)),
    *((set, _Set()), (bytearray, _Bytes()), (array.array, _Bytes()), (types.FunctionType, _FUNCTION)),
    *((types.CellType, _Cell()), (types.MethodType, _Method()), (functools.partial, _Partial()), (type, _CLASS)),
)


def _chosen(kind: type) -> Kind | None:
    """Return the kind of objects of a type. None only for values, and for what `belongs_to_its_process`."""
    if issubclass(kind, (*VALUES, *CLOSED)):
        return None
    if wraps(kind):
        return _WRAPPER
    if (own := kind_of_memory(kind) or kind_of_file(kind)) is not None:
        return _Both(own, _Object(slots_of(kind))) if own is ARRAY_OF_A_CLASS else own
    if (own := kind_of_process_object(kind)) is not None:
        is_buffer = issubclass(kind, (io.BytesIO, io.StringIO)) and kind.__module__ != "_io"
        return _Both(own, _Object(slots_of(kind))) if is_buffer else own
    if belongs_to_its_process(kind) and not is_lightnings_callback(kind):
        return None
    for builtin, own in _OF_BUILTINS:
        if issubclass(kind, builtin):
            return own if kind is builtin or builtin is type else _Both(own, _Object(slots_of(kind)))
    if issubclass(kind, BaseException) or not keeps_state_in_c(kind):
        own = _Object(slots_of(kind))
        return None if kind is object else _Both(Owner(), own) if may_own_state_in_c(kind) else own
    own = kind_in_c(kind)
    return None if own is None else _Both(own, _Object(slots_of(kind)))


class _Both(Kind):
    """A container class that adds attributes."""

    def __init__(self, container: Kind, rest: Kind) -> None:
        self._container = container
        self._rest = rest
        self.is_data = container.is_data and rest.is_data

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        yield from self._container.parts(obj)
        yield from self._rest.parts(obj)

    def mark(self, obj: Any) -> Any:
        return self._container.mark(obj), self._rest.mark(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        changes = self._container.change(obj, mark[0]), self._rest.change(obj, mark[1])
        return None if changes == (None, None) else changes

    def doubt(self, obj: Any, mark: Any) -> str:
        return self._container.doubt(obj, mark[0]) or self._rest.doubt(obj, mark[1])

    def digest(self, obj: Any, mark: Any) -> Any:
        return self._container.digest(obj, mark[0])

    def writing(self, obj: Any, change: Any) -> Write:
        kinds = (self._container, self._rest)
        writes = [kind.writing(obj, own) for kind, own in zip(kinds, change, strict=True) if own is not None]

        def write() -> None:
            for each in writes:
                each()

        return write


_MOST_ELEMENTS = 10_000
"""Elements that are read for a digest; of more every second one, or every third ..."""


def _digest_of_elements(elements: list[Any]) -> list[int]:
    """Return the number of elements, and a checksum of their values; of those that are objects, of their classes."""
    step = -(-len(elements) // _MOST_ELEMENTS) or 1
    text = repr([each if type(each) in _EXACT_VALUES else type(each).__name__ for each in elements[::step]])
    return [len(elements), zlib.crc32(text.encode("utf-8", "surrogatepass"))]


# --- reading --------------------------------------------------------------------------------------------------------


def slots_of(kind: type) -> dict[str, Any]:
    """Return the slots of classes written in Python, by name; those of C classes are left out."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def _items(iterate: Callable[[Any], Iterator[Any]], obj: Any) -> Iterable[tuple[Step, Any]]:
    """Return the elements that `iterate` yields, without plain values."""
    if _EXACT_VALUES.issuperset(map(type, iterate(obj))):
        return ()
    return ((("item", index), each) for index, each in enumerate(iterate(obj)) if type(each) not in _EXACT_VALUES)


def _is_same(new: Any, old: Any) -> bool:
    """Return whether it is the same object, also inside a wrapper of `prepare`, or an equal value.

    Two Accelerators count as the same: a rank may have made another one for the same purpose.
    """
    return (
        new is old
        or (wraps(type(new)) and plain(new) is plain(old))
        or (is_accelerator(new) and is_accelerator(old))
        or (
            type(new) is types.MethodType is type(old)
            and new.__func__ is old.__func__
            and _is_same(new.__self__, old.__self__)
        )
        or (type(new) in _EXACT_VALUES and type(new) is type(old) and (new == old or (new != new and old != old)))
    )
