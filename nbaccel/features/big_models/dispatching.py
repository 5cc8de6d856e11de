"""Put the parts of a model on the devices of a map, and let it run there: `dispatch_model` and its relatives. In ranks.

A part on a device gets its inputs moved there. A part on the host (beside an accelerator) or on the disk is an
`OffloadedBlock`. Forwards are as before, and so is `state_dict`, which has all tensors.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict, ParameterList
from torch.utils.hooks import RemovableHandle

from nbaccel.base.quantities import listed
from nbaccel.errors import NoSuchDevice
from nbaccel.features.big_models.device_plan import (
    DISK,
    HOST,
    DeviceMap,
    Wholes,
    check_device_map,
    device_key,
    place_of,
)
from nbaccel.features.big_models.forward_hooks import Bridge, InputsTo, StaysThere, fill, is_on, refuse_to_load
from nbaccel.features.big_models.module_sizes import every_tensor, owner_of
from nbaccel.features.big_models.offloaded_block import OffloadedBlock, Offloading
from nbaccel.features.big_models.stored_tensors import Stored
from nbaccel.features.big_models.weight_slots import Slot, WaitingParameter, waiting
from nbaccel.features.big_models.weight_sources import SOURCE, WeightSources

__all__ = [
    "as_device",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "is_dispatched",
    "main_device_of",
    "offloaded_names",
    "places_of_tensors",
    "take_back",
    "trained_beside_frozen",
]

_LISTS = (ParameterList, ParameterDict)
_MARK = "_nbaccel_dispatch"


@dataclass(eq=False)
class Dispatch:
    """The hooks by which a model runs over several places. An attribute of the model, pickled and copied with it."""

    offloading: Offloading
    handles: list[RemovableHandle] = field(default_factory=list)


def dispatch_model(
    model: Module,
    device_map: DeviceMap,
    main_device: int | str | torch.device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> Module:
    """Put the parts of a model on the devices of a map. The model is called as before.

    Args:
        model: The model.
        device_map: The place of each module or tensor by its name. A name stands for all below it, "" for everything.
            Places are numbers of devices, devices, "cpu" and "disk".
        main_device: Where parts on the host and on the disk compute; by default the first accelerator of the map.
            Without an accelerator it is the CPU, where parts on the host stay.
        state_dict: The tensors of the parts on the host, if the model does not have them.
        offload_dir: A folder or a file with the weights of the parts on the disk. Weights that are in memory are
            written there. Not needed after `load_checkpoint_in_model`.
        offload_index: Instead of `offload_dir`, the file of each name, as transformers and Accelerate write it.
        offload_buffers: Fetch buffers with the weights. By default they stay where their part computes.
        skip_keys: Names of arguments that are not moved.
        preload_module_classes: Classes whose weights are fetched together, if their forward uses weights of modules
            inside.
        force_hooks: Move inputs to the device also where the map has only one device.

    Returns:
        The same `model`.

    Raises:
        ValueError: A tensor has no place or no numbers, or the model is dispatched already.
        NoSuchDevice: The machine does not have a device of the map.
        CannotSave: There is no space for the weights that have to be written.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> model = dispatch_model(model, {"0": 0, "1": "cpu"})  # doctest: +SKIP
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    _refuse_dispatched(model)
    check_device_map(model, device_map)
    main = main_device_of(device_map, main_device)
    sources = WeightSources(model, state_dict, offload_dir, offload_index)
    wholes = Wholes.of(model)
    if preload_module_classes:
        wholes = Wholes({*wholes.names, *Wholes.of(model, preload_module_classes).names}, wholes.members)
    _Dispatching(model, device_map, main, sources, wholes, offload_buffers, skip_keys).run(force_hooks)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: Module,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> Module:
    """Keep all weights of a model on the host, and bring each block to a device for its forward.

    Args:
        model: The model.
        execution_device: The device; by default that of the first parameter.
        offload_buffers, state_dict, preload_module_classes: As for `dispatch_model`.

    Returns:
        The same `model`.

    Example:
        >>> model = cpu_offload(torch.nn.Linear(2, 1), execution_device="cpu")
    """
    main = _first_device(model) if execution_device is None else execution_device
    return _offload(model, HOST, main, offload_buffers, preload_module_classes, state_dict=state_dict)


