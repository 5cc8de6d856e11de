"""Seeding: sets the random generators of a process from one number. Runs in ranks.

The generators are Python's, NumPy's and torch's (of every device). The order of a loader is drawn in `data`.
"""

from __future__ import annotations

import importlib.util
import os
import random
from typing import Any

import torch

from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.partial_state import current_world

__all__ = ["set_seed", "warn_of_rng_types"]


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


def warn_of_rng_types(rng_types: Any) -> None:
    """Warn that a program's choice of generators changes nothing."""
    warn_user(
        f"rng_types={rng_types!r} has no effect: the order of samples is the same on all ranks in any case, and no "
        "other generator is touched. synchronize_rng_states takes rank 0's for all ranks where a program wants that."
    )
