"""Wrappers: what training puts around a user's objects, and how they travel without it. Both sides run it.

Objects of `nbaccel.train` say what they wrap by `__nbaccel_unwrap__`: this room and that one do not know each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["is_wrapper", "plain", "undress"]


def plain(value: Any) -> Any:
    """What a prepared or parallel object wraps; any other object itself.

    Objects of `nbaccel.train` say so by `__nbaccel_unwrap__`; torch's own wrappers, and classes derived from them, are
    known by their module.
    """
    kind = type(value)
    if is_wrapper(value):
        return value.__nbaccel_unwrap__()
    if any(base.__module__.startswith("torch.nn.parallel.") for base in kind.__mro__):
        return plain(value.module)
    if kind.__module__.startswith("torch._dynamo.") and hasattr(value, "_orig_mod"):
        return plain(value._orig_mod)
    return value


def is_wrapper(value: Any) -> bool:
    """Whether `value` says what it wraps. Its class is asked: a `__getattr__` of the user's may do anything."""
    return hasattr(type(value), "__nbaccel_unwrap__")


def undress(values: Iterable[Any]) -> None:
    """Take from each model what `prepare` put before its class's own forward. Where the run is over, it has served."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for model in values:
        if isinstance(model, torch.nn.Module) and is_wrapper(vars(model).get("forward")):
            del model.forward
