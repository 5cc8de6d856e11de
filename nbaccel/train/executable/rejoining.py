"""Rejoining: gives a DDP module whose process group has ended a reducer in the new one. Runs in ranks, by every rank.

It happens at the module's next forward, not at once: there the ranks come in the program's own order, however many
such modules there are. Nothing is added to the forward of any other module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from nbaccel.errors import PeerFailed
from nbaccel.train.talk.nested import map_children
from nbaccel.train.talk.objects import pack, unpack

__all__ = ["rejoin_at_next_forward"]


def rejoin_at_next_forward(module: DistributedDataParallel, source: int = 0) -> None:
    """Let `module` join the default group of that time at its next forward. Collective there.

    The weights and buffers of rank `source` are used then, and its optimizers' state: a rank may have taken one step
    more than the others before the group was lost.
    """
    # It is waiting already, for a rank that has what others may have in part, or the program replaced its forward for
    # reasons of its own.
    if "forward" in vars(module):
        return

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        # Every rank comes here once, at its first forward, so this is also sound within forward_backward, which
        # refuses collectives of a loss function because a rank may repeat that alone.
        with _disable_current_modes():
            _rejoin(module, source)
        del module.forward  # the class's own is used again; not before, since after an error the weights are not equal
        return module.forward(*inputs, **kwargs)

    vars(module)["forward"] = forward


def _rejoin(module: DistributedDataParallel, source: int) -> None:
    if "reducer" in vars(module):  # otherwise its gradients are lent, and it makes one when they are returned
        _make_reducer(module)
    for tensor in [*module.module.parameters(), *module.module.buffers()]:
        _share(tensor.detach(), source)
    for optimizer in _agreed_optimizers(module):
        _share_state(optimizer, source)
    _meet()


def _share(tensor: Tensor, source: int) -> None:
    """Copy the numbers of rank `source`. Collective, also for a tensor that is not contiguous, which NCCL refuses."""
    whole = tensor.contiguous()
    if whole.numel():
        dist.broadcast(_bytes_of(whole), source)
    if whole is not tensor:
        tensor.copy_(whole)


def _meet() -> None:
    """Wait until all ranks are here: if one of them failed, none has rejoined, and all repeat it. Collective."""
    dist.all_gather_object([None] * dist.get_world_size(), None)


def _agreed_optimizers(module: DistributedDataParallel) -> list[Optimizer]:
    """Return the optimizers whose states are sent, the same on all ranks. Collective.

    Raises:
            PeerFailed: they differ between ranks; raised on all ranks.
    """
    optimizers = _optimizers_of(module)
    everyones = _announced(optimizers)
    if any(each != everyones[0] for each in everyones):
        del optimizers
        gc.collect()  # on some ranks the first search also finds unreferenced ones
        optimizers = _optimizers_of(module)
        everyones = _announced(optimizers)
    if any(each != everyones[0] for each in everyones):
        rank, model = dist.get_rank(), type(module.module).__name__
        sides = "\n".join(f"  rank {number}: {'; '.join(each) or 'none'}" for number, each in enumerate(everyones))
        raise PeerFailed(
            f"rank {rank} of {len(everyones)} cannot go on with its {model}: the ranks do not have the same optimizers "
            f"of its parameters, whose states they would take from one of them.\n{sides}\n  Make them on every rank, "
            "beside the model."
        )
    return optimizers


def _announced(optimizers: list[Optimizer]) -> list[Any]:
    """Return what each rank has, in words. Collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, _described(optimizers))
    return everyones


def _described(optimizers: list[Optimizer]) -> list[str]:
    found = [getattr(each, "optimizer", each) for each in optimizers]  # of ours, the program's
    sizes = [", ".join(str(len(group["params"])) for group in each.param_groups) for each in found]
    return [f"{type(each).__name__} of {size} parameters" for each, size in zip(found, sizes, strict=True)]


