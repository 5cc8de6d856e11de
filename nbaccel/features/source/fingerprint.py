"""Fingerprints: what makes the items of two calls of a map the same. Used in the kernel and in ranks; pure.

Values are written in one canonical form, since two pickles of equal values may differ: by the order of a set, which is
another one in each process, by addresses in arrays of objects, and by which of their texts are the same object. Other
objects are taken apart as pickle does; of those that it cannot take apart the class alone counts.
"""

from __future__ import annotations

import copyreg
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

__all__ = ["checksum_of", "checksum_of_sample", "length_of"]

_MOST_SAMPLED = 32
_DEEPEST = 32
_BYTES = 16
_MOST_OBJECTS = 10_000

_NUMBERS = (bool, int, float, complex)

_Write = Callable[[bytes], object]


def checksum_of(items: Iterable[Any]) -> str:
    """Return a checksum of the items and their order.

    Example:
        >>> checksum_of(["a", {"b": 1}]) == checksum_of(["a", {"b": 1}]) != checksum_of([{"b": 1}, "a"])
        True
    """
    checksum = hashlib.blake2b(digest_size=_BYTES)
    walk, write = _Walk(), checksum.update
    for item in items:
        walk.left = _MOST_OBJECTS
        walk.write(item, write)
    return checksum.hexdigest()


def checksum_of_sample(items: Sequence[Any]) -> str:
    """Return a checksum of the class, the number and some of the items, for data sets whose reading takes long."""
    step = max(1, len(items) // _MOST_SAMPLED)
    named = [type(items).__qualname__, len(items), str(getattr(items, "_fingerprint", ""))]
    return checksum_of([*named, *(items[number] for number in range(0, len(items), step))])


class _Walk:
    """The way from an item to the value that is being written.

    Attributes:
        around: The values that hold it, the item first.
        left: Objects of the item that may still be taken apart, so that a graph of objects, with its many ways, takes
            no time.
    """

    def __init__(self) -> None:
        self.around: list[Any] = []
        self.left = _MOST_OBJECTS

    def write(self, value: Any, write: _Write) -> None:
        """Write a value in a form that tells its type, its length and its content."""
        match value:
            case str():
                return _write_bytes(b"s", value.encode("utf-8", "surrogatepass"), write)
            case bytes() | bytearray() | memoryview():
                return _write_bytes(b"b", bytes(value), write)
            case bool() | int() | float() | complex() | None:
                return _write_bytes(b"n", _text_of_number(value).encode(), write)
        if len(self.around) > _DEEPEST:
            if self.left == _MOST_OBJECTS:
                raise ValueError(f"an item is nested more than {_DEEPEST} levels deep, or contains itself")
            return _write_bytes(b"r", _name_of(type(value)).encode(), write)  # within an object, such as a long chain
        self.around.append(value)
        match value:
            case Mapping():
                write(b"m%d;" % len(value))
                for pair in value.items():
                    for each in pair:
                        self.write(each, write)
            case list() | tuple() | range():
                write(b"l%d;" % len(value))
                for each in value:
                    self.write(each, write)
            case Set():
                _write_bytes(b"u", b"".join(sorted(map(self._checksum, value))), write)
            case _:
                self._write_object(value, write)
        self.around.pop()

    def _checksum(self, value: Any) -> bytes:
        checksum = hashlib.blake2b(digest_size=_BYTES)
        self.write(value, checksum.update)
        return checksum.hexdigest().encode()

    def _write_object(self, value: Any, write: _Write) -> None:
        """Write an array of objects, a dataclass, or another object that is taken apart; others by their bytes."""
        name = _name_of(type(value)).encode()
        if _holds_objects(value):
            _write_bytes(b"a", name + f"{value.dtype}{value.shape}".encode(), write)
            self.write(value.tolist(), write)
        elif (data := _bytes_of(value)) is not None:
            _write_bytes(b"o", name + data, write)
        elif (above := sum(each is value for each in self.around)) > 1 or not self.left:
            _write_bytes(b"r", name + b"%d" % above, write)
        else:
            self.left -= 1
            _write_bytes(b"p", name, write)
            self.write(_parts_of(value), write)


def _write_bytes(kind: bytes, data: bytes, write: _Write) -> None:
    write(kind + b"%d;" % len(data))
    write(data)


def _text_of_number(value: Any) -> str:
    """Return a number as text; those of NumPy that are numbers of Python as Python does: versions of NumPy differ."""
    if type(value) not in _NUMBERS and not isinstance(value, Enum):
        match value:
            case int():
                return int.__repr__(value)
            case float():
                return float.__repr__(value)
            case complex():
                return complex.__repr__(value)
    return repr(value)


def _bytes_of(value: Any) -> bytes | None:
    """Return the content of a path, a tensor, an array or an image, or the name of a function; None for others."""
    if hasattr(value, "__fspath__"):
        return str(value).encode("utf-8", "surrogatepass")
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _name_of(value).encode()
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        value = value.detach().cpu()
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        content: bytes = value.contiguous().flatten().view(_byte_type(value)).numpy().tobytes()
        return head + content
    if hasattr(value, "tobytes"):  # an array, a scalar of NumPy, or an image
        about = (getattr(value, "dtype", ""), getattr(value, "shape", ""), getattr(value, "mode", ""))
        head = repr((*map(str, about), getattr(value, "size", ""))).encode()
        content = value.tobytes()
        return head + content
    return None


def _holds_objects(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return hasattr(value, "tolist") and (getattr(dtype, "hasobject", False) or getattr(dtype, "kind", "") == "T")


def _parts_of(value: Any) -> list[Any]:
    """Return what an object is made of: the fields of a dataclass, or what pickle would write; empty for neither."""
    if hasattr(type(value), "__dataclass_fields__"):
        return [(name, getattr(value, name, None)) for name in type(value).__dataclass_fields__]
    try:
        reduce: Any = copyreg.dispatch_table.get(type(value))
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # a lock, a file, a generator
        return []
    if isinstance(parts, str):
        return [parts]
    make, arguments, *state = parts
    return [make, arguments, *(list(each) if isinstance(each, Iterator) else each for each in state)]


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _byte_type(tensor: Any) -> Any:
    import torch

    return tensor.dtype if tensor.dtype == torch.bool else torch.uint8


def length_of(item: Any) -> int:
    """Return the length of a text, of a list of tokens, or of all texts in an item; 0 where it has none.

    Example:
        >>> length_of("four"), length_of({"question": "four", "id": 7}), length_of([1, 2, 3]), length_of(7)
        (4, 4, 3, 0)
    """
    return _length(item, 0)


def _length(item: Any, depth: int) -> int:
    if isinstance(item, str | bytes):
        return len(item)
    if depth > 3:
        return 0
    if isinstance(item, Mapping):
        return sum(_length(each, depth + 1) for each in item.values())
    if isinstance(item, list | tuple):
        if any(isinstance(each, str | bytes | Mapping | list | tuple) for each in item[:4]):
            return sum(_length(each, depth + 1) for each in item)
        return len(item)
    try:
        return len(item)
    except TypeError:
        return 0
