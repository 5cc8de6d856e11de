"""PartialState: the rank, the device and the process group of this process. Runs in ranks.

It works under our launcher, under torchrun, alone in a script and in a notebook kernel. In a process without
peers nothing is touched until it is used, so a state that was made in a kernel may be forked or pickled into a
rank, where it finds the rank's own world. States share nothing: a second one does not disturb the first.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import NoSuchDevice
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.distributed.process_group import GroupOptions, process_group

__all__ = [
    "AcceleratorState",
    "PartialState",
    "current_world",
    "forget_worlds",
    "is_initialized",
]


class PartialState(ProcessControl):
    """The position of this process in a run, and its process group.

    In a rank the process group is formed here, by all ranks together. If the ranks are independent (``--independent``)
    it is formed at the first collective. A group that the program made itself is used, and left alone at the end.

    Args:
        cpu: Stay on the CPU although there are devices; by default as the process group, or as the launcher was told.
        backend, timeout, init_method: Those of the process group, if it is formed here, as ``init_process_group`` takes
            them. By default the backend that fits the device, torch's timeout, and the rendezvous of the launcher.

    Example:
        >>> state = PartialState()
        >>> state.num_processes, state.is_main_process
        (1, True)
    """

    def __init__(
        self,
        cpu: bool | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
    ) -> None:
        self._cpu = cpu
        self._options = GroupOptions(backend, timeout, init_method)
        self._pid = 0
        self._world = World()
        self._chosen = RunSettings()
        self._device: torch.device | None = None
        if current_world().is_distributed and not RunSettings.from_env().independent:
            self.form_group()
            process_group.warn_of_others(self._options)

    @property
    def world(self) -> World:
        pid = os.getpid()
        if self._pid != pid:  # first use, or the first one after a fork or a pickle
            self._world = current_world()
            self._chosen = RunSettings.from_env()  # once: a run in this process restores the environment
            self._device = None
            self._pid = pid
        return self._world

    @property
    def device(self) -> torch.device:
        world = self.world
        if self._device is None:
            cpu = self._cpu if self._cpu is not None else bool(self._chosen.cpu)
            joined = process_group.device if self._cpu is None else None
            self._device = torch.device("cpu") if cpu else joined or _choose_device(world)
        return self._device

    @property
    def default_device(self) -> torch.device:
        """The device that this process would use without a choice of the CPU."""
        return _choose_device(self.world)

    def set_device(self) -> None:
        """Make `device` torch's current device, for programs that call this; ours is chosen at first use."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def initialized(self) -> bool:
        """Always True; for programs that read it."""
        return True

    @property
    def collectives(self) -> Collectives:
        """The collectives of this process; forms the process group where there is none. Collective then."""
        talk = process_group.talk
        if talk is not None:
            return talk
        world = self.world
        return process_group.join(world, self.device, self._options) if world.is_distributed else _ALONE

    @property
    def debug(self) -> bool:
        """True if every collective is compared between the ranks, not only the first ones.

        The environment's ACCELERATE_DEBUG_MODE says so; to set it here is a collective, which all ranks enter alike.
        """
        talk = process_group.talk
        return bool(RunSettings.from_env().debug) if talk is None else talk.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.collectives.debug = debug

    def look_again(self) -> None:
        """Read the position of this process again, since the program may have made a process group in the meantime."""
        if self._world != current_world():
            self._pid = 0

    def form_group(self) -> None:
        """Form the process group, if there are peers and it does not exist. Collective then."""
        _ = self.collectives

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group that we made; a later collective forms a new one. Every rank should call it.

        Args:
            group: Another group of torch's, which is destroyed instead.
        """
        if group is None:
            process_group.leave()
        else:
            dist.destroy_process_group(group)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Do nothing: states share nothing that could be reset.

        Notebooks for Accelerate call this before a new start.
        """

    def __repr__(self) -> str:
        world = self.world
        return f"{type(self).__name__}({world.place}, device {self.device})"


class AcceleratorState(PartialState):
    """A `PartialState` that also knows the precision; available as ``accelerator.state``.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; by default the launch's choice, else "no".
        cpu: As for `PartialState`.
        **options: As for `PartialState`.

    Example:
        >>> AcceleratorState(mixed_precision="bf16").mixed_precision
        'bf16'
    """

    _was_made: ClassVar[bool] = False  # of a kernel, too, whose ranks inherit or unpickle its states

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Remember that this process has a state; unpickling one comes here too."""
        AcceleratorState._was_made = True
        return super().__new__(cls)

    def __init__(self, mixed_precision: str | None = None, cpu: bool | None = None, **options: Any) -> None:
        self._asked = RunSettings(mixed_precision)
        super().__init__(cpu, **options)

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # so that notebooks and editors show the arguments

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Have `is_initialized` say no until the next state is made; those that exist work on."""
        AcceleratorState._was_made = False

    @property
    def mixed_precision(self) -> str:
        _ = self.world
        return self._asked.over(self._chosen).mixed_precision or "no"

    # Programs read these before they take a way that does not exist here; `None` sends them the other way. Where ranks
    # hold shards, an Accelerator sets the first three: its options may be changed until a model is prepared.

    fsdp_plugin: Any = None
    is_fsdp2 = False
    deepspeed_plugin: Any = None
    megatron_lm_plugin: None = None
    torch_tp_plugin: None = None
    parallelism_config: None = None
    dynamo_plugin: None = None


def is_initialized() -> bool:
    """Return whether this process has made an Accelerator or an `AcceleratorState`.

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> is_initialized()
        True
    """
    return AcceleratorState._was_made


def forget_worlds() -> None:
    """Let every state of this process read its world again at its next use: the process has become a rank since."""
    for each in gc.get_objects():
        if issubclass(type(each), PartialState):
            each._pid = 0


def current_world() -> World:
    """Return the world of this process: that of the process group if there is one, else that of the environment."""
    world = World.from_env()
    if not (dist.is_available() and dist.is_initialized()):
        return world
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (world.rank, world.world_size):
        return world
    return World(rank, world_size, rank, world_size)  # made by hand, mp.spawn for one: a single node


_ALONE = Collectives()


def _choose_device(world: World) -> torch.device:
    """Return CUDA by local rank, else MPS, else plain CPU (never ``cpu:0``, which differs from a tensor's device)."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if not world.is_distributed:
            # current_device() would make a CUDA context, which a notebook kernel must not have by accident.
            return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        if count > 1 and world.own_devices == 1 and world.local_rank >= count:
            raise NoSuchDevice(
                f"local rank {world.local_rank} of {world.local_world_size} has no GPU: this machine shows {count}. "
                f"Start at most {count} processes here, or ask for the CPU."
            )
        device = torch.device("cuda", world.device_number(count))
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
