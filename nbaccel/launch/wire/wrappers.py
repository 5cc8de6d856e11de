"""Wrappers: what training puts around a user's objects, and how they travel without it. Both sides run it.

Objects of `nbaccel.train` say what they wrap by `__nbaccel_unwrap__`: this room and that one do not know each other.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_wrapper", "plain", "wraps"]


def plain(value: Any) -> Any:
    """What a prepared or parallel object wraps; any other object itself.

    Objects of `nbaccel.train` say so by `__nbaccel_unwrap__`; torch's own wrappers, and classes derived from them, are
    known by their module.
    """
    if is_wrapper(value):
        return value.__nbaccel_unwrap__()
    if _is_parallel(type(value)):
        return plain(value.module)
    if _is_compiled(type(value)) and hasattr(value, "_orig_mod"):
        return plain(value._orig_mod)
    return value


def wraps(kind: type) -> bool:
    """Whether objects of a class may stand for another that they wrap."""
    return _has_unwrap(kind) or _is_parallel(kind) or _is_compiled(kind)


def _is_parallel(kind: type) -> bool:
    # A class may say that its module is None.
    return any(str(base.__module__).startswith("torch.nn.parallel.") for base in kind.__mro__)


def _is_compiled(kind: type) -> bool:
    return str(kind.__module__).startswith("torch._dynamo.")


def is_wrapper(value: Any) -> bool:
    """Whether `value` says what it wraps. Its class is asked: a ``__getattr__`` of the user's may do anything."""
    return _has_unwrap(type(value))


def _has_unwrap(kind: type) -> bool:
    """Also a metaclass may have a ``__getattr__``, which `type.__getattribute__` goes past."""
    try:
        type.__getattribute__(kind, "__nbaccel_unwrap__")
    except AttributeError:
        return False
    return True
