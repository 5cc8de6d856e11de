"""Decide which part of a model goes to which device: `infer_auto_device_map`. Runs anywhere; touches no device.

A plan follows from sizes alone (`plan`), so it can be made for machines that are not there. Parts are placed in the
order in which the model has them, each on the first device that has room: accelerators, then "cpu", then "disk". What
is placed on the last two computes on the first accelerator (on the CPU without one), where room for two of the largest
such part is kept: the one that computes, and the next one, which is fetched meanwhile. If everything fits on devices,
nothing is kept. Parts that share a tensor go to one place.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, MultiheadAttention, Sequential
from torch.nn.utils.parametrize import is_parametrized

from nbaccel.base.quantities import gigabytes, listed
from nbaccel.base.values import frozen
from nbaccel.features.big_models.module_sizes import convert_file_size_to_int, dtype_of, every_tensor, nbytes_as
from nbaccel.train.distributed.callers import warn_user

__all__ = [
    "Device",
    "DeviceMap",
    "Part",
    "Wholes",
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "device_key",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "named_parts",
    "place_of",
    "plan",
]

Device = int | str
DeviceMap = Mapping[str, Any]
"""Names of modules, or of tensors, and the place of each: an int, a device, its name, "cpu" or "disk"."""

HOST, DISK = "cpu", "disk"
_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_SHARE_FOR_ACTIVATIONS = 0.1
_LEAST_FOR_ACTIVATIONS = 1 << 30
_CONTEXT_BYTES = 600 << 20
"""What a CUDA context takes on a recent card, if this process has none there yet."""

_AHEAD = 2  # the part that computes, and the one that is fetched meanwhile
_HALVINGS = 40


@frozen
class Part:
    """A module that stays whole, or one tensor of a module that does not.

    Args:
        tensors: The bytes of each tensor by its identity.
        buffer_bytes: The buffers among them.
    """

    name: str
    tensors: Mapping[int, int]
    buffer_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.tensors.values())


@frozen
class Wholes:
    """The modules of a model that are never divided.

    Args:
        names: Classes that stay whole.
        members: So do the members of lists (`ModuleList`, `Sequential`), the blocks of most models.
        most: With `members`, they may be divided where they are larger than this.
    """

    names: Collection[str] = ()
    members: bool = False
    most: float = float("inf")

    @classmethod
    def of(cls, model: Module, names: Any = None, most: float = float("inf")) -> Wholes:
        """Return the choice for `model`: `names` if there are any, else those that transformers' models carry.

        Args:
            names: A class's name or several, in any collection; classes count by their names.
        """
        given = [names] if isinstance(names, str | type) else [*(names or ())]
        chosen = {name if isinstance(name, str) else name.__name__ for name in given}
        own = {str(name) for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
        found = chosen or own
        return cls(found, members=not found, most=most)

    def keeps(self, module: Module, parent: Module | None, nbytes: int) -> bool:
        """Return whether `module`, of this size and inside of `parent`, stays whole."""
        if type(module).__name__ in self.names or isinstance(module, MultiheadAttention) or is_parametrized(module):
            return True  # they read the weights of modules below them, whose forwards do not run or only give weights
        is_member = isinstance(parent, _CONTAINERS) and not isinstance(module, _CONTAINERS)
        return self.members and is_member and nbytes <= self.most


def named_parts(model: Module, wholes: Wholes) -> Iterator[tuple[str, Module | Tensor]]:
    """Yield the parts of `model` in its order: undivided modules, and tensors of the modules that are divided.

    The tensors of a module come before the modules below it. Together they have all tensors of the model.
    """
    yield from _parts_below("", model, None, wholes)


def _parts_below(
    name: str, module: Module, parent: Module | None, wholes: Wholes
) -> Iterator[tuple[str, Module | Tensor]]:
    below = [(child, part) for child, part in module._modules.items() if part is not None]
    nbytes = sum(tensor.nbytes for _, tensor in every_tensor(module))
    if name and (not below or wholes.keeps(module, parent, nbytes)):
        yield name, module
        return
    prefix = f"{name}." if name else ""
    for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield f"{prefix}{leaf}", tensor
    for child, part in below:
        yield from _parts_below(f"{prefix}{child}", part, module, wholes)


def plan(
    parts: Sequence[Part], limits: Mapping[Device, float], keeps_buffers: bool = True
) -> tuple[dict[str, Device], int]:
    """Return the place of each part, and the bytes that are kept on the first device for parts that are fetched.

    Args:
        limits: Bytes for each device, the preferred first; "cpu" and "disk" hold what is fetched.
        keeps_buffers: Buffers of such parts stay where the part computes.

    Raises:
        ValueError: A part finds no place.
    """
    groups = list(_tied(parts))
    fast = {device: limit for device, limit in limits.items() if device not in (HOST, DISK)}
    computing = fast or {device: limit for device, limit in limits.items() if device == HOST}
    if (placed := _fill(groups, computing)) is not None:
        return placed, 0
    main = next(iter(computing), None)

    def filled(kept: int) -> dict[str, Device] | None:
        return _fill(groups, limits if main is None else {**limits, main: max(0, limits[main] - kept)})

    kept = _AHEAD * max(part.nbytes for part in parts) + sum(part.buffer_bytes for part in parts)
    placed = filled(kept)
    if placed is None:
        size, allowed = sum(part.nbytes for part in parts), sum(limits.values())
        raise ValueError(
            f"the model has {gigabytes(size)}, and max_memory gives it {gigabytes(allowed)} on "
            f"{listed([str(device) for device in limits])}, of which the part that computes and the next one take "
            f"{gigabytes(kept)}: allow more, or leave 'disk' without a limit"
        )
    needed = _kept_for(parts, placed, computing, keeps_buffers)
    tighter = filled(needed)  # the largest part may be where it computes, and needs no room beside it then
    if tighter is not None and _kept_for(parts, tighter, computing, keeps_buffers) <= needed:
        return tighter, needed
    return placed, needed


def _kept_for(
    parts: Sequence[Part], placed: Mapping[str, Device], computing: Collection[Device], keeps_buffers: bool
) -> int:
    """Return the bytes that parts which are not where they compute take there while they do."""
    away = [part for part in parts if placed[part.name] not in computing]
    buffers = sum(part.buffer_bytes for part in away) if keeps_buffers else 0
    return _AHEAD * max((part.nbytes for part in away), default=0) + buffers


def _fill(groups: Iterable[Sequence[Part]], limits: Mapping[Device, float]) -> dict[str, Device] | None:
    """Return the place of each part; None if one finds none.

    A device that is full for one group takes none of the later ones, so that a forward goes over the devices once. A
    group that could not be there even alone closes no device.
    """
    left, closed = dict(limits), 0
    devices = list(limits)
    placed: dict[str, Device] = {}
    for group in groups:
        size = sum({key: nbytes for part in group for key, nbytes in part.tensors.items()}.values())
        at = closed
        while at < len(devices) and size > left[devices[at]]:
            if at == closed and size <= limits[devices[at]]:
                closed += 1
            at += 1
        if at == len(devices):
            return None
        left[devices[at]] -= size
        placed |= {part.name: devices[at] for part in group}
    return placed


def _tied(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts, those that share tensors together, at the place of the first of them."""
    leader: dict[int, int] = {}
    group_of = list(range(len(parts)))
    for number, part in enumerate(parts):
        together = {_leader(group_of, leader[key]) for key in part.tensors if key in leader} | {number}
        first = min(together)
        for other in together:
            group_of[other] = first
        leader |= dict.fromkeys(part.tensors, first)
    groups: dict[int, list[Part]] = defaultdict(list)
    for number, part in enumerate(parts):
        groups[_leader(group_of, number)].append(part)
    yield from groups.values()


