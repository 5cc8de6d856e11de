"""Abandon a step of a sharded model that did not end, and move its shards to another process group. Runs in ranks.

A rank that runs out of memory does so between two gathers, and its peers wait in the next one. Once they are woken,
each rank abandons the step (`abandon`), and the shards go on in process groups that were formed again
(`move_to_groups`). torch 2.13 has the first half, but leaves gradients of gathered parameters behind, which the next
step would add; for an older one it is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.torch_version import TorchVersion

__all__ = ["abandon", "groups_of", "move_to_groups", "why_not"]

_OLDEST = "2.10"
"""The oldest torch whose private names are those that are used here."""


def why_not(models: Sequence[Module], description: str) -> str:
    """Return the reason why a step of `models` cannot be abandoned; empty if it can.

    Args:
        description: The description of the process group in which their steps have to communicate.
    """
    from torch.distributed.fsdp import FSDPModule

    for model in models:
        if not isinstance(model, FSDPModule):
            return f"{type(model).__name__} is not sharded by fully_shard (FSDP2)"
        if TorchVersion(torch.__version__.partition("+")[0]) < _OLDEST:
            return f"torch {torch.__version__} cannot abandon a step of a sharded model; torch {_OLDEST} can"
        for group in groups_of(model):
            own = getattr(group.mesh_info, "shard_process_group", None)
            if getattr(own, "group_desc", "") != description or group.mesh_info.mesh.ndim != 1:
                return f"{type(model).__name__} was sharded by the program itself, in process groups of its own"
    return ""


def abandon(model: Any) -> None:
    """Drop gathered parameters, gradients that were not exchanged, and the place in the step. No collective.

    ``parameter.grad`` of the shards stays: the caller knows which batches it has. Waits for the device, whose
    communication was aborted.
    """
    for group in groups_of(model):
        group._all_gather_result = None  # torch would wait for it, and it has failed
        if group.device.type != "cpu":
            torch.get_device_module(group.device).synchronize(group.device)
    state = model._get_fsdp_state()
    if state._is_root is not None:  # there was a forward
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
        else:
            _reset(state)
    for group in groups_of(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            gathered = getattr(parameter, "_unsharded_param", None)  # none before the first forward
            if gathered is not None:
                gathered.grad = None


def move_to_groups(model: Module, steps: Any, reads: Any, only_mesh: Any = None) -> None:
    """Let the shards of `model` communicate in other process groups, of the same ranks in the same order.

    Args:
        steps: For forwards and backwards.
        reads: For operations of the program on parameters. Their mesh is changed in place, since each parameter,
            gradient and state of an optimizer refers to it.
        only_mesh: Leave shards of other meshes as they are: of blocks that the program has sharded by itself.
    """
    for group in groups_of(model):
        for info in {id(info): info for info in _infos(group)}.values():
            mesh = info.mesh
            if only_mesh is not None and mesh is not only_mesh:
                continue
            mesh._dim_group_names[:] = [reads.group_name]
            known = getattr(mesh, "_pg_registry", None)  # of torch 2.11 and later
            if known is not None:
                known.clear()
                known[reads.group_name] = reads
            info.shard_process_group = steps
            if getattr(info, "reduce_scatter_process_group", None) is not None:
                info.reduce_scatter_process_group = steps


def _reset(root: Any) -> None:
    """Bring torch's state of a sharded model back to that between two steps, as torch 2.13's `reset_iter_state` does.

    Args:
        root: torch's state of the outermost module.
    """
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_in(state):
            group._post_reduce_event = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def groups_of(model: Module) -> Iterator[Any]:
    """Yield torch's groups of the parameters of `model` that are gathered together."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_in(module._get_fsdp_state())


def _groups_in(state: Any) -> Iterator[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13 and later
    group = getattr(state, "_fsdp_param_group", None)
    yield from several if several is not None else [group] if group is not None else []


def _infos(group: Any) -> Iterator[Any]:
    for owner in (group, *group.fsdp_params):
        for name in ("mesh_info", "post_forward_mesh_info"):
            info = getattr(owner, name, None)
            if info is not None:
                yield info
