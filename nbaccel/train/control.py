"""ProcessControl: who this process is and what only some processes do. The face that states and Accelerators share.

Runs in ranks, in scripts, and alone in a kernel. It decides nothing: `world`, `device` and `collectives` are the
host's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nbaccel.train.collectives import Collectives
from nbaccel.train.sharing import share
from nbaccel.world import World

__all__ = ["ProcessControl"]


class ProcessControl(ABC):
    """Names that programs written for Accelerate find on `PartialState` and on `Accelerator` alike."""

    @property
    @abstractmethod
    def world(self) -> World:
        """This process's place in the run."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    @property
    @abstractmethod
    def collectives(self) -> Collectives:
        """How this process talks to its peers; forms the process group where there is none. Collective then."""

    @property
    def num_processes(self) -> int:
        return self.world.world_size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.world.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return self.world.is_last_process

    def wait_for_everyone(self) -> None:
        """Return once every rank is here. Collective."""
        self.collectives.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on the main process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of `inputs`; the first ranks get one more when they do not divide evenly.

        inputs: a list, tuple, range, tensor, array, or a mapping of those with equal lengths.
        apply_padding: repeat the last element so that every rank has equally many.

        >>> from nbaccel import PartialState
        >>> with PartialState().split_between_processes(["a", "b"]) as mine:
        ...     mine
        ['a', 'b']
        """
        world = self.world
        yield share(inputs, world.rank, world.world_size, apply_padding) if world.is_distributed else inputs
