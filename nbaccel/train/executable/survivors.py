"""Survivors: objects that existed before a failed attempt, and the removal of its traces from them.

Runs in ranks and scripts. An Accelerator made outside of the function refers to what was prepared inside, and so to
the failed attempt's model; an optimizer made outside may be left with half of its state; DDP modules made outside hold
a process group that has ended. Weights are not restored: a model that must be new belongs into the function.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbaccel.aborting import DEVICE_BACKENDS
from nbaccel.train.executable.rejoining import rejoin_at_next_forward
from nbaccel.train.executable.watcher import backends
from nbaccel.train.implicit import step_under_way
from nbaccel.train.memory import release_unused
from nbaccel.train.optimizer import PreparedOptimizer
from nbaccel.train.strategies.lending import is_sharded
from nbaccel.train.talk.process_group import process_group

__all__ = ["Survivors"]


class Survivors:
    """Objects that existed before the first attempt. Made then; read after each failed attempt. Holds none of them.

    Of objects that a notebook kernel made before it was forked it sees those that are prepared: the garbage collector
    shows no others there.
    """

    def __init__(self) -> None:
        self._own_groups = max(0, len(c10d._world.pg_map) - 1)
        self._prepared = [weakref.ref(thing) for thing in _prepared()]
        self._fresh = [weakref.ref(optimizer) for optimizer in _optimizers(_living()) if not optimizer.state]
        self._accelerators = _references()
        self._replicas: list[weakref.ref[DistributedDataParallel]] = []
        self._sharded: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Note that an attempt begins: steps from now on belong to it."""
        self._places = weakref.WeakKeyDictionary({each: each._place for each in process_group.users})

    @property
    def step(self) -> int:
        """The training step that the attempt has reached, 0-based. Must be read before `clean_up`."""
        places = {each: each._place for each in process_group.users if each._is_bound}
        trained = [place[0] for each, place in places.items() if place != self._places.get(each)]
        return max(trained, default=step_under_way() or 0)

    @property
    def steps(self) -> list[int]:
        """Numbers of training steps of each Accelerator here; a failed attempt may have done more on some ranks.

        Must be read after `clean_up`, as must `scalings`, how each of them scales losses.
        """
        return [0 if each is None or not each._is_bound else each._steps_done for each in self._in_order]

    @property
    def scalings(self) -> list[dict[str, Any]]:
        return [{} if each is None else each._scaling for each in self._in_order]

    @property
    def _in_order(self) -> list[Any]:
        """The Accelerators, in the order in which they were made; None for one that is gone."""
        return [reference() for reference in self._accelerators]

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
        for accelerator in process_group.users:
            accelerator._forget_all_but(known)
        del known
        release_unused()
        self._accelerators = _references()
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

        steps: training steps that each Accelerator counts from, equal on all ranks, so that a run that is stopped
            stops at the same one.
        source: the rank whose weights are used.  scalings: its loss scaling; empty to leave it unchanged.
        """
        for each, step, scaling in zip_longest(self._in_order, steps, scalings):
            if each is None:
                continue
            if scaling is not None:
                each._scale_like(scaling)
            if step is not None and each._is_bound:  # else the notebook trained with it before this rank was forked
                each._count_steps_from(step)
        for reference in self._replicas:
            if (module := reference()) is not None:
                rejoin_at_next_forward(module, source)


def _references() -> list[weakref.ref[Any]]:
    return [weakref.ref(accelerator) for accelerator in process_group.users]


def _prepared() -> list[Any]:
    return [thing for accelerator in process_group.users for thing in accelerator._everything_prepared]


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