def _leader(group_of: Sequence[int], number: int) -> int:
    while group_of[number] != number:
        number = group_of[number]
    return number


def infer_auto_device_map(
    model: Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    reserve: int | str | Mapping[Any, int | str] | None = None,
) -> dict[str, Device]:
    """Return a device map for `model`, in the form that `dispatch_model` takes.

    Args:
        model: The model, which may be on the meta device.
        max_memory: For each device that may be used, bytes or a text such as "10GiB". Devices are numbers, names
            ("cuda:1", "cpu", "disk") or `torch.device`. By default what is free, see `get_max_memory`. "disk" has no
            limit by default.
        no_split_module_classes: Classes, or names of classes, that stay whole; one or several. By default those that a
            model of transformers names, else the members of its lists.
        dtype: The type as which weights will be loaded.
        special_dtypes: The same for single tensors, by name.
        verbose, fallback_allocation: Accepted as by Accelerate, without effect: a part that is too large for a device
            does not end the use of that device.
        clean_result: Name a module instead of all modules below it, where these have one place.
        offload_buffers: Buffers are fetched with the weights, and otherwise take no room.
        reserve: Bytes, or a text, that stay free on each accelerator for activations and caches; or a mapping by
            device.

    Raises:
        ValueError: A size or a device cannot be read, or a part finds no place.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
        >>> infer_auto_device_map(model, max_memory={0: 440, 1: "1KB"})
        {'0': 0, '1': 1}
    """
    limits = _limits(get_max_memory(max_memory), reserve)
    fast = [limit for device, limit in limits.items() if device not in (HOST, DISK)] or [limits.get(HOST, 0)]
    parts = _sized(model, Wholes.of(model, no_split_module_classes, max(fast)), dtype, special_dtypes)
    placed, kept = plan(parts, limits, not offload_buffers) if parts else ({}, 0)
    main = next(iter(limits))
    if kept > limits[main] and main != DISK:
        away = [part for part in parts if placed[part.name] in (DISK, HOST if main != HOST else DISK)]
        largest = max(away, key=lambda part: part.nbytes)
        warn_user(
            f"{largest.name} takes {gigabytes(largest.nbytes)}, so while it computes on {main} and the next part is "
            f"fetched, {gigabytes(kept)} are there, and {gigabytes(limits[main])} may be used: let it be divided "
            "(fewer no_split_module_classes), or load it in a smaller dtype."
        )
    return dict(clean_device_map(placed)) if clean_result else placed


