"""Take off what training puts around a user's objects before they are sent. Runs in ranks and in the kernel.

Objects of `nbaccel.train` return the wrapped object by `__nbaccel_unwrap__`: the packages `launch` and `train` do not
know each other. Objects that Accelerate, transformers and Lightning made in a rank are converted for a notebook, which
is one process. They are known by the modules of their classes, so none of the libraries is imported here before an
object of it arrives.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = [
    "MADE_WITH",
    "PYRO",
    "is_accelerator",
    "is_hook_of_sharding",
    "is_lightnings_callback",
    "is_lightnings_trainer",
    "is_made_anew",
    "is_of_lightning",
    "is_put_there",
    "is_wrapper",
    "itself",
    "kept_apart",
    "modules_in",
    "plain",
    "reduce_accelerate",
    "users_class",
    "wraps",
]


def modules_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are modules of torch, without the wrappers that training has put around them."""
    torch = sys.modules.get("torch")
    found = {name: plain(value) for name, value in values.items()} if torch is not None else {}
    return {name: value for name, value in found.items() if issubclass(type(value), sys.modules["torch"].nn.Module)}


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
    if part := _wrapped_as(type(value)):
        return plain(getattr(value, part))
    return value


def wraps(kind: type) -> bool:
    """Return whether objects of a class may wrap another object."""
    return _has(kind, "__nbaccel_unwrap__") or _is_parallel(kind) or _is_compiled(kind) or _wrapped_as(kind) != ""


def _is_parallel(kind: type) -> bool:
    # A class may say that its module is None.
    return any(str(base.__module__).startswith("torch.nn.parallel.") for base in kind.__mro__)


def _is_compiled(kind: type) -> bool:
    return str(kind.__module__).startswith("torch._dynamo.")


def is_wrapper(value: Any) -> bool:
    """Return whether `value` is a wrapper, by its class: a ``__getattr__`` of the user's may do anything."""
    return _has(type(value), "__nbaccel_unwrap__")


def is_put_there(key: Any, value: Any) -> bool:
    """Return whether an attribute is not the user's, but was added by training while it lasts."""
    if type(key) is not str:
        return type(key) is int and is_hook_of_sharding(value)
    if key.startswith(_COMPOSABLE) or is_hook_of_sharding(value):
        return True
    if key == "step":  # of an optimizer: what a scheduler puts there, see torch/optim/lr_scheduler.py, or we do
        is_function = type(value) in (types.FunctionType, types.MethodType)
        return (is_function and hasattr(value, "_wrapped_by_lr_sched")) or is_wrapper(value)
    return (key == "forward" and is_wrapper(value)) or _is_of_one_rank(key, value)


_SHARDING = ("torch.distributed.fsdp.", "nbaccel.train.strategies.")
_COMPOSABLE = "__composable_api"
"""Beginning of the attributes in which torch.distributed keeps the state of a module."""


def users_class(kind: type) -> type:
    """Return the class that a module had before `fully_shard` derived another from it; any other class itself.

    torch makes the class "FSDPNet" of `FSDPModule` and the user's, in this order.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    bases = type.__dict__["__mro__"].__get__(kind)
    if fsdp is None or len(bases) < 3 or bases[1] is not getattr(fsdp, "FSDPModule", None):
        return kind
    own: type = bases[2]
    return own


def is_hook_of_sharding(value: Any) -> bool:
    """Return whether it is a hook, or a method, that `fully_shard` has put into a module."""
    kind = type(value)
    if kind.__name__ == "_WrappedHook" and kind.__module__ == "torch.nn.modules.module":
        value = value.hook
    if type(value) is types.MethodType:
        value = value.__func__
    # Not `__module__`: `register_fsdp_forward_method` takes that over from the user's method.
    return type(value) is types.FunctionType and str(value.__globals__.get("__name__")).startswith(_SHARDING)


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


MADE_WITH = "_nbaccel_made_with"
"""Attribute of an Accelerator, set by ranks: the arguments it was made with."""

PYRO = "pyro.get_param_store()", "save it to a file as the cell's last line, and load that in the next cell"

_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_ARGUMENTS = ("transformers.training_args", "TrainingArguments")
_OF_THE_WORLD = frozenset({"_is_accelerate_prepared", "_n_gpu", "_original_forward", "_setup_devices", MADE_WITH})
"""Attributes that describe the rank and the device at the time when they were set.

They are those of accelerate/accelerator.py and transformers/training_args.py.
"""


def kept_apart() -> dict[str, Any]:
    """Return state of a training that libraries keep outside of the notebook's names: Pyro's parameters, by name.

    Each comes with a mark that changes with it. `PYRO` holds the advice.
    """
    find = getattr(sys.modules.get("pyro"), "get_param_store", None)
    params = {} if find is None else getattr(find(), "_params", {})
    return {name: (id(tensor), tensor._version) for name, tensor in dict(params).items()}


def _wrapped_as(kind: type) -> str:
    """Return the attribute in which a wrapper of Accelerate's holds the wrapped object; "" for any other class."""
    return _WRAPPERS.get(kind.__name__, "") if _is_of_accelerate(kind) else ""


