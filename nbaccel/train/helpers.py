"""Helpers: small functions that programs import from ``accelerate.utils``. Run anywhere, in one process.

nbaccel itself does not use them, and no process communicates here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.failures import can_retry
from nbaccel.train.batches import find_batch_size, recursively_apply
from nbaccel.train.distributed.nested import leaves
from nbaccel.train.distributed.partial_state import AcceleratorState
from nbaccel.train.parallel import extract_model_from_parallel
from nbaccel.train.step.kwargs_handlers import AutocastKwargs, Handlers
from nbaccel.train.step.precision import make_precision

__all__ = [
    "GatheredParameters",
    "clean_state_dict_for_safetensors",
    "clear_device_cache",
    "convert_bytes",
    "find_device",
    "get_free_port",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "honor_type",
    "ignorant_find_batch_size",
    "is_namedtuple",
    "is_peft_model",
    "is_port_in_use",
    "merge_dicts",
    "pad_input_tensors",
    "recursive_getattr",
    "should_reduce_batch_size",
    "str_to_bool",
]


def is_peft_model(model: Module) -> bool:
    """Return whether `model`, inside of the wrappers that training put around it, is a model of peft."""
    if importlib.util.find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), PeftModel)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for "y", "yes", "t", "true", "on", "1", and 0 for their opposites; a bool with `to_bool`.

    Raises:
        ValueError: another text.

    >>> str_to_bool("Yes"), str_to_bool("off", to_bool=True)
    (1, False)
    """
    word = value.lower()
    if word not in ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"):
        raise ValueError(f"invalid truth value {word}")
    is_true = word in ("y", "yes", "t", "true", "on", "1")
    return is_true if to_bool else int(is_true)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`; None without a tensor."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def is_namedtuple(data: Any) -> bool:
    """Return whether `data` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return what `generator` yields as a list, tuple or named tuple of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where that is an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return `tensor` with the last row of every tensor repeated, until `batch_size` divides by `num_processes`.

    >>> pad_input_tensors(torch.arange(3), 3, 2)
    tensor([0, 1, 2, 2])
    """

    def pad(one: Tensor) -> Tensor:
        missing = -batch_size % num_processes
        last = one.narrow(dim, one.shape[dim] - 1, 1)
        return torch.cat([one, *[last] * missing], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Fill `destination` with the contents of `source`, and return it; dicts in both are merged.

    >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
    {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with each storage under its first name alone, and contiguous tensors."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            place = (value.device, storage.data_ptr(), storage.nbytes())
            if place in seen and storage.nbytes():
                continue
            seen.add(place)
            value = value.contiguous()
        kept[name] = value
    return kept


def convert_bytes(size: float) -> str:
    """Return `size`, in bytes, as a text in the largest unit of which there is at least one.

    >>> convert_bytes(3 * 2**20)
    '3.0 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process listens on `port` of this machine; by default on 29500, torchrun's."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function; for another object, the name of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return ``obj.a.b`` for "a.b"."""
    return reduce(getattr, attr.split("."), obj)


def get_module_children_bottom_up(model: Module, return_fqns: bool = False) -> list[Any]:
    """Return `model` and all modules in it, each after those inside of it.

    return_fqns: return pairs of name and module.

    >>> names = get_module_children_bottom_up(torch.nn.Sequential(torch.nn.ReLU()), return_fqns=True)
    >>> [name for name, _ in names]
    ['0', '']
    """
    named = sorted(model.named_modules(), key=lambda pair: -len(pair[0].split(".")) if pair[0] else 1)
    return named if return_fqns else [module for _, module in named]


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether `exception` says that memory ran out, so that a smaller batch may help."""
    return can_retry(exception)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the device's unused memory, which other processes can then take.

    garbage_collection: run Python's garbage collection first.
    """
    if garbage_collection:
        gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_available():
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler of torch for this process's device."""
    return torch.amp.GradScaler(AcceleratorState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of this process's precision; without `native_amp` that of full precision."""
    state = AcceleratorState()
    name = state.mixed_precision if native_amp else "no"
    return make_precision(name, state.device, Handlers.of([autocast_kwargs or AutocastKwargs()])).autocast()


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Any, modifier_rank: int | None = None, fwd_module: Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Do nothing: parameters are whole on every rank here."""
    yield
