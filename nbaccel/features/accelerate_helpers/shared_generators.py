"""Set random generators to the states of rank 0's. Collective; for programs that want it. Runs in ranks."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch

from nbaccel.train.distributed.partial_state import PartialState

__all__ = ["RNGType", "synchronize_rng_state", "synchronize_rng_states"]


class RNGType(StrEnum):
    """Generators that `synchronize_rng_states` knows; plain strings work as well.

    Example:
        >>> RNGType("generator")
        <RNGType.GENERATOR: 'generator'>
    """

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Set each of these generators to the state of rank 0's generator. Collective.

    Args:
        rng_types: "torch" (the CPU's), "cuda" (that of this rank's device), "generator" (the one that is given).
        generator: The generator for "generator".

    Raises:
        ValueError: A name is unknown, or "generator" comes without a generator.

    Example:
        >>> synchronize_rng_states(["torch"])
        >>> torch.rand(1)  # the same on all ranks  # doctest: +SKIP
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: str | RNGType, generator: torch.Generator | None = None) -> None:
    """Set one of the generators of `synchronize_rng_states` to the state of rank 0's generator. Collective.

    Args:
        rng_type: "torch", "cuda" or "generator".
        generator: The generator for "generator".

    Example:
        >>> generator = torch.Generator()
        >>> synchronize_rng_state("generator", generator)
    """
    kinds = [kind.value for kind in RNGType]
    if rng_type not in kinds:
        raise ValueError(f"rng_types must be of {', '.join(map(repr, kinds))}, got {rng_type!r}")
    if rng_type == RNGType.GENERATOR and generator is None:
        raise ValueError('"generator" needs a generator: synchronize_rng_states(["generator"], generator)')
    source: Any = {RNGType.TORCH: torch.random, RNGType.CUDA: torch.cuda}.get(RNGType(rng_type))
    if source is not None:
        source.set_rng_state(_of_rank_0(source.get_rng_state()))
    elif generator is not None:
        generator.set_state(_of_rank_0(generator.get_state()))


def _of_rank_0(rng_state: torch.Tensor) -> torch.Tensor:
    state = PartialState()
    sent: torch.Tensor = state.collectives.broadcast(rng_state.to(state.device))
    return sent.cpu()