def _is_of_one_rank(name: str, value: Any) -> bool:
    """Return whether the attribute was added to a model or to arguments of the user's, and is true in one rank only."""
    if name in _OF_THE_WORLD or (name in ("trainer", "_trainer") and is_lightnings_trainer(value)):
        return True
    function = value.__func__ if type(value) is types.MethodType else value
    if name == "forward":
        return type(function) is types.FunctionType and str(function.__module__).startswith("accelerate.")
    return name == "distributed_state" and _is_of_accelerate(type(value))


def is_accelerator(value: Any) -> bool:
    """Return whether it is an Accelerator of Accelerate's: the notebook keeps its own."""
    return type(value).__name__ == "Accelerator" and _is_of_accelerate(type(value))


def is_lightnings_trainer(value: Any) -> bool:
    """Return whether it is a Trainer of Lightning's; models and data refer to the last one that trained them."""
    kind = type(value)
    return kind.__name__ == "Trainer" and is_of_lightning(kind)


def is_of_lightning(kind: type) -> bool:
    """Return whether it is a class of Lightning's own, not one that a notebook has derived from it."""
    return _module_of(kind).partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def is_lightnings_callback(kind: type) -> bool:
    """Return whether its objects are callbacks of Lightning's with data: best checkpoint's path, observed values.

    Progress bars are excluded: they hold the screen of their process.
    """
    module = _module_of(kind)
    return ".callbacks." in module and ".callbacks.progress" not in module and is_of_lightning(kind)


def _module_of(kind: type) -> str:
    return str(type.__dict__["__module__"].__get__(kind))


def reduce_accelerate(obj: Any) -> Any:
    """Reduce an Accelerator, loader or arguments that know their rank to the notebook's form; else return None."""
    kind = type(obj)
    if any((base.__module__, base.__name__) == _ARGUMENTS for base in kind.__mro__):
        return _reduce_arguments(obj)
    if not _is_of_accelerate(kind):
        return None
    if is_accelerator(obj):
        return _accelerator, _made_with(obj)
    if kind.__name__ == "PartialState":
        return kind, ()
    loader = vars(obj).get("base_dataloader")
    return None if loader is None else (itself, (_whole(loader),))


def _reduce_arguments(arguments: Any) -> Any:
    """Reduce arguments, with the device of the first rank, and alone.

    Finding devices again would reset Accelerate's states.
    """
    match arguments.__reduce_ex__(pickle.HIGHEST_PROTOCOL):
        case (make, args, dict(state), *rest):
            return make, args, state | {"distributed_state": None}, *rest
    return None


def _made_with(accelerator: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: tuple[tuple[Any, ...], dict[str, Any]] | None = vars(accelerator).get(MADE_WITH)
    if found is not None:
        return found
    settings = {
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "cpu": accelerator.device.type == "cpu",
    }
    return (), settings


def _whole(loader: Any) -> Any:
    """Return `loader` with its original data and batches, before Accelerate divided them."""
    alone = copy.copy(loader)
    dataset, batches = _inside(loader.dataset, "dataset"), _inside(loader.batch_sampler, "batch_sampler")
    vars(alone).update(dataset=dataset, batch_sampler=batches, _iterator=None)  # avoids a `__setattr__` that forbids it
    return alone


def _inside(obj: Any, name: str) -> Any:
    while _is_of_accelerate(type(obj)) and hasattr(obj, name):
        obj = getattr(obj, name)
    return obj


def _is_of_accelerate(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "accelerate"


# --- in the kernel --------------------------------------------------------------------------------------------------


def _accelerator(args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """Return an Accelerator that is initialised at its first use, in the notebook or in a rank.

    Until then it knows no process and no device, so it belongs to the process that uses it, and CUDA is not started in
    the notebook, so that ranks can still be forked.
    """
    kind: Any = importlib.import_module("accelerate").Accelerator

    class Accelerator(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__") or type(getattr(kind, name, None)) is types.FunctionType:
                return object.__getattribute__(self, name)  # a method reads other attributes when it is called
            object.__setattr__(self, "__class__", kind)
            kind.__init__(self, *args, **settings)
            return getattr(self, name)

        def __reduce__(self) -> Any:
            return _accelerator, (args, settings)

    return object.__new__(Accelerator)


def itself(obj: Any) -> Any:
    """Return `obj`: a reduction to another object is a call of this function with it."""
    return obj
