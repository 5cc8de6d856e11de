"""ProcessGroup: torch's default process group; who forms it, by which store, and who ends it. Runs in ranks.

A group that the program made itself is used, and left alone at the end.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.events import CollectiveEntered, Waiting, emit
from nbaccel.settings import RunSettings
from nbaccel.train.talk.collectives import GroupCollectives
from nbaccel.world import World

__all__ = ["GroupOptions", "process_group"]

_LOOK_UP = timedelta(seconds=0.5)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What a program wants of its process group.

    backend: "gloo", "nccl", ...; by default what fits the device.
    timeout: how long a collective may take; by default torch's.
    init_method: where the ranks meet, as an address of torch's; by default where their launcher said.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    init_method: str | None = None


class ProcessGroup:
    """The default group of this process.

    torch has one default group per process, whoever asks for it. So this one fact is the process's and not an
    instance's: whether we made that group (then we end it), by which store, and how often; a group that is
    formed again must not read the addresses that the one before left in the store.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._talk: GroupCollectives | None = None
        self._device: torch.device | None = None
        self._options = GroupOptions()
        self._store: Any = None
        self._world: World | None = None
        self._formed = 0
        self._retired: Any = None

    def join(self, world: World, device: torch.device, options: GroupOptions) -> GroupCollectives:
        """Talk through the group of this `world`; formed now, by all ranks together, where there is none."""
        if not dist.is_initialized():
            self._form(world, device, options)
        self._group = dist.group.WORLD
        self._device = device
        self._talk = GroupCollectives(world, device, debug=bool(RunSettings.from_env().debug))
        return self._talk

    @property
    def talk(self) -> GroupCollectives | None:
        """The way to talk through the group as it was joined; None if it was not, or is not the same any more."""
        return self._talk if self._group is dist.group.WORLD else None

    @property
    def device(self) -> torch.device | None:
        """The device that this rank joined with; None without a group."""
        return None if self.talk is None else self._device

    def leave(self) -> None:
        """End the group, if we formed it."""
        if self._world is not None and dist.is_initialized() and self._group is dist.group.WORLD:
            # The last reference must not be dropped yet, by us or by a DDP module that dies a moment later: gloo's
            # destructor joins its threads while it holds the GIL, for which one of them may still be waiting to
            # drop the last collective's tensors (a hang, now and then). At the next end they are idle.
            self._retired = self._group
            dist.destroy_process_group()
        self._group = self._talk = None

    def warn_of_others(self, options: GroupOptions) -> None:
        """Say which of `options` a group that exists already does not have."""
        asked = [("backend", options.backend, dist.get_backend()), ("timeout", options.timeout, self._options.timeout)]
        unmet = [f"{name}={wanted!s}" for name, wanted, has in asked if wanted is not None and wanted != has]
        if unmet:
            warnings.warn(
                f"the process group exists already, without {' and '.join(unmet)}. Ask where it is formed, or call "
                "destroy_process_group() on every rank first.",
                stacklevel=4,
            )

    def _form(self, world: World, device: torch.device, options: GroupOptions) -> None:
        timeout = options.timeout or dist.default_pg_timeout
        if self._store is None or self._world != world:
            place = (options.init_method, world.rank, world.world_size) if options.init_method else ("env://",)
            self._store = next(iter(dist.rendezvous(*place, timeout=timeout)))[0]
            self._world = world
        self._formed += 1
        self._options = options
        store = dist.PrefixStore(f"nbaccel/{self._formed}", self._store)
        _meet(store, world, timeout)
        backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        if backend == "gloo":
            # gloo returns on each rank when that rank's connections stand. One that is done quickly could leave while
            # a peer still connects, and the peer would fail.
            dist.barrier()


def _meet(store: Any, world: World, timeout: timedelta) -> None:
    """Return once all ranks are about to form the group.

    torch would wait for them too, but silently and for half an hour, also for a rank that has finished already.
    """
    emit(CollectiveEntered())
    store.set(f"here/{world.rank}", "1")
    everyone = [f"here/{rank}" for rank in range(world.world_size)]
    waited = timedelta(0)
    while True:
        try:
            store.wait(everyone, min(_LOOK_UP, timeout))
            return
        except RuntimeError:  # "Wait timeout"; a store that is lost says so when it is asked again
            missing = [rank for rank, key in enumerate(everyone) if not store.check([key])]
            waited += _LOOK_UP
            if waited >= timeout and missing:
                raise TimeoutError(
                    f"rank {world.rank} of {world.world_size} waited {timeout.total_seconds():g} s for ranks "
                    f"{missing} to form the process group"
                ) from None
        emit(Waiting("forming the process group", waited.total_seconds()))


process_group = ProcessGroup()
