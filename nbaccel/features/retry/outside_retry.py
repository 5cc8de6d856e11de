"""Continue with objects that existed before a failed attempt or an aborted task. Runs in ranks and scripts.

An Accelerator made outside of the function refers to what was prepared inside, and so to the failed attempt's model; an
optimizer made outside may be left with half of its state; DDP modules made outside hold a process group that has ended.
`OutsideTheRetry` removes these traces, `rejoin_at_next_forward` gives a module a reducer in the new group, and `renew`
continues a training in persistent ranks whose group was aborted in the task before. The last two are collective.
Weights are not restored after a failed attempt: a model that must be new belongs into the function.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from nbaccel.base.aborting import DEVICE_BACKENDS, abort_device_groups
from nbaccel.base.values import frozen
from nbaccel.errors import PeerFailed
from nbaccel.features.retry.disconnect import backends
from nbaccel.train.distributed.collectives import pack, unpack
from nbaccel.train.distributed.nested import map_children
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.oom.memory.release import release_unused
from nbaccel.train.prepare.optimizer import PreparedOptimizer
from nbaccel.train.step.raw_loop_hooks import step_under_way
from nbaccel.train.strategies.single import is_sharded

__all__ = [
    "OutsideTheRetry",
    "rejoin_at_next_forward",
    "renew",
]


class OutsideTheRetry:
    """Objects that existed before the first attempt. Made then; read after each failed attempt. Holds none of them.

    Of objects that a notebook kernel made before it was forked it sees those that are prepared: the garbage collector
    shows no others there.
    """

    def __init__(self) -> None:
        self._own_groups = max(0, len(c10d._world.pg_map) - 1)
        self._prepared = [weakref.ref(thing) for thing in _prepared()]
        self._fresh = [weakref.ref(optimizer) for optimizer in _optimizers(_living()) if not optimizer.state]
        self._lifecycles = _references()
        self._replicas: list[weakref.ref[DistributedDataParallel]] = []
        self._sharded: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Note that an attempt begins: steps from now on belong to it."""
        self._places = weakref.WeakKeyDictionary({each: each.place for each in process_group.users})

    @property
    def step(self) -> int:
        """The training step that the attempt has reached, 0-based. Must be read before `clean_up`."""
        places = {each: each.place for each in process_group.users if each.is_bound}
        trained = [place[0] for each, place in places.items() if place != self._places.get(each)]
        return max(trained, default=step_under_way() or 0)

    @property
    def steps(self) -> list[int]:
        """Numbers of training steps of each Accelerator here; a failed attempt may have done more on some ranks.

        Must be read after `clean_up`, as must `scalings`, how each of them scales losses.
        """
        return [0 if each is None or not each.is_bound else each.steps_done for each in self._in_order]

    @property
    def scalings(self) -> list[dict[str, Any]]:
        return [{} if each is None else each.scaling for each in self._in_order]

    @property
    def _in_order(self) -> list[Any]:
        """The lifecycles of Accelerators, in the order in which they were made; None for one that is gone."""
        return [reference() for reference in self._lifecycles]

    @property
    def obstacle(self) -> str:
        """The reason why this process cannot have another attempt; empty if it can. Must be read after `clean_up`."""
        if not dist.is_initialized():
            return ""
        if self._own_groups:
            return (
                f"{self._own_groups} process group(s) were made outside of the function (new_group, a device mesh), "
                "and only the default one can be formed again; make them inside"
            )
        if foreign := backends() - {"gloo", *DEVICE_BACKENDS}:
            return f"the process group uses {', '.join(sorted(foreign))}, and only gloo and nccl can be interrupted"
        if self._sharded:
            return f"{', '.join(sorted(self._sharded))} was sharded (FSDP) outside of the function; shard it inside"
        return ""

    @property
    def has_replicas(self) -> bool:
        """True if DDP modules that were made outside of the function still exist. Must be read after `clean_up`."""
        return any(reference() is not None for reference in self._replicas)

    def clean_up(self) -> None:
        """Forget what was prepared, half accumulated and half stepped in the failed attempt; free its memory.

        Gradients are dropped, and the state of optimizers that had none before: a step that ran out of memory leaves
        state that lacks entries, which the next step would look up.
        """
        known = [thing for reference in self._prepared if (thing := reference()) is not None]
        for lifecycle in process_group.users:
            lifecycle.forget_all_but(known)
        del known
        release_unused()
        self._lifecycles = _references()
        living = _living()
        fresh = {id(optimizer) for reference in self._fresh if (optimizer := reference()) is not None}
        for optimizer in _optimizers(living):
            optimizer.zero_grad()
            if id(optimizer) in fresh:
                optimizer.state.clear()
            for parameter in _half_made(optimizer):
                del optimizer.state[parameter]
        self._replicas = [weakref.ref(thing) for thing in living if isinstance(thing, DistributedDataParallel)]
        self._sharded = {type(thing).__name__ for thing in living if is_sharded(thing)}

    def go_on(self, steps: Sequence[int], source: int = 0, scalings: Sequence[dict[str, Any]] = ()) -> None:
        """Begin the next attempt, in the new process group where there are several ranks.

        Args:
            steps: Training steps that each Accelerator counts from, equal on all ranks, so that a run that is stopped
                stops at the same one.
            source: The rank whose weights are used.
            scalings: Its loss scaling; empty to leave it unchanged.
        """
        for each, step, scaling in zip_longest(self._in_order, steps, scalings):
            if each is None:
                continue
            if scaling is not None:
                each.scale_like(scaling)
            if step is not None and each.is_bound:  # else the notebook trained with it before this rank was forked
                each.count_steps_from(step)
        for reference in self._replicas:
            if (module := reference()) is not None:
                rejoin_at_next_forward(module, source)


