"""Kinds of objects with state in C: behind their attributes is memory that only their own code can read.

Of an object of a type in C the bytes of its memory are compared (`IN_C`): so a type that nobody has thought of is seen.
Where they differ, the notebook compares what it pickles to, as an object may also cache something there. An object may
also hold a pointer to memory elsewhere: a booster of xgboost, a picture of Pillow. Such an object says what its state
is, by ``__getstate__``, and this is compared (`Owner`). Runs in ranks and in the kernel; imports no library.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import pickle
import sys
import types
import zlib
from typing import Any

from nbaccel.launch.objects.kind import CannotWrite, IsSame, Kind, Stays, Write
from nbaccel.quantities import with_article

__all__ = ["IN_C", "Owner", "bytes_of", "differs", "is_other", "keeps_state_in_c", "may_own_state_in_c"]

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


class Owner(Kind):
    """Objects that hold a pointer to memory elsewhere, and whose class says what their state is.

    One is made for each class: of thousands of pictures the first ones are compared.
    """

    def __init__(self) -> None:
        self._left = _MOST_BYTES

    def mark(self, obj: Any) -> Any:
        if self._left <= 0 or not any(map(_is_hidden, map(type, _values(obj)))):
            return None
        return self._digest(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        if mark is not None and self._digest(obj) != mark:
            raise Stays(f"{with_article(type(obj).__name__)} keeps its state in C: --out brings what can be sent")

    def _digest(self, obj: Any) -> int | None:
        try:
            state = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        except Exception:
            return None
        self._left -= len(state)
        return zlib.crc32(state)


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
