"""PartialState: who this process is among the ranks, on which device, and in which process group. Runs in ranks.

It works under our launcher, under torchrun, alone in a script and in a notebook kernel. In a process without
peers nothing is touched until it is used, so a state that was made in a kernel may be forked or pickled into a
rank, where it finds the rank's own world.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.errors import NoSuchDevice
from nbaccel.settings import RunSettings
from nbaccel.train.collectives import Collectives, GroupCollectives
from nbaccel.train.exchange import Exchange
from nbaccel.world import World

__all__ = ["PartialState", "current_world"]


class PartialState(Exchange):
    """This process's place in a run.

    cpu: stay on the CPU although there are devices; by default what the launcher was told.

    In a rank the process group is formed here, by all ranks together; a group that the program made itself is
    used, and left alone at the end.

    >>> state = PartialState()
    >>> state.num_processes, state.is_main_process
    (1, True)
    """

    def __init__(self, cpu: bool | None = None) -> None:
        self._cpu = cpu
        self._pid = 0
        self._world = World()
        self._device: torch.device | None = None
        if current_world().is_distributed:
            self.form_group()

    @property
    def world(self) -> World:
        pid = os.getpid()
        if self._pid != pid:  # first use, or the first one after a fork or a pickle
            self._world = current_world()
            self._device = None
            self._pid = pid
        return self._world

    @property
    def device(self) -> torch.device:
        world = self.world
        if self._device is None:
            cpu = self._cpu if self._cpu is not None else bool(RunSettings.from_env().cpu)
            self._device = torch.device("cpu") if cpu else _choose_device(world)
        return self._device

    @property
    def collectives(self) -> Collectives:
        """How this process talks to its peers; forms the process group where there is none. Collective then."""
        world = self.world
        return _process.join(world, self.device) if world.is_distributed else _ALONE

    def look_again(self) -> None:
        """Find out anew who this process is: the program may have made a process group since."""
        if self._world != current_world():
            self._pid = 0

    def form_group(self) -> None:
        """Form the process group, if there are peers and it does not exist. Collective then."""
        _ = self.collectives

    def destroy_process_group(self) -> None:
        """Leave the process group that we made; a later collective forms a new one. Every rank should call it."""
        _process.leave()

    def __repr__(self) -> str:
        world = self.world
        return f"PartialState(rank {world.rank} of {world.world_size}, device {self.device})"


def current_world() -> World:
    """The world of this process: of the process group if there is one, else as the environment says."""
    world = World.from_env()
    if not (dist.is_available() and dist.is_initialized()):
        return world
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (world.rank, world.world_size):
        return world
    return World(rank, world_size, rank, world_size)  # made by hand, mp.spawn for one: a single node


class _Process:
    """The process group's owner.

    torch has one default group per process, whoever asks for it. So this one fact is the process's and not an
    instance's: whether we made that group (then we end it), by which store, and how often; a group that is
    formed again must not read the addresses that the one before left in the store.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._talk: GroupCollectives | None = None
        self._store: Any = None
        self._world: World | None = None
        self._formed = 0
        self._retired: Any = None

    def join(self, world: World, device: torch.device) -> GroupCollectives:
        if self._talk is not None and self._group is dist.group.WORLD:
            return self._talk
        if not dist.is_initialized():
            self._form(world, device)
        self._group = dist.group.WORLD
        self._talk = GroupCollectives(world, device, debug=bool(RunSettings.from_env().debug))
        return self._talk

    def leave(self) -> None:
        if self._world is not None and dist.is_initialized() and self._group is dist.group.WORLD:
            # The last reference must not be dropped yet, by us or by a DDP module that dies a moment later: gloo's
            # destructor joins its threads while it holds the GIL, for which one of them may still be waiting to
            # drop the last collective's tensors (a hang, now and then). At the next end they are idle.
            self._retired = self._group
            dist.destroy_process_group()
        self._group = self._talk = None

    def _form(self, world: World, device: torch.device) -> None:
        if self._store is None or self._world != world:
            self._store = next(iter(dist.rendezvous("env://", timeout=dist.default_pg_timeout)))[0]
            self._world = world
        self._formed += 1
        on_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"nbaccel/{self._formed}", self._store),
            rank=world.rank,
            world_size=world.world_size,
            device_id=device if on_cuda else None,
        )
        if not on_cuda:
            # gloo returns on each rank when that rank's connections stand. One that is done quickly could leave while
            # a peer still connects, and the peer would fail.
            dist.barrier()


_process = _Process()
_ALONE = Collectives()


def _choose_device(world: World) -> torch.device:
    """CUDA by local rank, else MPS, else the plain CPU (never ``cpu:0``, which differs from a tensor's device)."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if not world.is_distributed:
            # current_device() would make a CUDA context, which a notebook kernel must not have by accident.
            return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        if count > 1 and world.local_rank >= count:
            raise NoSuchDevice(
                f"local rank {world.local_rank} of {world.local_world_size} has no GPU: this machine shows {count}. "
                f"Start at most {count} processes here, or ask for the CPU."
            )
        # A single visible device is this rank's own: a launcher may hide the others from it.
        device = torch.device("cuda", world.local_rank if count > 1 else 0)
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
