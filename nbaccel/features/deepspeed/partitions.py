"""Partitions of an engine as whole tensors: read, written, and dissolved into a plain model. Runs in ranks.

A rank of ZeRO has pieces of flat buffers. Checkpoints, state dicts and results have whole tensors, by the names of the
model, as with every other strategy: so they fit any number of ranks and any strategy, and nothing is pickled. One
tensor at a time is gathered. Values of trained parameters are those of the fp32 copies, of which half-precision weights
are made. Everything here is collective unless it says so.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from nbaccel.base.world import World

__all__ = [
    "complete_window",
    "dissolve",
    "gradient_norm",
    "gradients",
    "join_group",
    "keep_optimizer",
    "leave_group",
    "load_whole_model",
    "load_whole_optimizer",
    "scalars_sent",
    "step_in_place",
    "values_in_full",
    "whole_model",
    "whole_optimizer",
    "write_parts",
    "zero_gradients",
]

_PUT_THERE = frozenset(
    {"_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt"}
    | {"post_bwd_fn", "pre_bwd_fn"}
)
"""Attributes that stage 3 gives to every module, beside those that begin with "ds_"."""


class _OwnGroup:
    """The process group that was formed here for the engines of a process that is alone."""

    def __init__(self) -> None:
        self.group: Any = None  # kept after its end: gloo's destructor would wait for its threads, which are idle later
        self.engines = 0
        self.names_rank = False


_own_group = _OwnGroup()


def join_group(world: World) -> Any:
    """Let DeepSpeed use the process group that exists; a single process gets one of its own, without a port.

    Return that own group, which `leave_group` takes; None if the group is not ours.
    """
    import deepspeed
    from torch.distributed import HashStore, group, init_process_group, is_initialized

    if not is_initialized():
        init_process_group("gloo", store=HashStore(), rank=world.rank, world_size=world.world_size)
        _own_group.group, _own_group.engines = group.WORLD, 0
        _own_group.names_rank = "LOCAL_RANK" not in os.environ
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed reads it in its steps too
    own = group.WORLD if group.WORLD is _own_group.group else None
    _own_group.engines += own is not None
    # DeepSpeed would compile an exchange through shared memory; the group has one already.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"):  # of a process group before this one
        setattr(deepspeed.utils.groups, name, None)
    deepspeed.comm.comm.cdb = None
    deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
    return own


def leave_group(own: Any) -> None:
    """End the group that was formed here, with its last engine: ranks that are forked later would take it for theirs.

    Args:
        own: What `join_group` has returned.
    """
    from torch.distributed import destroy_process_group, group

    if own is None or own is not _own_group.group:
        return
    _own_group.engines -= 1
    if _own_group.engines:
        return
    if _own_group.names_rank:
        os.environ.pop("LOCAL_RANK", None)
    if group.WORLD is own:  # else the program has ended it
        destroy_process_group()


@contextmanager
def scalars_sent() -> Iterator[None]:
    """Let an engine that is made within send parameters without a dimension, too, from rank 0, which it fails to do."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    plain = DeepSpeedEngine._broadcast_model

    def broadcast_model(self: Any) -> None:
        scalars = [each for each in self.module.parameters() if each.dim() == 0]
        for each in scalars:
            each.data = each.data.view(1)
        try:
            plain(self)
        finally:
            for each in scalars:
                each.data = each.data.view(())

    DeepSpeedEngine._broadcast_model = broadcast_model
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = plain


# -- gradients


def gradients(engine: Any) -> list[Tensor]:
    """Return this rank's pieces of the gradients for the next step, multiplied by the loss scale. No collective."""
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        return [flat.grad for flat in optimizer.single_partition_of_fp32_groups if flat.grad is not None]
    if getattr(optimizer, "offload_optimizer", False):
        return [flat.grad for flat in optimizer.fp32_partitioned_groups_flat if flat.grad is not None]
    return [piece for pieces in optimizer.averaged_gradients.values() for piece in pieces or ()]


def zero_gradients(engine: Any) -> None:
    """Make zeros of all gradients that the engine has: of a step, and of a window that is not whole. No collective."""
    optimizer = engine.optimizer
    kept: list[Any] = [gradients(engine), *getattr(optimizer, "all_grad_tensors", {}).values()]  # stages 1 and 2
    kept.append(getattr(optimizer, "accumulated_grads_in_cpu", {}).values())  # the same with states on the host
    kept.append([getattr(optimizer, "grad_partitions_flat_buffer", None)])  # stage 3
    for piece in (piece for pieces in kept for piece in pieces or ()):
        if piece is not None:
            piece.zero_()


