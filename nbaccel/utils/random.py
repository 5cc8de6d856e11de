"""Names that programs import from ``accelerate.utils.random``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.distributed.rng import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")