def disk_offload(
    model: Module,
    offload_dir: str | os.PathLike[str],
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> Module:
    """Keep all weights of a model on the disk, and read each block for its forward on a device.

    Args:
        model: The model.
        offload_dir: A checkpoint of the model, if it is on the meta device; else the folder to write its weights into.
        execution_device: The device; by default that of the first parameter.
        offload_buffers, preload_module_classes: As for `dispatch_model`.

    Returns:
        The same `model`.

    Example:
        >>> model = disk_offload(model, "weights", execution_device=0)  # doctest: +SKIP
    """
    main = _first_device(model) if execution_device is None else execution_device
    return _offload(model, DISK, main, offload_buffers, preload_module_classes, offload_dir=offload_dir)


def _offload(
    model: Module,
    place: str,
    main: Any,
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
    **sources: Any,
) -> Module:
    dispatch_model(
        model,
        {"": place},
        main,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        **sources,
    )
    return model


def is_dispatched(model: Module) -> bool:
    """Return whether `model`, or a module in it, was dispatched: by this package, by transformers or by Accelerate."""
    return any(
        _MARK in vars(part) or _is_placed_by_others(part) or len(_places(part)) > 1 or DISK in _places(part)
        for part in model.modules()
    )


def offloaded_names(model: Module) -> list[str]:
    """Return the parameters of `model` that are on the host or on the disk between forwards, and cannot be trained."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def take_back(model: Module) -> None:
    """Make a dispatched model a plain one: without hooks, what was offloaded in memory on the CPU."""
    for part in model.modules():
        done: Dispatch | None = vars(part).pop(_MARK, None)
        if done is None:
            continue
        for handle in done.handles:
            handle.remove()
        made: dict[int, Tensor] = {}
        opened: dict[str, Any] = {}
        for block in done.offloading.blocks:
            for slot in block.slots:
                key = id(slot.placeholder)
                if key not in made:
                    real = slot.read(opened).detach().clone()
                    is_parameter = isinstance(slot.placeholder, Parameter)
                    made[key] = Parameter(real, slot.placeholder.requires_grad) if is_parameter else real
                slot.put(made[key])
        for attribute in ("_apply", "hf_device_map"):
            vars(part).pop(attribute, None)


# -- the parts


class _Dispatching:
    """The work of one `dispatch_model`.

    Args:
        wholes: Modules whose tensors are fetched together.
    """

    def __init__(
        self,
        model: Module,
        device_map: DeviceMap,
        main: torch.device,
        sources: WeightSources,
        wholes: Wholes,
        offload_buffers: bool,
        skip_keys: str | Sequence[str] | None,
    ) -> None:
        self._model = model
        self._main = main
        self._sources = sources
        self._wholes = wholes
        self._skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
        self._done = Dispatch(Offloading(main))
        self._places = places_of_tensors(model, device_map)
        self._tensors = dict(every_tensor(model))  # all are kept, since they are known by their identity meanwhile
        self._made: dict[int, Tensor] = {}
        self._stays = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        if offload_buffers:
            self._stays = {name for name in self._stays if name not in model.state_dict(keep_vars=True)}
        self._trained = trained_beside_frozen(model)
        self._stays |= self._trained

    def run(self, force_hooks: bool) -> None:
        away = {DISK} if self._main.type == "cpu" else {DISK, HOST}
        waits = {name: True for name, place in self._places.items() if place in away and name not in self._stays}
        self._refuse_quantised(waits)
        for name, tensor in self._tensors.items():
            if tensor.is_meta:
                self._sources.checked(name, tensor)  # before anything of the model is changed
        stored = self._sources.of(waits, self._places)
        has_files = any(self._tensors[name].is_meta for name in waits)
        for name, tensor in self._tensors.items():
            if name not in waits:
                if has_files and name in self._stays and self._places[name] in away and name not in self._trained:
                    self._sources.refresh(name, tensor)
                self._settle(name, tensor, self._device(self._places[name], away))
        moves_inputs = len({self._device(place, away) for place in self._places.values()}) > 1
        seen: set[tuple[int, bool]] = set()
        for name, module, is_whole, names in _blocks("", self._model, None, self._wholes, self._places):
            if (id(module), is_whole) in seen:
                continue
            seen.add((id(module), is_whole))
            mine = [each for each in names if each in waits]
            if moves_inputs and names:
                self._move_inputs(module, self._device(self._places[names[0]], away))
            if mine:
                self._wait(name, module, mine, stored)
        if moves_inputs or force_hooks or (waits and self._main.type != "cpu"):
            self._bridge()
        if waits:
            self._model._apply = StaysThere(type(self._model).__name__, len(waits))  # type: ignore[method-assign]
        if self._done.handles:
            setattr(self._model, _MARK, self._done)
        vars(self._model).pop(SOURCE, None)

    def _device(self, place: Any, away: set[str]) -> torch.device:
        return self._main if place in away else as_device(place)

    def _settle(self, name: str, tensor: Tensor, device: torch.device) -> None:
        """Put a tensor that stays there on its device; a parameter stays the same object if it has numbers."""
        owner, leaf = owner_of(self._model, name)
        if isinstance(tensor, Parameter) and not tensor.is_meta:
            if not is_on(tensor, device):
                tensor.data = tensor.data.to(device)
            return
        key = id(tensor)
        if key not in self._made:
            new = self._sources.loaded(name, tensor, device) if tensor.is_meta else tensor.to(device)
            self._made[key] = Parameter(new, tensor.requires_grad) if isinstance(tensor, Parameter) else new
        _put(owner, leaf, self._made[key])

    def _wait(self, name: str, module: Module, names: Iterable[str], stored: Mapping[str, Stored]) -> None:
        prefix = f"{name}." if name else ""
        slots = [self._slot(each, each.removeprefix(prefix), stored[each]) for each in names]
        block = OffloadedBlock(name, module, slots, self._done.offloading)
        self._done.offloading.add(block)
        self._done.handles += [
            module.register_forward_pre_hook(block.before, prepend=True),  # others may read the weights
            module.register_forward_hook(block.after, always_call=True),
        ]
        for part, lone in block.parts():
            self._done.handles += [
                part.register_forward_pre_hook(lone.before, prepend=True),
                part.register_forward_hook(lone.after, always_call=True),
            ]
        by_owner: dict[Module, list[Slot]] = {}
        for slot in slots:
            by_owner.setdefault(slot.owner, []).append(slot)
        for owner, own in by_owner.items():
            self._done.handles += [
                owner.register_state_dict_post_hook(partial(fill, own)),
                owner.register_load_state_dict_pre_hook(partial(refuse_to_load, own)),
            ]

    def _slot(self, name: str, inside: str, stored: Stored) -> Slot:
        owner, leaf = owner_of(self._model, name)
        held = self._tensors[name]
        if id(held) not in self._made:
            self._made[id(held)] = waiting(held, name, stored)
        return Slot(owner, leaf, inside, self._made[id(held)], stored, held.shape, held.dtype)

    def _move_inputs(self, module: Module, device: torch.device) -> None:
        hook = module.register_forward_pre_hook(InputsTo(device, self._skipped), with_kwargs=True)
        self._done.handles.append(hook)

    def _bridge(self) -> None:
        """Bring the model's inputs to its first device, and its outputs to where the inputs were."""
        bridge = Bridge(self._main, self._skipped)
        self._done.handles += [
            self._model.register_forward_pre_hook(bridge.before, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(bridge.after, always_call=True),
        ]

    def _refuse_quantised(self, names: Iterable[str]) -> None:
        for name in names:
            kind = type(self._tensors[name])
            if kind not in (Parameter, Tensor, WaitingParameter):
                raise ValueError(
                    f"{name} is a {kind.__name__}, which is quantised or of a kind of its own, and cannot wait on the "
                    "host or on the disk: give all of the model places on devices, or load it without quantisation"
                )


def _blocks(
    name: str, module: Module, parent: Module | None, wholes: Wholes, places: Mapping[str, Any]
) -> Iterator[tuple[str, Module, bool, list[str]]]:
    """Yield the modules whose tensors come together: name, module, whether those below it belong to it, their names.

    A module that should be whole and has its tensors in several places is divided all the same.
    """
    prefix = f"{name}." if name else ""
    below = [prefix + leaf for leaf, _ in every_tensor(module)]
    children = [(child, part) for child, part in module._modules.items() if part is not None]
    is_uniform = len({places[each] for each in below}) == 1
    if below and is_uniform and (not children or wholes.keeps(module, parent, 0)):
        yield name, module, True, below
        return
    lists = [(f"{prefix}{child}.", part) for child, part in children if isinstance(part, _LISTS)]
    owners = [(prefix, module), *lists]  # a list of parameters has no forward: that of the module above reads them
    own = [before + leaf for before, part in owners for leaf in (*part._parameters, *part._buffers)]
    if own := [each for each in own if each in places]:
        yield name, module, False, own
    for child, part in children:
        if isinstance(part, _LISTS):
            continue
        yield from _blocks(f"{prefix}{child}", part, module, wholes, places)


def trained_beside_frozen(model: Module) -> set[str]:
    """Return the trainable parameters of a model that is frozen for the most part, such as adapters: they do not wait.

    Some models freeze a table of positions and nothing else, which makes the rest no adapters.
    """
    frozen, trained = (
        sum(each.nbytes for each in model.parameters() if each.requires_grad is is_trained)
        for is_trained in (False, True)
    )
    if trained > frozen:
        return set()
    return {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}


def places_of_tensors(model: Module, device_map: DeviceMap) -> dict[str, Any]:
    """Return the place of each tensor by name, those of tied ones alike: the fastest, and the first of these.

    All tensors of a module that has a tied one go along, or its forward would find them apart.
    """
    tensors = dict(every_tensor(model))
    places = {name: device_key(place_of(name, device_map)) for name in tensors}
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    for tied in names.values():
        if len({places[name] for name in tied}) > 1:
            best = min((places[name] for name in tied), key=_speed)
            for name in tied:
                owner = name.rpartition(".")[0]
                places |= {other: best for other in tensors if other.rpartition(".")[0] == owner}
    return places


def _speed(place: Any) -> int:
    return {HOST: 1, DISK: 2}.get(place, 0)


def _put(owner: Module, leaf: str, tensor: Tensor) -> None:
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[leaf] = tensor


# -- devices


def as_device(place: Any) -> torch.device:
    """Return the device of a place; the number of an accelerator is that of the kind which the machine has."""
    if not isinstance(place, int):
        return torch.device(place)
    return torch.device("xpu" if torch.xpu.is_available() else "cuda", place)


def main_device_of(device_map: DeviceMap, chosen: Any) -> torch.device:
    """Return where what is offloaded computes; check that the machine has all devices of the map."""
    places = [device_key(place) for place in device_map.values()]
    main = device_key(chosen) if chosen is not None else next((place for place in places if _speed(place) == 0), HOST)
    if main == DISK:
        raise ValueError("main_device is where parts compute: a device or 'cpu', not 'disk'")
    there = torch.xpu.device_count() if torch.xpu.is_available() else torch.cuda.device_count()
    missing = sorted({place for place in (*places, main) if isinstance(place, int) and not 0 <= place < there})
    if missing:
        raise NoSuchDevice(
            f"device_map names device {listed([str(number) for number in missing])}, and this machine has "
            f"{f'devices 0 to {there - 1}' if there > 1 else 'device 0 alone' if there else 'no GPU'}: change the "
            "map, or let infer_auto_device_map(model) make one for the devices that are here"
        )
    return as_device(main)


def _first_device(model: Module) -> torch.device:
    first = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
    return torch.device("cpu") if first is None else first.device


def _refuse_dispatched(model: Module) -> None:
    for part in model.modules():
        if _MARK in vars(part) or _is_placed_by_others(part):
            by = "already" if _MARK in vars(part) else "by transformers or Accelerate already"
            raise ValueError(
                f"{type(part).__name__} was dispatched {by}, and its weights are where its hooks expect them: call "
                "remove_hook_from_submodules(model) first, of the package that dispatched it, or load it again"
            )


def _is_placed_by_others(part: Module) -> bool:
    """Return whether a hook of Accelerate's kind brings the weights of `part`: one that has a device."""
    hook = vars(part).get("_hf_hook")
    return hasattr(hook, "execution_device") or hasattr(hook, "hooks")


def _places(part: Module) -> set[str]:
    mapped = vars(part).get("hf_device_map")
    return {str(place) for place in mapped.values()} if isinstance(mapped, dict) else set()
