"""Files, names, ports, wrappers: ``accelerate.utils.other``, and other small functions. Run anywhere."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.base.settings import RunSettings
from nbaccel.options.configuration import FILE_NAME, ConfigFile
from nbaccel.train.checkpoint.model_weights import write_object
from nbaccel.train.distributed.partial_state import AcceleratorState, PartialState, current_world
from nbaccel.train.prepare.models import extract_model_from_parallel, is_compiled_module
from nbaccel.train.step.kwargs_handlers import AutocastKwargs, Handlers
from nbaccel.train.step.precision import make_precision

__all__ = [
    "GatheredParameters",
    "clean_state_dict_for_safetensors",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "is_compiled_module",
    "is_peft_model",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "recursive_getattr",
    "save",
    "str_to_bool",
    "wait_for_everyone",
    "write_basic_config",
]


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Call ``torch.save(obj, f)`` on the main process only.

    A path is written under a temporary name and then renamed.

    Args:
        obj: Anything that ``torch.save`` takes.
        f: A path or an open file.
        save_on_each_node: Save on the first rank of each node.
        safe_serialization: `obj` is a dict of tensors; write it as safetensors.

    Raises:
        CannotSave: There is no space, or no right to write there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"epoch": 3}, f"{folder}/state.pt")
        ...     load(f"{folder}/state.pt")
        {'epoch': 3}
    """
    world = current_world()
    if world.is_main_process or (save_on_each_node and world.is_local_main_process):
        write_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load`` for tensors and plain data. A file that holds other objects is refused, as torch does.

    Args:
        f, map_location: As ``torch.load`` takes them.
        **kwargs: More arguments of ``torch.load``. ``weights_only=False`` runs code from the file, so use it only with
            files of your own.

    Returns:
        What the file holds.

    Example:
        >>> state = load("model.pt", map_location="cpu")  # doctest: +SKIP
    """
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def wait_for_everyone() -> None:
    """Wait until every rank has called this. Collective.

    Example:
        >>> wait_for_everyone()
    """
    PartialState().wait_for_everyone()


def is_peft_model(model: Module) -> bool:
    """Return whether a model, inside of the wrappers that training put around it, is a model of peft.

    Args:
        model: The model.

    Example:
        >>> is_peft_model(torch.nn.Linear(1, 1))
        False
    """
    if importlib.util.find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), PeftModel)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for "y", "yes", "t", "true", "on", "1", and 0 for their opposites.

    Args:
        value: The text, in upper or lower case.
        to_bool: Return a bool instead.

    Raises:
        ValueError: Another text.

    Example:
        >>> str_to_bool("Yes"), str_to_bool("off", to_bool=True)
        (1, False)
    """
    word = value.lower()
    if word not in ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"):
        raise ValueError(f"invalid truth value {word}")
    is_true = word in ("y", "yes", "t", "true", "on", "1")
    return is_true if to_bool else int(is_true)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge a dict into another one, which is changed; dicts in both are merged too.

    Args:
        source: The dict whose values count.
        destination: The dict that is changed.

    Returns:
        `destination`.

    Example:
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
    """Return a state dict with each storage under its first name alone, and with contiguous tensors.

    Args:
        state_dict: The state dict.

    Example:
        >>> weight = torch.ones(2)
        >>> list(clean_state_dict_for_safetensors({"embedding": weight, "head": weight}))
        ['embedding']
    """
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
    """Return a size as a text in the largest unit of which there is at least one.

    Args:
        size: The size in bytes.

    Example:
        >>> convert_bytes(3 * 2**20)
        '3.0 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process listens on a port of this machine.

    Args:
        port: The port; by default 29500, torchrun's.

    Example:
        >>> is_port_in_use(get_free_port())
        False
    """
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port of this machine that no process listens on.

    Example:
        >>> 0 < get_free_port() < 65536
        True
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function; for another object, the name of its class.

    Args:
        obj: Any object.

    Example:
        >>> get_pretty_name(torch.nn.Linear), get_pretty_name(torch.nn.Linear(1, 1))
        ('Linear', 'Linear')
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute: ``obj.a.b`` for "a.b".

    Args:
        obj: Any object.
        attr: The names, joined by dots.

    Example:
        >>> recursive_getattr(torch.nn.Sequential(torch.nn.Linear(1, 1)), "0.in_features")
        1
    """
    return reduce(getattr, attr.split("."), obj)


def get_module_children_bottom_up(model: Module, return_fqns: bool = False) -> list[Any]:
    """Return a model and all modules in it, each after those inside of it.

    Args:
        model: The model.
        return_fqns: Return pairs of name and module.

    Example:
        >>> names = get_module_children_bottom_up(torch.nn.Sequential(torch.nn.ReLU()), return_fqns=True)
        >>> [name for name, _ in names]
        ['0', '']
    """
    named = sorted(model.named_modules(), key=lambda pair: -len(pair[0].split(".")) if pair[0] else 1)
    return named if return_fqns else [module for _, module in named]


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler of torch for this process's device.

    Args:
        distributed_type: Accepted as by Accelerate, without effect.
        **kwargs: Options of the scaler.

    Example:
        >>> scaler = get_grad_scaler(init_scale=1024.0)
    """
    return torch.amp.GradScaler(AcceleratorState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of this process's precision.

    Args:
        native_amp: False gives the context of full precision.
        autocast_kwargs: Options of the context.

    Example:
        >>> with get_mixed_precision_context_manager(native_amp=True):
        ...     pass
    """
    state = AcceleratorState()
    name = state.mixed_precision if native_amp else "no"
    return make_precision(name, state.device, Handlers.of([autocast_kwargs or AutocastKwargs()])).autocast()


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Any, modifier_rank: int | None = None, fwd_module: Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters that DeepSpeed's ZeRO stage 3 has in parts, on all ranks; with others do nothing.

    Args:
        params, modifier_rank, fwd_module, enabled: As DeepSpeed and Accelerate take them.

    Example:
        >>> with GatheredParameters([torch.ones(1)]):
        ...     pass
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if any(hasattr(parameter, "ds_id") for parameter in params):
        with sys.modules["deepspeed"].zero.GatheredParameters(params, modifier_rank, fwd_module, enabled):
            yield
    else:
        yield


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file, unless there is one.

    Args:
        mixed_precision: "no", "fp16" or "bf16". The number of devices is not written: every run counts those that it
            sees.
        save_location: The file; by default `nbaccel.toml` in the working directory, which notebooks in it read.

    Returns:
        The path of the file, or False if it exists already.

    Raises:
        ValueError: Another precision, or a file that cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_basic_config("fp16", Path(folder, "nbaccel.toml")).read_text().splitlines()[-1]
        'mixed-precision = "fp16"'
    """
    precision = RunSettings(mixed_precision=mixed_precision.lower()).mixed_precision or "no"
    file = ConfigFile(Path(FILE_NAME if save_location is None else save_location))
    if file.path.exists():
        print(f"still there: {file.path}; delete it, or change it by %accelerate config")
        return False
    file.write({"mixed-precision": precision})
    return file.path
