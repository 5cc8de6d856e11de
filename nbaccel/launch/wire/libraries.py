"""What Accelerate, transformers and Lightning made in a rank, as it is of use in a notebook, which is one process.

Their objects are known by the modules of their classes, so nothing of theirs is imported here before something of it
comes. Runs in ranks and in the kernel.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from typing import Any

__all__ = [
    "MADE_WITH",
    "PYRO",
    "is_accelerator",
    "is_lightnings_callback",
    "is_lightnings_trainer",
    "is_of_lightning",
    "is_of_one_rank",
    "kept_apart",
    "reduce_accelerate",
    "wrapped_as",
]

MADE_WITH = "_nbaccel_made_with"
"""An attribute of an Accelerator: what it was made with. Ranks put it there."""

PYRO = "pyro.get_param_store()", "save it to a file as the cell's last line, and load that in the next cell"

_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_ARGUMENTS = ("transformers.training_args", "TrainingArguments")
_OF_THE_WORLD = frozenset({"_is_accelerate_prepared", "_n_gpu", "_original_forward", "_setup_devices", MADE_WITH})
"""Attributes that say what there was when they were set: a rank, and a device (accelerate/accelerator.py,
transformers/training_args.py)."""


def kept_apart() -> dict[str, Any]:
    """Return what libraries keep of a training where no name of the notebook leads: Pyro's parameters, by name.

    Each with a mark by which a change shows. `PYRO` is what to do about it.
    """
    find = getattr(sys.modules.get("pyro"), "get_param_store", None)
    params = {} if find is None else getattr(find(), "_params", {})
    return {name: (id(tensor), tensor._version) for name, tensor in dict(params).items()}


def wrapped_as(kind: type) -> str:
    """The attribute in which a wrapper of Accelerate's has what it wraps; "" for any other class."""
    return _WRAPPERS.get(kind.__name__, "") if _is_of_accelerate(kind) else ""


def is_of_one_rank(name: str, value: Any) -> bool:
    """Whether the attribute was put into a model or into arguments of the user's, and is true in one rank only."""
    if name in _OF_THE_WORLD or (name in ("trainer", "_trainer") and is_lightnings_trainer(value)):
        return True
    function = value.__func__ if type(value) is types.MethodType else value
    if name == "forward":
        return type(function) is types.FunctionType and str(function.__module__).startswith("accelerate.")
    return name == "distributed_state" and _is_of_accelerate(type(value))


def is_accelerator(value: Any) -> bool:
    """Whether it is an Accelerator of Accelerate's: the notebook has its own, which serves it as before."""
    return type(value).__name__ == "Accelerator" and _is_of_accelerate(type(value))


def is_lightnings_trainer(value: Any) -> bool:
    """Whether it is a Trainer of Lightning's, which the models and data that it trained refer to until the next one."""
    kind = type(value)
    return kind.__name__ == "Trainer" and is_of_lightning(kind)


def is_of_lightning(kind: type) -> bool:
    """Whether it is a class of Lightning's own, and none that a notebook has derived from one."""
    return _module_of(kind).partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def is_lightnings_callback(kind: type) -> bool:
    """Whether its objects are callbacks of Lightning's, which keep data: the best checkpoint's path, what was watched.

    Progress bars have the screen of their process.
    """
    module = _module_of(kind)
    return ".callbacks." in module and ".callbacks.progress" not in module and is_of_lightning(kind)


def _module_of(kind: type) -> str:
    return str(type.__dict__["__module__"].__get__(kind))


def reduce_accelerate(obj: Any) -> Any:
    """An Accelerator, loader or arguments that say which rank this is, as they are in the notebook; else None."""
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
    return None if loader is None else (_itself, (_whole(loader),))


def _reduce_arguments(arguments: Any) -> Any:
    """With the device of the first rank, and alone. To look for devices again would reset Accelerate's states."""
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
    """`loader` with the data and the batches that it was made with, before Accelerate shared these out."""
    alone = copy.copy(loader)
    dataset, batches = _inside(loader.dataset, "dataset"), _inside(loader.batch_sampler, "batch_sampler")
    vars(alone).update(dataset=dataset, batch_sampler=batches, _iterator=None)  # past a `__setattr__` that forbids it
    return alone


def _inside(obj: Any, name: str) -> Any:
    while _is_of_accelerate(type(obj)) and hasattr(obj, name):
        obj = getattr(obj, name)
    return obj


def _is_of_accelerate(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == "accelerate"


# --- in the kernel --------------------------------------------------------------------------------------------------


def _accelerator(args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """An Accelerator that is made when it is used first, here or in a rank.

    Until then it knows no process and no device, so it is that of whoever uses it, and the notebook keeps what a fork
    needs: that CUDA has not begun.
    """
    kind: Any = importlib.import_module("accelerate").Accelerator

    class Accelerator(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__") or type(getattr(kind, name, None)) is types.FunctionType:
                return object.__getattribute__(self, name)  # a method asks for more when it is called
            object.__setattr__(self, "__class__", kind)
            kind.__init__(self, *args, **settings)
            return getattr(self, name)

        def __reduce__(self) -> Any:
            return _accelerator, (args, settings)

    return object.__new__(Accelerator)


def _itself(obj: Any) -> Any:
    return obj
