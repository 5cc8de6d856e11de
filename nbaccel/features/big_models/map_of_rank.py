"""The device map of a model that `prepare` gets: what it means in one process and in several. Runs in ranks.

Several processes share the devices, so each may use its own, one or several, beside the host and the disk. Optimizers
of weights that wait there are refused: such weights are fetched for a forward, and nothing would train them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.quantities import listed, plural
from nbaccel.base.world import World
from nbaccel.features.big_models.checkpoint_loading import automatic_map
from nbaccel.features.big_models.device_plan import DISK, HOST, Device, DeviceMap, device_key, get_max_memory
from nbaccel.features.big_models.dispatching import (
    dispatch_model,
    is_dispatched,
    main_device_of,
    offloaded_names,
    places_of_tensors,
    trained_beside_frozen,
)
from nbaccel.features.big_models.weight_slots import WaitingParameter
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.strategies.single import Strategy, without_compile

__all__ = ["place_for_rank", "refuse_unexchanged", "refuse_waiting"]


def place_for_rank(
    objects: Sequence[Any], device_map: str | DeviceMap, world: World, device: torch.device, shards: bool = False
) -> Module | None:
    """Put the parts of the model among `objects` where `device_map` says; return the model if it is for inference.

    It is in several processes if none of `objects` is an optimizer of the model; if the strategy `shards` models, which
    takes whole ones, it is where parts of the model wait.
    A map with one accelerator means this rank's own one if there are several processes, or if the machine has none. In
    a rank that has several for itself, the numbers 0, 1, ... are these.

    Args:
        device_map: A map, or a name as `load_checkpoint_and_dispatch` takes it: made for what one process may use.

    Raises:
        ValueError: No model or several; several processes, and a map over several devices; or an optimizer of weights
            that will wait.
    """
    models = [thing for thing in objects if isinstance(thing, Module)]
    if len(models) != 1:
        raise ValueError(f"prepare(..., device_map=...) takes one model, and there are {len(models)} in this call")
    model, optimizers = models[0], [thing for thing in objects if isinstance(thing, Optimizer)]
    is_shared = world.is_distributed and world.own_devices == 1
    if isinstance(device_map, str):
        device_map = automatic_map(device_map, model, _memory_of(device) if is_shared else None)
    fast = {key for place in device_map.values() if (key := device_key(place)) not in (HOST, DISK)}
    if len(fast) > 1 and is_shared:
        numbers = ",".join(map(str, range(len(fast) * world.world_size)))
        raise ValueError(
            f"device_map spreads {type(model).__name__} over {listed(sorted(map(str, fast)))}, and there are "
            f"{world.world_size} processes that need a whole model each: start one process that has these (-n 1 "
            f"--devices 0,1), give each process as many (-n {world.world_size} --devices {numbers}), or give each its "
            f"own device, device_map={{'': accelerator.device}}, with 'cpu' and 'disk' for what does not fit"
        )
    if len(fast) == 1 and (is_shared or device.type == "cpu"):
        if device.type == "cpu" and world.is_main_process:
            warn_user(
                f"device_map names device {next(iter(fast))}, and this run computes on the CPU, as the model does."
            )
        device_map = {name: device if device_key(place) in fast else place for name, place in device_map.items()}
    main = main_device_of(device_map, None if fast and not is_shared else device)
    _refuse_trained(model, device_map, main, optimizers, world, shards)
    dispatch_model(model, device_map, main)
    is_for_inference = bool(offloaded_names(model)) if shards else not trained_names(optimizers, model)
    return model if is_for_inference and world.is_distributed else None


def trained_names(optimizers: Iterable[Optimizer], model: Module) -> list[str]:
    """Return the parameters of `model`, under all their names, that one of `optimizers` trains."""
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in trained]


def _memory_of(device: torch.device) -> dict[Device, int]:
    """Return what a rank may use: its own device, and the host."""
    own = (device_key(device), HOST)
    return {place: size for place, size in get_max_memory().items() if place in own}


def _refuse_trained(
    model: Module,
    device_map: DeviceMap,
    main: torch.device,
    optimizers: Iterable[Optimizer],
    world: World,
    shards: bool,
) -> None:
    """Refuse optimizers of what will wait, and in several processes of anything beside it that is not frozen."""
    away = (DISK,) if main.type == "cpu" else (DISK, HOST)
    places = places_of_tensors(model, device_map)
    names = trained_names(optimizers, model)
    waiting = [name for name in names if places[name] in away and name not in trained_beside_frozen(model)]
    if waiting:
        raise ValueError(_sentence(waiting, "device_map puts", "on the host or on the disk"))
    if names and world.is_distributed:
        free = [name for name, each in model.named_parameters() if places[name] in away and each.requires_grad]
        free = [name for name in free if name not in trained_beside_frozen(model)]
        if free or (shards and any(place in away for place in places.values())):
            raise ValueError(
                f"the optimizer trains {listed(names, 3)} of a model with parts on the host or on the disk, and there "
                f"are {world.world_size} processes, which exchange gradients of whole models: freeze what waits "
                "(requires_grad_(False)) and use --strategy ddp, start one process (-n 1), or give all of the model "
                "places on devices"
            )


def refuse_waiting(optimizers: Iterable[Optimizer], models: Iterable[Module]) -> None:
    """Refuse optimizers of parameters of dispatched models that are on the meta device, which nothing would train.

    Raises:
        ValueError: Names the parameters.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    empty = {id(each): each for parameters in groups for each in parameters if each.is_meta}
    dispatched = [model for model in models if is_dispatched(model)]
    names = [name for model in dispatched for name, each in model.named_parameters() if id(each) in empty]
    unnamed = sum(isinstance(each, WaitingParameter) for each in empty.values())
    if names or unnamed:
        names = names or [plural(unnamed, "parameter")]
        raise ValueError(_sentence(names, "the optimizer has", "which wait on the host or on the disk"))


def refuse_unexchanged(
    optimizers: Iterable[Optimizer], models: Iterable[Module], world: World, strategy: Strategy
) -> None:
    """Refuse optimizers of models with a map that were prepared for inference: ranks would train apart, unnoticed.

    Args:
        models: As prepared.

    Raises:
        ValueError: Names the parameters.
    """
    for model in models:
        is_mapped = "hf_device_map" in vars(without_compile(model))
        if is_mapped and not strategy.keeps_together(model) and (names := trained_names(optimizers, model)):
            raise ValueError(
                f"the optimizer trains {listed(names, 3)} of {type(without_compile(model)).__name__}, which has a "
                f"device_map and was prepared for inference, and there are {world.world_size} processes, which would "
                "not exchange its gradients: pass both in one call, prepare(model, optimizer, device_map=...)"
            )


def _sentence(names: Sequence[str], before: str, after: str) -> str:
    return (
        f"{before} {listed(names, 3)} {after}, so they would never be trained: give the optimizer what has a device "
        "alone, such as adapters (peft), made before the model is dispatched, or give the model places on devices alone"
    )
