"""Kinds of objects with state in C: behind their attributes is memory that only their own code can read.

Of an object of a type in C the bytes of its memory are compared (`IN_C`): so a type that nobody has thought of is seen.
Where they differ, the notebook compares what it pickles to, as an object may also cache something there. An object may
also hold a pointer to memory elsewhere: a booster of xgboost, a picture of Pillow. Such an object says what its state
is, by ``__getstate__``, and this is compared (`Owner`). Runs in ranks and in the kernel; imports no library.
"""

from __future__ import annotations

import builtins
import copyreg
import ctypes
import gc
import pickle
import sys
import types
import zlib
from typing import Any

from nbaccel.base.quantities import with_article
from nbaccel.namespace.kind import CannotWrite, IsSame, Kind, Stays, Write

__all__ = [
    *(
        "IN_C",
        "Hidden",
        "InForeignC",
        "Owner",
        "bytes_of",
        "differs",
        "is_other",
        "keeps_state_in_c",
        "may_own_state_in_c",
    ),
    "pickles_itself",
]

_HEADER_BYTES, _POINTER_BYTES = object.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OF_CODE = (types.FunctionType, types.MethodType, types.CodeType, types.ModuleType)
_OF_OTHER_KINDS = frozenset({*sys.stdlib_module_names, "numpy", "pandas", "pyarrow", "torch"}) - {"builtins"}


class _InC(Kind):
    """Objects with state that only their own code can read: the bytes of their memory, and the objects they hold.

    Those of the containers that they hold count as well.
    """

    def mark(self, obj: Any) -> Any:
        own = getattr(obj, "__dict__", None)  # it is made when it is read first
        held = [each for each in gc.get_referents(obj) if each is not own]
        inner = [gc.get_referents(each) for each in held if type(each) in (list, dict, set)]
        return bytes_of(obj), held, inner

    def change(self, obj: Any, mark: Any) -> Any:
        memory, held, inner = self.mark(obj)
        is_same = memory == mark[0] and not differs(held, mark[1]) and len(inner) == len(mark[2])
        return None if is_same and not any(map(differs, inner, mark[2])) else (_digest_of_pickle(obj),)

    def writing(self, obj: Any, change: Any) -> Write:
        if change[0] is not None and change[0] == _digest_of_pickle(obj):
            raise IsSame
        raise CannotWrite(f"{with_article(type(obj).__name__)} keeps its state in C: --out brings what can be sent")


IN_C: Kind = _InC()


