"""World: the position of one process among the ranks of a run. Built in kernels, ranks and scripts; starts nothing.

`World.from_env` is the only reader of the variables that launchers set (nbaccel's, torchrun's, Accelerate's).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

from nbaccel.base.values import frozen

__all__ = ["LAUNCH_ID", "RUN_FOLDER", "World", "is_notebook_kernel", "run_folder"]

LAUNCH_ID = "NBACCEL_LAUNCH_ID"
"""Variable set by nbaccel's launcher in every rank; it distinguishes new rank numbers from those of a dead program."""

RUN_FOLDER = "NBACCEL_RUN_FOLDER"
"""Variable set by nbaccel's launcher in every rank: a folder that it removes when all ranks of the run are gone."""

_OWN_DEVICES = "NBACCEL_OWN_DEVICES"
_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@frozen
class World:
    """The position of one process in a run.

    Args:
        rank: The global number of the process, 0-based.
        world_size: The number of ranks on all nodes.
        local_rank: The number of the process on its node, 0-based.
        local_world_size: The number of ranks on its node.
        node_rank: The number of the node, 0-based.
        launch_id: Identifies the run; empty for a process that was not launched.
        own_devices: The number of devices that this rank has for itself. With several it sees no others, and its first
            one is number 0.

    Example:
        >>> World().is_distributed
        False
        >>> World(rank=1, world_size=2, local_rank=1, local_world_size=2).is_main_process
        False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launch_id: str = ""
    own_devices: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must lie in 0..{self.world_size - 1} (world_size {self.world_size}), got {self.rank}"
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise ValueError(
                f"local_rank {self.local_rank} of local_world_size {self.local_world_size} "
                f"does not fit world_size {self.world_size}"
            )

    @property
    def place(self) -> str:
        """Return the rank in words, for errors and warnings.

        Example:
            >>> World(1, 2, 1, 2).place
            'rank 1 of 2'
        """
        return f"rank {self.rank} of {self.world_size}"

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.rank == self.world_size - 1

    def device_number(self, visible: int) -> int:
        """Return the number of this rank's device, the first of its own, among `visible` devices of a kind.

        A single visible device is this rank's own: a launcher may hide the others from it.

        Args:
            visible: The number of devices of that kind that the process sees.

        Example:
            >>> World(1, 2, 1, 2).device_number(4), World(1, 2, 1, 2).device_number(1)
            (1, 0)
            >>> World(1, 2, 1, 2, own_devices=2).device_number(2)
            0
        """
        return self.local_rank if self.own_devices == 1 and self.local_rank < visible else 0

    def environ(self, port: int = 29500) -> dict[str, str]:
        """Return the environment variables by which torchrun programs recognise this world.

        Args:
            port: Written as MASTER_PORT, for code that needs one. The ranks of nbaccel meet in a file.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            LAUNCH_ID: self.launch_id,
            _OWN_DEVICES: str(self.own_devices),
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return the world that the environment describes; a single process if it describes none.

        Numbers that neither nbaccel's launcher nor torchrun has set are accepted in a script, since wrappers of mpirun
        and SLURM set them. In a notebook kernel they are ignored: a ``WORLD_SIZE=2`` that an earlier program left would
        make the first collective wait for a rank that does not exist.

        Args:
            environ: The variables; by default those of this process.
        """
        env = os.environ if environ is None else environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return cls()
        if not (env.get(LAUNCH_ID) or env.get(_TORCHRUN_ID)) and is_notebook_kernel():
            stale = ", ".join(f"{name}={env[name]}" for name in _NUMBERS if name in env)
            warnings.warn(
                f"ignoring {stale}: this is a notebook kernel and no launcher started it, so these are left over "
                "from another program. Use %%accelerate -n N or notebook_launcher to start N ranks.",
                stacklevel=3,
            )
            return cls()
        try:
            numbers = {name: int(env[name]) for name in _NUMBERS if env.get(name)}
        except ValueError as error:
            raise ValueError(f"the environment's rank variables must be numbers: {error}") from error
        world_size = numbers["WORLD_SIZE"]
        return cls(
            rank=numbers["RANK"],
            world_size=world_size,
            local_rank=numbers.get("LOCAL_RANK", 0),
            local_world_size=numbers.get("LOCAL_WORLD_SIZE", world_size if "LOCAL_RANK" in numbers else 1),
            node_rank=numbers.get("GROUP_RANK", 0),
            launch_id=env.get(LAUNCH_ID, ""),
            own_devices=int(env.get(_OWN_DEVICES) or 1),
        )


def run_folder() -> str:
    """Return the folder for files that nobody needs after the run, however it ends; empty if its launcher has none."""
    folder = os.environ.get(RUN_FOLDER, "")
    return folder if os.path.isdir(folder) else ""


def is_notebook_kernel() -> bool:
    """Return whether this process is an ipykernel; checked without importing anything."""
    kernelapp = sys.modules.get("ipykernel.kernelapp")
    return kernelapp is not None and bool(kernelapp.IPKernelApp.initialized())
