"""Device of a program that names "cuda" without a number: its rank's own. Runs in ranks."""

from __future__ import annotations

import torch

from nbaccel.world import World

__all__ = ["use_own_device"]


def use_own_device(world: World) -> None:
    """Make this rank's device torch's current one as soon as the program uses CUDA; nothing is touched before.

    A device that is the only visible one is the current one anyway: a launcher may hide the others from a rank.
    """

    def choose() -> None:
        if world.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(world.local_rank)

    torch.cuda._lazy_call(choose)
