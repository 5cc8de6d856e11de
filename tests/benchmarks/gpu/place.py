"""Place: where the cells of a run compute, and how large their work is there. Runs in the ranks of a party."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["PLACES", "Card", "Place"]


@dataclass(frozen=True)
class Place:
    """The host, where cells are small and prove their code.

    width, depth, context, batch: of the transformer.  steps: of a turn.  block: rows and columns of a moved batch.
    saved_mb: of a training that is saved.
    """

    device_type: str = "cpu"
    precisions: tuple[str, ...] = ("no", "tf32", "bf16")
    width: int = 32
    depth: int = 2
    context: int = 16
    batch: int = 4
    steps: int = 4
    block: tuple[int, int] = (64, 64)
    limit_bytes: int = 20_000_000
    saved_mb: int = 6

    def enter(self) -> torch.device:
        """In each process, before a toolkit is imported: the device."""
        return torch.device("cpu")

    def wait(self) -> None:
        """Until everything that was asked of the device is done."""


@dataclass(frozen=True)
class Card(Place):
    """A CUDA device. limit_bytes: about what a T4 leaves to a program."""

    device_type: str = "cuda"
    precisions: tuple[str, ...] = ("no", "tf32", "bf16", "fp16")
    width: int = 512
    depth: int = 8
    context: int = 256
    batch: int = 16
    steps: int = 20
    block: tuple[int, int] = (4096, 4096)
    limit_bytes: int = 15_000_000_000
    saved_mb: int = 600

    def enter(self) -> torch.device:
        os.environ.pop("ACCELERATE_USE_CPU", None)  # a party's, for the rows that run on the host
        return torch.device("cuda", 0)

    def wait(self) -> None:
        torch.cuda.synchronize()


PLACES = {"cuda": Card(), "cpu": Place()}
