"""Models as programs pass them to `prepare`: in DataParallel, quantised, on several devices, compiled. Runs in ranks.

Decides what `prepare` may do with a model before a strategy takes it, and refuses what cannot be trained here. It
reads attributes with which transformers, bitsandbytes and accelerate mark such models and imports none of them.
"""

from __future__ import annotations

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.strategies.base import without_compile
from nbaccel.train.warned import warn_user
from nbaccel.world import World

__all__ = ["admit", "is_compiled_module", "is_spread", "keep_compiled", "may_move"]

_QUANTISED_MARKS = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit", "hf_quantizer", "quantization_method")
"""Attributes that are set, and true, on a model with quantised weights."""

_NOWHERE = frozenset({"meta", "disk"})


def admit(model: Module, world: World, device: torch.device) -> Module:
    """Return `model` as it can be prepared in this rank: without ``nn.DataParallel``.

    Raises:
        ValueError: the model is spread over several devices, and there are several ranks.
    """
    if isinstance(model, DataParallel):
        if world.is_main_process:
            warn_user(
                "the model was wrapped in nn.DataParallel; prepare took it out, since every process drives one "
                "device here. Leave the wrapper out.",
            )
        model = model.module
    if world.is_distributed:
        _refuse_spread(model, world, device)
        _warn_of_neighbour(model, world, device)
    return model


def may_move(model: Module) -> bool:
    """Return whether we may call ``model.to(device)``: not on quantised models, nor on models on several devices."""
    return not (_is_quantised(model) or is_spread(model))


def is_spread(model: Module) -> bool:
    """Return whether the parameters of `model` are on several devices."""
    return len(_devices(model)) > 1


def keep_compiled(model: Module, inner: Module) -> Module:
    """Return `inner`, the user's own module inside `model`, compiled if `model` is compiled."""
    if is_compiled_module(model):
        # The wrapper around DDP must not change, for the training; this one shares its compiler.
        return model if without_compile(model) is inner else type(model)(inner, model.dynamo_ctx)
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model if without_compile(model) is inner else inner


def is_compiled_module(module: Module) -> bool:
    """Return whether ``module`` is what ``torch.compile`` returned.

    >>> layer = torch.nn.Linear(1, 1)
    >>> is_compiled_module(layer), is_compiled_module(torch.compile(layer, backend="eager"))
    (False, True)
    """
    return "_orig_mod" in module._modules


def _refuse_spread(model: Module, world: World, device: torch.device) -> None:
    spread = _devices(model)
    if len(spread) > 1:
        raise ValueError(
            f"{_name(model)} is spread over {', '.join(sorted(spread))}, and there are {world.world_size} processes "
            f"that need a whole model each: load it on one device (no device_map='auto'; device_map={{'': "
            f"accelerator.device}}), or start one process (-n 1)."
        )
    if _is_quantised(model) and spread and spread != {str(device)} and device.type != "cpu":
        raise ValueError(
            f"{_name(model)} is quantised and lies on {spread.pop()}, so it cannot be moved to {device} of rank "
            f"{world.rank}: load it there, device_map={{'': accelerator.device}}."
        )


def _warn_of_neighbour(model: Module, world: World, device: torch.device) -> None:
    foreign = {place for place in _devices(model) if place.startswith("cuda") and place != str(device)}
    if foreign and device.type == "cuda":
        warn_user(
            f"rank {world.rank} of {world.world_size} made {_name(model)} on {foreign.pop()}, where another rank "
            f"trains: prepare moves it to {device}, but what it took there is not given back. Leave .cuda() out, or "
            "use .to(accelerator.device).",
        )


def _is_quantised(model: Module) -> bool:
    inner = without_compile(model)
    config = getattr(inner, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        return True
    return any(bool(getattr(inner, mark, None)) for mark in _QUANTISED_MARKS)


def _devices(model: Module) -> set[str]:
    """Return the devices of the model: by transformers' map if it has one, else by its parameters.

    Parameters on the CPU beside others on one device are taken for an oversight, which moving the model corrects;
    in a map they are intended.
    """
    mapped = getattr(without_compile(model), "hf_device_map", None)
    if isinstance(mapped, dict):
        return {_device_name(place) for place in mapped.values()} - _NOWHERE
    places = {str(parameter.device) for parameter in model.parameters()} - _NOWHERE
    return places - {"cpu"} or places


def _device_name(place: object) -> str:
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def _name(model: Module) -> str:
    return type(without_compile(model)).__name__
