"""Wrappers: what training puts around a user's objects, and how they travel without it. Both sides run it.

Objects of `nbaccel.train` say what they wrap by `__nbaccel_unwrap__`: this room and that one do not know each other.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_wrapper", "plain"]


def plain(value: Any) -> Any:
    """What a prepared or parallel object wraps; any other object itself.

    Objects of `nbaccel.train` say so by `__nbaccel_unwrap__`; torch's own wrappers, and classes derived from them, are
    known by their module.
    """
    kind = type(value)
    if is_wrapper(value):
        return value.__nbaccel_unwrap__()
    if any(str(base.__module__).startswith("torch.nn.parallel.") for base in kind.__mro__):  # None, if a class says so
        return plain(value.module)
    if str(kind.__module__).startswith("torch._dynamo.") and hasattr(value, "_orig_mod"):
        return plain(value._orig_mod)
    return value


def is_wrapper(value: Any) -> bool:
    """Whether `value` says what it wraps. Its class is asked: a ``__getattr__`` of the user's may do anything.

    So may that of a metaclass, which `type.__getattribute__` goes past.
    """
    try:
        type.__getattribute__(type(value), "__nbaccel_unwrap__")
    except AttributeError:
        return False
    return True