def _digest_of_pickle(obj: Any) -> int | None:
    try:
        return zlib.crc32(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
    except Exception:
        return None


_MOST_BYTES = 1 << 27
"""Bytes of such states that are compared, of all objects of one class: a quarter of a second."""

_LEAST_BYTES = 1 << 15
"""Bytes that a small state counts for: a pickle by a class's own code takes some 80 µs, as 32 kB do."""


class Owner(Kind):
    """Objects that hold a pointer to memory elsewhere, and whose class says what their state is.

    One is made for each class: of thousands of pictures the first ones are compared.

    Args:
        is_in_c: Whether the class is written in C, so that the pointer is no attribute.
    """

    is_data = True

    def __init__(self, is_in_c: bool = False) -> None:
        self._left = _MOST_BYTES
        self._is_in_c = is_in_c

    def mark(self, obj: Any) -> Any:
        if not self._has_pointer(obj) or (found := _digest_of(obj, self._left)) is None:
            return None
        self._left -= max(found[1], _LEAST_BYTES)
        return found

    def change(self, obj: Any, mark: Any) -> Any:
        if mark is not None and _digest_of(obj, sys.maxsize) != mark:
            raise Stays(f"{with_article(type(obj).__name__)} keeps its state in C: --out brings what can be sent")

    def doubt(self, obj: Any, mark: Any) -> str:
        is_known = mark is not None or not self._has_pointer(obj)
        return (
            ""
            if is_known
            else f"a state in C of more than {_MOST_BYTES >> 20} MB, or that cannot be sent, is not compared"
        )

    def _has_pointer(self, obj: Any) -> bool:
        return self._is_in_c or any(map(_is_hidden, map(type, _values(obj))))


def _digest_of(obj: Any, most: int) -> tuple[int, int] | None:
    """Return a checksum and the length of a pickle; None if it has more than `most` bytes, or none can be made."""
    state = _Digest(most)
    try:
        pickle.Pickler(state, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception:
        return None
    return state.checksum, state.length


class _Digest:
    """A file of which only a checksum is kept.

    Args:
        most: The largest number of bytes; more are an error.
    """

    def __init__(self, most: int) -> None:
        self.checksum = self.length = 0
        self._most = most

    def write(self, data: Any) -> int:
        self.length += memoryview(data).nbytes
        if self.length > self._most:
            raise OverflowError
        self.checksum = zlib.crc32(data, self.checksum)
        return len(data)


class Hidden(Kind):
    """Objects of classes in C that do not say what their state is: whether it has changed cannot be known."""

    def doubt(self, obj: Any, mark: Any) -> str:
        return f"{with_article(type(obj).__name__)} keeps its state in C, which cannot be compared"


class InForeignC(Kind):
    """Objects in C of a library: their own memory, and what is behind its pointers.

    Args:
        behind: The kind that judges this.
    """

    def __init__(self, behind: Kind) -> None:
        self._behind = behind

    def mark(self, obj: Any) -> Any:
        return IN_C.mark(obj), self._behind.mark(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        found = IN_C.change(obj, mark[0])
        return self._behind.change(obj, mark[1]) if found is None else found

    def doubt(self, obj: Any, mark: Any) -> str:
        return self._behind.doubt(obj, mark[1])

    def writing(self, obj: Any, change: Any) -> Write:
        return IN_C.writing(obj, change)


def pickles_itself(kind: type) -> bool:
    """Return whether a class written in C says in a pickle what the state of its objects is."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_own = any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)
    return is_own or kind in copyreg.dispatch_table


def may_own_state_in_c(kind: type) -> bool:
    """Return whether a class written in Python has state beside its attributes, as it pickles in a way of its own."""
    functions = [getattr(kind, name, None) for name in ("__getstate__", "__setstate__")]
    return all(type(each) is types.FunctionType for each in functions)


def _is_hidden(kind: type) -> bool:
    """Return whether an object of the type is only known by its address, and does not say what is there."""
    if issubclass(kind, ctypes.c_void_p | ctypes._Pointer):
        return True
    if issubclass(kind, _OF_CODE):  # a function beside the numbers of a gpytorch constraint
        return False
    if not keeps_state_in_c(kind) or any(map(_is_of_another_kind, kind.__mro__)):
        return False
    return kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__


def _is_of_another_kind(base: type) -> bool:
    """Return whether objects of the type `base`, or of one derived from it, are compared in a way of their own."""
    package = str(type.__dict__["__module__"].__get__(base)).partition(".")[0]
    is_known = package in _OF_OTHER_KINDS or getattr(builtins, base.__name__, None) is base
    return is_known and keeps_state_in_c(base)


def _values(obj: Any) -> Any:
    own = getattr(obj, "__dict__", None)
    return own.values() if type(own) is dict else ()


def keeps_state_in_c(kind: type) -> bool:
    """Return whether objects of a type have memory that is neither for attributes nor for slots of Python.

    Example:
        >>> keeps_state_in_c(type(iter([]))), keeps_state_in_c(types.SimpleNamespace)
        (True, False)
    """
    own = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    slots = sum(type(member) is types.MemberDescriptorType for base in own for member in vars(base).values())
    fields = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > _HEADER_BYTES + fields * _POINTER_BYTES


def bytes_of(obj: Any) -> bytes:
    """Return the memory of an object, without its count of references, its attributes and weak references to it."""
    kind = type(obj)
    memory = bytearray(ctypes.string_at(id(obj) + _HEADER_BYTES, kind.__basicsize__ - _HEADER_BYTES))
    for offset in (kind.__dictoffset__, kind.__weakrefoffset__):
        if offset > 0:
            memory[offset - _HEADER_BYTES : offset - _HEADER_BYTES + _POINTER_BYTES] = bytes(_POINTER_BYTES)
    return bytes(memory)


def is_other(new: Any, old: Any) -> bool:
    return new is not old


def differs(new: Any, old: Any) -> bool:
    if new is old:
        return False
    if type(new) is list is type(old):
        return len(new) != len(old) or any(map(is_other, new, old))
    return type(new) is not type(old) or type(new) not in _PLAIN or not (new == old or (new != new and old != old))