def _sized(
    model: Module,
    wholes: Wholes,
    dtype: str | torch.dtype | None,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
) -> list[Part]:
    """Return the parts of `model` with their bytes as these types."""
    general, special = dtype_of(dtype), {name: dtype_of(kind) for name, kind in (special_dtypes or {}).items()}
    found = []
    for name, part in named_parts(model, wholes):
        below = [("", part)] if isinstance(part, Tensor) else every_tensor(part)
        buffers = {id(buffer) for buffer in part.buffers()} if isinstance(part, Module) else set()
        sizes = {}
        for leaf, tensor in below:
            full = f"{name}.{leaf}" if leaf else name
            sizes[id(tensor)] = nbytes_as(tensor, special.get(full, general))
        found.append(Part(name, sizes, sum(sizes[key] for key in buffers)))
    return found


def get_balanced_memory(
    model: Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
    reserve: int | str | Mapping[Any, int | str] | None = None,
) -> dict[Device, int]:
    """Return `max_memory` reduced so that `infer_auto_device_map` gives each accelerator about as much.

    It is the least limit per accelerator with which the model is still on accelerators alone; where it is not, they
    are filled, and `max_memory` is returned as it is. Arguments as for `infer_auto_device_map`.

    Args:
        low_zero: Put on device 0 only what finds no place on the others.
    """
    limits = _limits(get_max_memory(max_memory), reserve)
    fast = {device: limit for device, limit in limits.items() if device not in (HOST, DISK)}
    rest = {device: limit for device, limit in limits.items() if device not in fast}
    parts = _sized(
        model, Wholes.of(model, no_split_module_classes, max(fast.values(), default=0)), dtype, special_dtypes
    )
    groups = list(_tied(parts))
    balanced = fast
    first = next(iter(fast), None)
    if low_zero and len(fast) > 1 and first is not None:
        others = {device: limit for device, limit in fast.items() if device != first}
        if _fill(groups, others) is not None:
            balanced = {first: 0, **_least(groups, others)}
        elif _fill(groups, fast) is not None:
            balanced = {first: _least(groups, fast, only=first)[first], **others}
    elif len(fast) > 1 and _fill(groups, fast) is not None:
        balanced = _least(groups, fast)
    return {**balanced, **rest}


