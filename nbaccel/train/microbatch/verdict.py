"""Verdict: the error that all ranks raise after they have exchanged reports of a step. Runs in ranks; messages only.

Every rank reads the same sums, so all of them come to the same verdict; no rank has stepped by then.
"""

from __future__ import annotations

import torch

from nbaccel.errors import PeerFailed
from nbaccel.train.microbatch.gradients import Report
from nbaccel.world import World

__all__ = ["judge", "place_of", "samples_of"]


def judge(said: Report, world: World, step: int, least: int) -> None:
    """Raise the error that follows from the reports of all ranks, if any.

    least: samples of the smallest micro-batch.
    Raises:
            PeerFailed: a rank's program raised, or it could not read its batch.
            torch.OutOfMemoryError: the smallest micro-batch does not fit on a rank; the same message on all ranks.
    """
    if said.failed:
        raise PeerFailed(
            f"{_who(said.failed, said.failed_ranks, world)} failed in step {step}, with an error of its own; "
            f"{place_of(world)} had no part in it. The weights are as before this step."
        )
    if said.unfit:
        raise torch.OutOfMemoryError(
            f"out of memory in step {step}: {_who(said.unfit, said.unfit_ranks, world)} cannot run forward and "
            f"backward on {samples_of(least)}, the smallest micro-batch. The weights are as before this step.\n"
            "  Free memory (accelerator.free_memory()), recompute activations "
            "(accelerator.gradient_checkpointing(model)), or take a smaller model or shorter samples."
        )


def place_of(world: World) -> str:
    return f"rank {world.rank} of {world.world_size}"


def samples_of(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def _who(count: float, ranks: float, world: World) -> str:
    """Return the rank that a sum of rank numbers identifies, or for several ranks their count."""
    return f"rank {int(ranks)} of {world.world_size}" if count == 1 else f"{int(count)} of {world.world_size} ranks"