def _share_state(optimizer: Optimizer, source: int) -> None:
    """Load the state of rank `source`, each tensor on the device of this rank's parameter. Collective.

    Tensors are sent one by one, outside of a pickle. In a pickle they would be on `source`'s GPU in every rank, and all
    at once, when memory has just run out.
    """
    state = optimizer.state_dict()
    places = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    if dist.get_rank() == source:
        parts: list[Tensor] = []
        outline = _map_state(partial(_outline, parts), state, places)
        dist.broadcast_object_list([pack(outline)], source)
        for part in parts:
            dist.broadcast(_bytes_of(part), source)
    else:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, source)
        state = {}
        optimizer.state.clear()  # frees memory for the received state
        state = _map_state(partial(_receive, source), unpack(received[0], places[0]), places)
    optimizer.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class _Outline:
    """A placeholder for a tensor that is sent separately: the memory to receive it in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _map_state(
    function: Callable[[torch.device, Any], Any], state: dict[str, Any], places: list[torch.device]
) -> dict[str, Any]:
    """Return a state dict with `function` applied to its values, given the device of the parameter of each."""

    def mapped(name: str, value: Any) -> Any:
        if name != "state" or not isinstance(value, dict):
            return function(places[0], value)
        of = dict(enumerate(places))
        return {key: function(of.get(key, places[0]), entry) for key, entry in value.items()}

    return {name: mapped(name, value) for name, value in state.items()}


def _outline(parts: list[Tensor], device: torch.device, value: Any) -> Any:
    """Return `value` with placeholders for its tensors on `device`, which are added to `parts`, in dense memory.

    Single numbers stay, and so do values that are more than a tensor: they are sent by way of the host.
    """
    if not isinstance(value, Tensor):
        return map_children(partial(_outline, parts, device), value)
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
        return value
    if value.device != device or not (value.ndim and value.numel()):
        return value
    part = value.detach()
    if part.stride() != torch.empty_like(part, device="meta").stride():  # has gaps
        part = torch.empty_like(part).copy_(part)
    parts.append(part)
    return _Outline(tuple(part.shape), part.stride(), part.dtype)


def _receive(source: int, device: torch.device, value: Any) -> Any:
    """Return `value` with tensors of rank `source` on `device` in place of the placeholders. Collective for each."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, _Outline):
        return map_children(partial(_receive, source, device), value)
    part = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    dist.broadcast(_bytes_of(part), source)
    return part


def _bytes_of(part: Tensor) -> Tensor:
    """Return the memory of a dense tensor, so that the backend need not know its type and layout."""
    return part.as_strided((part.numel(),), (1,)).view(torch.uint8)


def _make_reducer(module: DistributedDataParallel) -> None:
    """Make a reducer in the default group, in the way in which torch does it for a module that was pickled."""
    hooks = list(getattr(module, "_comm_hooks", ()))
    module.process_group = dist.group.WORLD  # type: ignore[assignment]  # it exists: the ranks have formed it again
    state = module.__getstate__()
    del module.reducer, module.logger
    module.__setstate__(state)
    for hook, hook_state in hooks:
        dist._register_comm_hook(module.reducer, hook_state, hook)


def _optimizers_of(module: DistributedDataParallel) -> list[Optimizer]:
    """Return the optimizers of the module's parameters, in the order of the parameters of each.

    Those without a state are included, since on another rank they may have taken a first step. One of ours represents
    the program's own, with the same state, where that was made before the rank was forked.
    """
    order = {id(parameter): number for number, parameter in enumerate(module.module.parameters())}
    found = [
        (sorted(numbers), type(thing).__name__, thing)
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        if (
            numbers := [
                order[id(p)] for group in getattr(thing, "param_groups", ()) for p in group["params"] if id(p) in order
            ]
        )
    ]
    found.sort(key=lambda row: row[:2])
    return [*{id(optimizer.state): optimizer for *_, optimizer in found}.values()]