def _references() -> list[weakref.ref[Any]]:
    return [weakref.ref(lifecycle) for lifecycle in process_group.users]


def _prepared() -> list[Any]:
    return [thing for lifecycle in process_group.users for thing in lifecycle.everything_prepared]


def _living() -> list[Any]:
    """Return the optimizers, DDP and sharded modules of this process; one look at all objects, some 20 ms."""
    is_wanted: dict[type, bool] = {}
    found = {id(thing): thing for thing in _prepared()}
    for thing in gc.get_objects():
        kind = type(thing)  # a lazy object's __class__ may import its target
        if kind not in is_wanted:
            is_wanted[kind] = issubclass(kind, Optimizer | DistributedDataParallel) or is_sharded(thing)
        if is_wanted[kind]:
            found[id(thing)] = thing
    return [*found.values()]


def _optimizers(things: list[Any]) -> list[Optimizer]:
    """Return torch's own optimizers among `things`, also those that are prepared."""
    found = [thing.optimizer if isinstance(thing, PreparedOptimizer) else thing for thing in things]
    return [*{id(thing): thing for thing in found if isinstance(thing, Optimizer)}.values()]


def _half_made(optimizer: Optimizer) -> list[Any]:
    """Return the parameters whose state has only some of the entries that another one of its group has."""
    groups = [
        [(parameter, set(optimizer.state[parameter])) for parameter in group["params"] if parameter in optimizer.state]
        for group in optimizer.param_groups
    ]
    return [
        parameter for states in groups for parameter, entries in states if any(entries < others for _, others in states)
    ]


def rejoin_at_next_forward(module: DistributedDataParallel, source: int = 0) -> None:
    """Let `module` join the default group of that time at its next forward. Collective there.

    It happens at the module's next forward, not at once: there the ranks come in the program's own order, however many
    such modules there are. Nothing is added to the forward of any other module.

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
    tensors = [*module.module.named_parameters(), *module.module.named_buffers()]
    for tensor in [each for name, each in tensors if name not in module.parameters_to_ignore]:
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
        PeerFailed: They differ between ranks; raised on all ranks.
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


@frozen
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


_ABORT_S = 30.0


def renew(source: int, number: int) -> None:
    """Form the default group again, and continue what was prepared with the state of rank `source`. Collective.

    Persistent ranks may be anywhere in their program when one of them fails: with one step more than the others, with a
    scheduler that has moved, with half of a sum in their weights. One rank is known to be in the state after its last
    complete step. So all ranks copy from it what training needs: weights, buffers and optimizers at the next forward of
    each DDP module, and small values at once. Other data of the program (an average of weights, a list) stay each
    rank's.

    Args:
        number: A number that no renewal before had.

    Raises:
        PeerFailed: This rank's device does not release the old group, or what was made cannot join the new one.
    """
    if not abort_device_groups(_ABORT_S):
        raise PeerFailed(
            f"this rank's device did not let go of its old process group within {_ABORT_S:g} s: %accelerate restart "
            "starts other ranks"
        )
    outside = OutsideTheRetry()
    outside.clean_up()
    if outside.obstacle:
        raise PeerFailed(
            f"the ranks cannot go on after they were cut short: {outside.obstacle}. %accelerate restart begins anew"
        )
    place = process_group.meeting_place(f"renewal{number}")
    process_group.drop()
    process_group.renew(place.store)
    outside.go_on(_take_over(outside.steps, source), source)


def _take_over(steps: list[int], source: int) -> list[int]:
    """Copy small values from rank `source`; return how many training steps each of its Accelerators has done."""
    talk = process_group.talk
    if talk is None:  # a group of the program's own, and no Accelerator
        return steps
    trainings = [each.training() for each in process_group.users if each.everything_prepared and each.is_bound]
    counts = talk.announce("the ranks go on together", str(len(trainings)))
    if set(counts) - {"0", "1"} or len(set(counts)) > 1:
        raise PeerFailed(
            f"the ranks cannot go on after they were cut short: {', '.join(counts)} Accelerators have prepared "
            "something in them, by rank, and only one can be followed. %accelerate restart begins anew"
        )
    states: list[Any] = [steps, *map(_state, trainings)]
    talk.broadcast_objects(states, source)
    for training, state in zip(trainings, states[1:], strict=True):
        _restore(training, state)
    taken: list[int] = states[0]
    return taken


def _state(training: Any) -> dict[str, Any]:
    prepared = training.prepared
    return {
        "groups": [[_without_parameters(group) for group in each.param_groups] for each in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "precision": training.precision.state_dict(),
        "epochs": [loader.iteration for loader in prepared.loaders],
    }


def _restore(training: Any, state: dict[str, Any]) -> None:
    prepared = training.prepared
    for optimizer, groups in zip(prepared.optimizers, state["groups"], strict=True):
        for own, theirs in zip(optimizer.param_groups, groups, strict=True):
            own.update(theirs)
    for scheduler, theirs in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(theirs)
    if state["precision"]:
        training.precision.load_state_dict(state["precision"])
    for loader, epoch in zip(prepared.loaders, state["epochs"], strict=True):
        loader.iteration = epoch


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
