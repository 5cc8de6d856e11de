"""Find the objects that names of the notebook lead to, before ranks start. Runs in the kernel.

`inventory` reads the state of objects, to compare it; this module only asks which objects there are: open files, and
objects of libraries whose threads a fork would lack. So it follows also the objects that C code holds, as the garbage
collector sees them: a `csv.reader` leads to its file, a generator to its variables. It runs no code of the user's.
"""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nbaccel.base.notices import is_users

__all__ = ["ObjectsBehind", "package_of"]

_MOST_OBJECTS = 30_000
"""Number of objects that are looked at: some tens of milliseconds."""

_MOST_PARTS = 2_000
"""Number of elements of one container that are followed: a longer one holds data."""

_VALUES = frozenset({type(None), bool, float, complex, str, bytes, range, slice, type(...), types.CodeType})
_CACHED_INTS = range(3, 257)
"""Numbers that may be descriptors; of these Python has one object each, so that a list of numbers leads to few."""

_PLAIN = frozenset({"__main__", "torch", *sys.stdlib_module_names})
_SERVE_THE_NOTEBOOK = frozenset({"IPython", "ipykernel", "nbaccel", "tornado", "traitlets", "zmq"})


@dataclass(frozen=True, slots=True)
class ObjectsBehind:
    """The objects that names lead to.

    Args:
        found: Each object once, with the name that leads to it; those of the names themselves come first.
        is_whole: False if there are more objects than were looked at.
    """

    found: tuple[tuple[str, Any], ...] = ()
    is_whole: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any], *, into_libraries: bool = True) -> ObjectsBehind:
        """Follow `values`, by name.

        Args:
            into_libraries: Also what objects of packages other than torch and Python's own lead to.

        Example:
            >>> import csv, io
            >>> file = io.StringIO("a,b")
            >>> any(obj is file for _, obj in ObjectsBehind.of({"rows": [csv.reader(file)]}).found)
            True
        """
        found: list[tuple[str, Any]] = []
        seen: set[int] = set()
        todo = deque(values.items())
        while todo:
            name, obj = todo.popleft()
            if id(obj) in seen:
                continue
            if len(found) >= _MOST_OBJECTS:
                return cls(tuple(found), is_whole=False)
            seen.add(id(obj))
            found.append((name, obj))
            if into_libraries or _is_plain(obj):
                todo += [(name, part) for part in _parts(obj) if _leads_on(part) and id(part) not in seen]
        return cls(tuple(found))

    def packages(self) -> set[str]:
        """Return the packages whose objects, classes, functions and modules are among the objects."""
        return {package_of(obj) for _, obj in self.found}


def package_of(obj: Any) -> str:
    """Return the package of a module, a class or a function, and of any other object that of its class.

    Example:
        >>> import collections.abc
        >>> package_of(collections.abc), package_of(collections.OrderedDict), package_of(collections.Counter())
        ('collections', 'collections', 'collections')
    """
    kind = type(obj)
    if issubclass(kind, types.ModuleType):
        name = obj.__name__
    elif issubclass(kind, type):
        name = type.__dict__["__module__"].__get__(obj)
    elif kind in (types.FunctionType, types.BuiltinFunctionType):
        name = obj.__module__
    else:
        name = type.__dict__["__module__"].__get__(kind)
    return str(name or "builtins").partition(".")[0]


def _leads_on(part: Any) -> bool:
    kind = type(part)
    return part in _CACHED_INTS if kind is int else kind not in _VALUES


def _is_plain(obj: Any) -> bool:
    """Return whether it is an object of the user's, of torch or of Python itself."""
    kind = type(obj)
    if kind is types.FunctionType:
        return is_users(obj.__code__.co_filename)
    return package_of(obj) in _PLAIN or issubclass(kind, types.ModuleType | type) or _is_users_class(kind)


def _parts(obj: Any) -> Iterable[Any]:
    kind = type(obj)
    if kind is dict and "__spec__" in obj and "__name__" in obj:  # the names of a module
        return ()
    if issubclass(kind, dict):
        return list(islice(dict.values(obj), _MOST_PARTS)) + _attributes(obj, dict)
    for container in (list, tuple, set, frozenset, deque):
        if issubclass(kind, container):
            return list(islice(container.__iter__(obj), _MOST_PARTS)) + _attributes(obj, container)
    if kind is types.FunctionType:
        return _of_function(obj)
    if issubclass(kind, types.ModuleType):
        file = getattr(obj, "__file__", None)  # those in C have none
        return list(vars(obj).values()) if type(file) is str and is_users(file) else ()
    if issubclass(kind, type):
        return list(vars(obj).values()) + list(obj.__bases__) if _is_users_class(obj) else ()
    if issubclass(kind, logging.Logger):  # it knows all others
        return [*vars(obj).get("handlers", ()), vars(obj).get("parent")]
    if issubclass(kind, weakref.ReferenceType | types.FrameType | types.TracebackType):
        return ()
    if package_of(obj) in _SERVE_THE_NOTEBOOK or _is_data(kind):
        return ()
    return list(islice(gc.get_referents(obj), _MOST_PARTS))


def _attributes(obj: Any, container: type) -> list[Any]:
    """Return the attributes of a container of a derived class."""
    return [] if type(obj) is container else list(getattr(obj, "__dict__", {}).values())


def _of_function(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from gc.get_referents(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if is_users(function.__code__.co_filename):
        names = function.__globals__
        yield from (names[name] for name in _names_in(function.__code__) if name in names)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


def _is_users_class(kind: Any) -> bool:
    functions = (value for value in vars(kind).values() if type(value) is types.FunctionType)
    return package_of(kind) == "__main__" or any(is_users(each.__code__.co_filename) for each in islice(functions, 1))


def _is_data(kind: type) -> bool:
    """Return whether objects of the type hold numbers: arrays and tensors, also of derived classes."""
    return any(base.__name__ in _ARRAYS and package_of(base) in ("numpy", "torch") for base in kind.__mro__)


_ARRAYS = ("ndarray", "Tensor", "generic", "Generator", "dtype")