def complete_window(engine: Any) -> None:
    """Let the next step have the gradients of parameters that only earlier batches of its window used.

    With states on the host the engine copies those that the last backward computed. No collective.
    """
    if getattr(engine.optimizer, "cpu_offload", False) or getattr(engine.optimizer, "offload_optimizer", False):
        engine.optimizer.finalize_gradient_accumulation_boundary()


def gradient_norm(engine: Any, norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all gradients, without the loss scale: that of the norms of each rank's pieces."""
    from torch.distributed import all_gather, get_world_size

    pieces = gradients(engine)
    own = torch.nn.utils.get_total_norm(pieces, norm_type).float().to(device)
    norms = [torch.empty_like(own) for _ in range(get_world_size())]
    all_gather(norms, own)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) / engine.optimizer.loss_scale
    return norm


def keep_optimizer(engine: Any, optimizer: Optimizer) -> None:
    """Let the engine step the program's own optimizer where it has made another one: of Adagrad, with one group."""
    if engine.optimizer.optimizer is not optimizer:
        optimizer.state = engine.optimizer.optimizer.state
        engine.optimizer.optimizer = engine.basic_optimizer = optimizer
        engine.optimizer._link_all_hp_params()


def step_in_place(engine: Any) -> bool:
    """Let the engine step the weights of the model themselves, in place of copies of them, where both are alike.

    So what a program writes into weights holds, and a rank has one copy of its part less. Return whether it does.
    """
    zero = engine.optimizer
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False) or zero.dtype != torch.float32:
        return False
    if hasattr(zero, "single_partition_of_fp32_groups"):
        ranks = map(get_rank, zero.real_dp_process_group)
        parts = [group[rank] for group, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
        copies = zero.single_partition_of_fp32_groups
    else:
        parts, copies = zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat
    for copy, part in zip(copies, parts, strict=True):
        if part is None or copy.shape != part.shape or copy.device != part.device:
            return False
    for copy, part in zip(copies, parts, strict=True):
        copy.data = part.data
    if hasattr(zero, "single_partition_of_fp32_groups"):
        zero._link_all_hp_params()
    return True


# -- values that the engine only casts


def values_in_full(module: Module, half: torch.dtype | None) -> dict[str, Tensor]:
    """Return host copies, by name, of what an engine casts to `half` without an fp32 copy: what it does not train."""
    known: dict[int, Tensor] = {}
    kept: dict[str, Tensor] = {}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, value in chain(*named):
        if half is not None and value.is_floating_point() and value.dtype != half and not value.requires_grad:
            if id(value) not in known:
                known[id(value)] = value.detach().to("cpu", copy=True)
            kept[name] = known[id(value)]
    return kept


def _as_before(value: Tensor, kept: Tensor | None) -> Tensor:
    """Return a tensor in the type that it had: the value that was cast, unless it has changed since."""
    if kept is None or value.dtype == kept.dtype:
        return value
    if torch.equal(value.cpu(), kept.to(value.dtype)):
        return kept.to(value.device)
    return value.to(kept.dtype)


# -- whole states


def whole_model(engine: Any, in_full: Mapping[str, Tensor], keeps: bool) -> dict[str, Any]:
    """Return the state dict of the engine's model, on the host.

    Args:
        in_full: What `values_in_full` returned.
        keeps: False returns an empty dict: this rank only takes part.
    """
    known: dict[int, Any] = {}
    state: dict[str, Any] = OrderedDict()
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if id(value) not in known:
            whole = _whole(engine, value)
            if isinstance(whole, Tensor) and keeps:
                whole = _as_before(whole.detach().cpu(), in_full.get(name))
            known[id(value)] = whole
        if keeps:
            state[name] = known[id(value)]
    return state


def whole_optimizer(engine: Any, groups: Sequence[Sequence[Tensor]], keeps: bool) -> dict[str, Any]:
    """Return the state dict of the engine's optimizer, as the optimizer of the whole model would have it, on the host.

    Args:
        groups: The program's parameters, in the groups of its optimizer.
        keeps: False returns an empty dict: this rank only takes part.
    """
    states, packed, number = {}, [], 0
    _link_entries(engine)
    for group, parameters, settings in zip(
        range(len(groups)), groups, engine.basic_optimizer.param_groups, strict=True
    ):
        for index, parameter in enumerate(parameters, number):
            entries = _whole_entries(engine, group, parameter)
            if keeps and entries:
                states[index] = {name: _on_host(value) for name, value in entries.items()}
        rest = {name: value for name, value in settings.items() if name != "params"}
        packed.append({**rest, "params": list(range(number, number + len(parameters)))})
        number += len(parameters)
    return {"state": states, "param_groups": packed} if keeps else {}


def _whole(engine: Any, value: Any) -> Any:
    """Return a parameter or buffer whole, in fp32 if the engine trains it."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    if not isinstance(value, Parameter):
        return value
    if id(value) in engine.trained and (trained := safe_get_full_fp32_param(value)) is not None:
        return trained.view(getattr(value, "ds_shape", value.shape))
    with zero.GatheredParameters([value]) if hasattr(value, "ds_id") else nullcontext():
        return value.detach().clone()


def _whole_entries(engine: Any, group: int, parameter: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of one parameter, whole."""
    from deepspeed.utils import safe_get_full_optimizer_state

    entries: dict[str, Any] = {}
    for flat in _flats(engine, group)[:1]:
        for name, value in engine.basic_optimizer.state.get(flat, {}).items():
            if _is_partition(value, flat):
                whole = safe_get_full_optimizer_state(parameter, name) if id(parameter) in engine.trained else None
                if whole is None:  # nobody trains it
                    return {}
                value = whole.view(getattr(parameter, "ds_shape", parameter.shape))
            entries[name] = value.clone() if isinstance(value, Tensor) else value
    return entries


def _is_partition(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _flats(engine: Any, group: int) -> list[Tensor]:
    """Return this rank's flat fp32 buffers of one group of the optimizer: several with stage 3."""
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return [zero.single_partition_of_fp32_groups[group]]
    owners: Mapping[int, int] = zero.sub_group_to_group_id
    return [flat for number, flat in enumerate(zero.fp32_partitioned_groups_flat) if owners[number] == group]


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


# -- loading


def load_whole_model(engine: Any, in_full: dict[str, Tensor], state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state dict of whole tensors, equal on all ranks, into the engine's model and its fp32 copies.

    Args:
        in_full: What `values_in_full` returned; gets the new values.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    from deepspeed import zero

    present = engine.module.state_dict(keep_vars=True)
    names = {id(value): name for name, value in present.items() if name in state}
    state = {**state, **{name: state[names[id(value)]] for name, value in present.items() if id(value) in names}}
    _refuse_others(type(engine.module).__name__, present, state, strict)
    with torch.no_grad():
        for name, value in state.items():
            if (target := present.get(name)) is None:
                continue
            if name in in_full:
                in_full[name] = value.to("cpu", in_full[name].dtype, copy=True)
            whole = value.to(target.device)
            if hasattr(target, "ds_id"):
                with zero.GatheredParameters([target], modifier_rank=0):
                    target.data.copy_(whole)
            else:
                target.data.copy_(whole)
            if id(target) in engine.trained:
                _set_partition(target, whole, None)


def write_parts(parameters: Iterable[Tensor]) -> None:
    """Enter the present values of whole parameters into the fp32 copies that the engine steps. No collective."""
    with torch.no_grad():
        for parameter in parameters:
            _set_partition(parameter, parameter.detach().clone(), None)


def load_whole_optimizer(engine: Any, groups: Sequence[Sequence[Tensor]], state: Mapping[str, Any]) -> None:
    """Load a state dict as `whole_optimizer` returns it, equal on all ranks.

    Raises:
        ValueError: It has other groups.
    """
    optimizer, saved = engine.basic_optimizer, state["param_groups"]
    if [len(group["params"]) for group in saved] != list(map(len, groups)):
        raise ValueError(
            f"the checkpoint's optimizer has groups of {[len(group['params']) for group in saved]} parameters, and "
            f"this one of {list(map(len, groups))}"
        )
    for group, (parameters, theirs) in enumerate(zip(groups, saved, strict=True)):
        settings = {name: value for name, value in theirs.items() if name != "params"}
        optimizer.param_groups[group].update(settings)
        entries = {number: state["state"].get(number, {}) for number in theirs["params"]}
        _make_entries(engine, group, parameters, list(entries.values()))
        with torch.no_grad():
            for parameter, each in zip(parameters, entries.values(), strict=True):
                shape = getattr(parameter, "ds_shape", parameter.shape)
                for name, value in each.items():
                    if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                        _set_partition(parameter, value.to(engine.device), name)


def _link_entries(engine: Any) -> None:
    """Let parameters know their pieces of all entries: stages 1 and 2 look when only the first group has some."""
    zero = engine.optimizer
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _make_entries(engine: Any, group: int, parameters: Sequence[Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the flat buffers of a group the entries that `saved` has, partitions still as zeros."""
    optimizer = engine.basic_optimizer
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in parameters]
    known = [(each, shape) for each, shape in zip(saved, shapes, strict=True) if each]
    if not known:
        return
    each, shape = known[0]
    for flat in _flats(engine, group):
        entries = optimizer.state[flat]
        for name, value in each.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                if name not in entries:
                    entries[name] = torch.zeros_like(flat)
                entries[name].zero_()
            else:
                entries[name] = value.clone() if isinstance(value, Tensor) else value
    _link_entries(engine)


def _set_partition(parameter: Tensor, whole: Tensor, entry: str | None) -> None:
    """Write this rank's piece of the fp32 copy of a parameter, or of one entry of its optimizer's state."""
    from deepspeed import comm, utils

    if not hasattr(parameter, "ds_id"):
        if entry is None:
            utils.safe_set_full_fp32_param(parameter, whole.float())
        else:
            utils.safe_set_full_optimizer_state(parameter, whole, entry)
        return
    size = utils.safe_get_local_fp32_param(parameter).numel()  # the last rank's is filled up
    flat = whole.flatten()
    begin = min(size * comm.get_rank(), flat.numel())
    piece = flat[begin : begin + size]
    piece = torch.cat([piece, piece.new_zeros(size - piece.numel())])
    if entry is None:
        utils.safe_set_local_fp32_param(parameter, piece.float())
    else:
        utils.safe_set_local_optimizer_state(parameter, piece, entry)


def _refuse_others(kind: str, present: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    missing, more = [*present.keys() - state.keys()], [*state.keys() - present.keys()]
    shapes = [
        f"{name} has shape {tuple(state[name].shape)} there, and {tuple(getattr(value, 'ds_shape', value.shape))} here"
        for name, value in present.items()
        if name in state and tuple(state[name].shape) != tuple(getattr(value, "ds_shape", value.shape))
    ]
    wrong = [*shapes, *(f"{name} is missing" for name in sorted(missing) if strict)]
    wrong += [f"{name} is not in the model" for name in sorted(more) if strict]
    if wrong:
        raise RuntimeError(f"Error(s) in loading state_dict for {kind}: {'; '.join(wrong)}")


# -- the way back


def dissolve(
    engine: Any, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], in_full: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Make the engine's model a plain one again, with whole weights on every rank, and its optimizer one of those.

    Model, modules and optimizer stay the same objects. Return the new parameter of each old one, by its id.
    """
    module = engine.module
    _link_entries(engine)
    values = {
        id(parameter): _as_before(_whole(engine, parameter), in_full.get(name)).to(engine.device)
        for name, parameter in module.named_parameters()
    }
    buffers = {id(buffer): _as_before(buffer, in_full.get(name)) for name, buffer in module.named_buffers()}
    states = {
        id(parameter): _whole_entries(engine, group, parameter)
        for group, parameters in enumerate(groups)
        for parameter in parameters
    }
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.destroy()
    new: dict[int, Parameter] = {}
    for owner in module.modules():
        own = dict(owner._parameters)
        for name, parameter in own.items():
            if parameter is not None:
                if id(parameter) not in new:
                    new[id(parameter)] = Parameter(values.pop(id(parameter)), parameter.requires_grad)
                own[name] = new[id(parameter)]
        owner._parameters = own
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffers[id(buffer)]
        for name in [name for name in vars(owner) if name in _PUT_THERE or name.startswith("ds_")]:
            del vars(owner)[name]
    optimizer.state.clear()
    for settings, parameters in zip(optimizer.param_groups, groups, strict=True):
        settings["params"] = [new[id(parameter)] for parameter in parameters]
        for parameter in parameters:
            if states[id(parameter)]:
                optimizer.state[new[id(parameter)]] = states[id(parameter)]
    return dict(new)
