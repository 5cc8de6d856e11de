"""Seeding: sets the random generators of a process from one number, or takes them from rank 0. Runs in ranks.

The generators are Python's, NumPy's and torch's (of every device). The order of a loader is drawn in `data`.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch

from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.partial_state import PartialState, current_world

__all__ = [
    "RNGType",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "warn_of_rng_types",
]


class RNGType(StrEnum):
    """Generators that `synchronize_rng_states` knows; plain strings work as well.

    Example:
        >>> RNGType("generator")
        <RNGType.GENERATOR: 'generator'>
    """

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators. Every rank calls it; no rank waits.

    Without `device_specific` all ranks draw the same numbers: models that they build are equal, and so is noise.

    Args:
        seed: The seed.
        device_specific: Add the rank of this process, so that ranks draw different numbers (dropout, augmentation).
        deterministic: Refuse operations whose result depends on their timing. They raise in torch, and some are slower;
            https://pytorch.org/docs/stable/notes/randomness.html names them.

    Example:
        >>> set_seed(7)
        >>> first = torch.rand(3)
        >>> set_seed(7)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    if device_specific:
        seed += current_world().rank
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed % 2**32)  # the largest seed that it takes
    torch.manual_seed(seed)  # and every device's, at the latest when it is initialised
    if deterministic:
        # cuBLAS reads it when its first handle is made; without it torch's check raises in every matmul.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


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


def warn_of_rng_types(rng_types: Any) -> None:
    """Warn that a program's choice of generators changes nothing."""
    warn_user(
        f"rng_types={rng_types!r} has no effect: the order of samples is the same on all ranks in any case, and no "
        "other generator is touched. synchronize_rng_states takes rank 0's for all ranks where a program wants that."
    )
