"""Fingerprints: what makes the items of two calls of a map the same. Used in the kernel and in ranks; pure.

Values are written in one canonical form, since two pickles of equal values may differ.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

__all__ = ["checksum_of", "checksum_of_sample", "length_of"]

_MOST_SAMPLED = 32
_DEEPEST = 32
_BYTES = 16


def checksum_of(items: Iterable[Any]) -> str:
    """Return a checksum of the items and their order.

    >>> checksum_of(["a", {"b": 1}]) == checksum_of(["a", {"b": 1}]) != checksum_of([{"b": 1}, "a"])
    True
    """
    checksum = hashlib.blake2b(digest_size=_BYTES)
    for item in items:
        _write(item, checksum.update, 0)
    return checksum.hexdigest()


def checksum_of_sample(items: Sequence[Any]) -> str:
    """Return a checksum of the class, the number and some of the items, for data sets whose reading takes long."""
    step = max(1, len(items) // _MOST_SAMPLED)
    named = [type(items).__qualname__, len(items), str(getattr(items, "_fingerprint", ""))]
    return checksum_of([*named, *(items[number] for number in range(0, len(items), step))])


def _write(value: Any, write: Callable[[bytes], object], depth: int) -> None:
    """Write a value in a form that tells its type, its length and its content."""
    if depth > _DEEPEST:
        raise ValueError(f"an item is nested more than {_DEEPEST} levels deep, or contains itself")
    match value:
        case str():
            _write_bytes(b"s", value.encode("utf-8", "surrogatepass"), write)
        case bytes() | bytearray():
            _write_bytes(b"b", bytes(value), write)
        case bool() | int() | float() | complex() | None:
            _write_bytes(b"n", repr(value).encode(), write)
        case Mapping():
            write(b"m%d;" % len(value))
            for key, each in value.items():
                _write(key, write, depth + 1)
                _write(each, write, depth + 1)
        case list() | tuple() | range():
            write(b"l%d;" % len(value))
            for each in value:
                _write(each, write, depth + 1)
        case Set():
            _write_bytes(b"u", b"".join(sorted(checksum_of([each]).encode() for each in value)), write)
        case _:
            _write_bytes(b"o", _bytes_of(value), write)


def _write_bytes(kind: bytes, data: bytes, write: Callable[[bytes], object]) -> None:
    write(kind + b"%d;" % len(data))
    write(data)


def _bytes_of(value: Any) -> bytes:
    """Return the content of an array, a tensor, an image, a path or another object, as bytes."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".encode()
    if hasattr(value, "__fspath__"):
        return name + str(value).encode("utf-8", "surrogatepass")
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        value = value.detach().cpu()
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        content: bytes = value.contiguous().flatten().view(_byte_type(value)).numpy().tobytes()
        return name + head + content
    if hasattr(value, "tobytes"):  # an array, a scalar of NumPy, or an image
        about = (getattr(value, "dtype", ""), getattr(value, "shape", ""), getattr(value, "mode", ""))
        content = value.tobytes()
        return name + repr((*map(str, about), getattr(value, "size", ""))).encode() + content
    try:
        return name + pickle.dumps(value, 5)
    except Exception:
        return name + repr(value).encode("utf-8", "surrogatepass")


def _byte_type(tensor: Any) -> Any:
    import torch

    return tensor.dtype if tensor.dtype == torch.bool else torch.uint8


def length_of(item: Any) -> int:
    """Return the length of a text, of a list of tokens, or of all texts in an item; 0 where it has none.

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