def _least(
    groups: Sequence[Sequence[Part]], limits: Mapping[Device, int], only: Device | None = None
) -> dict[Device, int]:
    """Return the least equal limits, or the least limit of one device, with which everything finds a place there."""
    low, high = 0, max(limits.values())

    def capped(cap: int) -> dict[Device, int]:
        return {device: min(cap, limit) if only in (None, device) else limit for device, limit in limits.items()}

    for _ in range(_HALVINGS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(groups, capped(middle)) is not None else (middle, high)
    return capped(high)


# -- devices and their memory


def device_key(device: Any) -> Device:
    """Return a device as maps name it: the number of a CUDA device, or the name of another one.

    Raises:
        ValueError: It is none.

    Example:
        >>> device_key("cuda:1"), device_key(torch.device("cuda")), device_key("3"), device_key("disk")
        (1, 0, 3, 'disk')
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str) and device.isdecimal():
        return int(device)
    if device == DISK:
        return DISK
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{device!r} is no device: a device is a number, a name such as 'cuda:0', 'cpu', or 'disk'"
        ) from None
    return (known.index or 0) if known.type == "cuda" else HOST if known.type == HOST else str(known)


def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Device, int]:
    """Return the bytes that a model may take on each device, accelerators first, in their order.

    Args:
        max_memory: Bytes or text by device, which is only read and ordered then. Without it, what is free: on each GPU
            less the room for a context and for activations (a tenth, and at least 1 GiB), and on the host. The GPUs are
            asked by their driver, so no context is made.

    Example:
        >>> get_max_memory({"cpu": "1GB", 1: "10GiB", 0: 500})
        {0: 500, 1: 10737418240, 'cpu': 1000000000}
    """
    if max_memory is None:
        return _free_memory()
    given = {device_key(device): convert_file_size_to_int(size) for device, size in max_memory.items()}
    numbers = sorted(device for device in given if isinstance(device, int))
    others = [device for device in given if not isinstance(device, int) and device not in (HOST, DISK)]
    order: list[Device] = [*numbers, *others, *(device for device in (HOST, DISK) if device in given)]
    return {device: given[device] for device in order}


def _free_memory() -> dict[Device, int]:
    from nbaccel.base.hardware import Survey  # tens of milliseconds if there are GPUs

    survey = Survey.take()
    found: dict[Device, int] = {}
    for gpu in survey.gpus:
        mine = any(pid == os.getpid() for pid, _ in gpu.processes)
        free = gpu.free_bytes - (0 if mine else _CONTEXT_BYTES) + _unused_on(gpu.index)
        found[gpu.index] = max(0, free - max(int(_SHARE_FOR_ACTIVATIONS * gpu.total_bytes), _LEAST_FOR_ACTIVATIONS))
    if torch.backends.mps.is_available():
        return {"mps": survey.ram.available_bytes}
    return {**found, HOST: survey.ram.available_bytes}


def _unused_on(index: int) -> int:
    """Return what torch's allocator keeps on this device for later tensors of this process."""
    if "torch.cuda" not in sys.modules or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def _limits(max_memory: Mapping[Device, int], reserve: Any) -> dict[Device, int]:
    """Return `max_memory` less what is reserved, and with the disk."""
    limits = dict(max_memory)
    fast = [device for device in limits if device not in (HOST, DISK)]
    kept: dict[Device, int] = {}
    if isinstance(reserve, Mapping):
        for device, size in reserve.items():
            kept[device_key(device)] = convert_file_size_to_int(size)
    elif reserve is not None:
        kept = dict.fromkeys(fast, convert_file_size_to_int(reserve))
    if unknown := [str(device) for device in kept if device not in limits]:
        raise ValueError(f"reserve names {listed(unknown)}, of which max_memory says nothing")
    for key, nbytes in kept.items():
        limits[key] = max(0, limits[key] - nbytes)
    limits.setdefault(DISK, sys.maxsize)
    return limits


# -- maps


def place_of(name: str, device_map: DeviceMap) -> Any:
    """Return the place of the tensor or module of this name: its own, or that of the nearest module above."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def check_device_map(model: Module, device_map: DeviceMap) -> None:
    """Check that `device_map` has a place for every tensor of `model`; warn of names that the model does not have.

    Raises:
        ValueError: Tensors without a place, or places that are none.
    """
    for place in device_map.values():
        device_key(place)
    known = {name for name, _ in model.named_modules()} | {name for name, _ in every_tensor(model)}
    if unknown := [name for name in device_map if name not in known]:
        warn_user(f"device_map names {listed(unknown)}, which {type(model).__name__} does not have; left out.")
    unplaced = [name for name, _ in every_tensor(model) if place_of(name, device_map) is None]
    if unplaced:
        raise ValueError(
            f"device_map has no place for {listed(unplaced, 3)} of {type(model).__name__}: name them, or the modules "
            "above them, or begin with {'': 'cpu'} for everything else"
        )


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: DeviceMap) -> None:
    """Warn of tensors that are one and have several places in `device_map`; `dispatch_model` takes the fastest.

    Args:
        tied_params: The names of each such tensor, as `find_tied_parameters` returns them.
    """
    for names in tied_params:
        places = {name: place_of(name, device_map) for name in names}
        if len(set(places.values())) > 1:
            told = [f"{name} on {place}" for name, place in places.items()]
            warn_user(f"tied parameters are in several places, {listed(told)}: give their modules one place")


def clean_device_map(device_map: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Return `device_map` with a module's name for those of all the modules below it, where these have one place.

    Example:
        >>> clean_device_map({"a.0": 0, "a.1": 0, "b": 1})
        {'a': 0, 'b': 1}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = {name: place for name, place in device_map.items() if name == module_name or name.startswith(prefix)}
    if len(inside) > 1 and len(set(inside.values())) == 1:
        place = next(iter(inside.values()))
        return _replaced(device_map, inside, {module_name: place})
    children = dict.fromkeys(
        prefix + name.removeprefix(prefix).partition(".")[0] for name in inside if name != module_name
    )
    cleaned = dict(device_map)
    for child in children:
        if child != module_name:
            cleaned = clean_device_map(cleaned, child)
    return cleaned


def _replaced(whole: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `whole` with `new` at the place of the first of `old`."""
    result: dict[str, Any] = {}
    for name, place in whole.items():
        if name not in old:
            result[name] = place
        elif new.keys() - result.keys():
            result |= new
    return result
