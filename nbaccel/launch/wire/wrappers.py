"""Wrappers: removes what training puts around a user's objects before they are sent. Both sides run it.

Objects of `nbaccel.train` return the wrapped object by `__nbaccel_unwrap__`: the packages `launch` and `train` do not
know each other.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from nbaccel.launch.wire.libraries import is_of_one_rank, wrapped_as

__all__ = ["is_made_anew", "is_put_there", "is_wrapper", "plain", "take_off_forward", "wraps"]


def plain(value: Any) -> Any:
    """Return the object that a prepared or parallel object wraps; any other object itself.

    Objects of `nbaccel.train` return it by `__nbaccel_unwrap__`; the wrappers of torch and of Accelerate, and classes
    derived from torch's, are known by their module.
    """
    if is_wrapper(value):
        return value.__nbaccel_unwrap__()
    if _is_parallel(type(value)):
        return plain(value.module)
    if _is_compiled(type(value)) and hasattr(value, "_orig_mod"):
        return plain(value._orig_mod)
    if part := wrapped_as(type(value)):
        return plain(getattr(value, part))
    return value


def wraps(kind: type) -> bool:
    """Return whether objects of a class may wrap another object."""
    return _has(kind, "__nbaccel_unwrap__") or _is_parallel(kind) or _is_compiled(kind) or wrapped_as(kind) != ""


def _is_parallel(kind: type) -> bool:
    # A class may say that its module is None.
    return any(str(base.__module__).startswith("torch.nn.parallel.") for base in kind.__mro__)


def _is_compiled(kind: type) -> bool:
    return str(kind.__module__).startswith("torch._dynamo.")


def take_off_forward(value: Any) -> None:
    """Restore the `forward` of the classes of a model and its models, if training has put another before it."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(type(value), torch.nn.Module):
        return
    for module in torch.nn.Module.modules(value):
        if is_wrapper(vars(module).get("forward")):
            del vars(module)["forward"]


def is_wrapper(value: Any) -> bool:
    """Return whether `value` is a wrapper, by its class: a ``__getattr__`` of the user's may do anything."""
    return _has(type(value), "__nbaccel_unwrap__")


def is_put_there(key: Any, value: Any) -> bool:
    """Return whether an attribute is not the user's, but was added by training while it lasts."""
    if type(key) is not str:
        return False
    if key == "step":  # of an optimizer, see torch/optim/lr_scheduler.py
        return type(value) in (types.FunctionType, types.MethodType) and hasattr(value, "_wrapped_by_lr_sched")
    return (key == "forward" and is_wrapper(value)) or is_of_one_rank(key, value)


def is_made_anew(value: Any) -> bool:
    """Return whether `value` belongs to the ranks, and defines how another is made for the notebook: an Accelerator."""
    return _has(type(value), "__nbaccel_anew__")


def _has(kind: type, name: str) -> bool:
    """Return whether a class has the attribute, without calling a metaclass's `__getattr__`."""
    try:
        type.__getattribute__(kind, name)
    except AttributeError:
        return False
    return True
