"""The face of ``accelerate.utils.random``, for programs that import from there. It defines nothing."""

from __future__ import annotations

from nbaccel.train.seeding import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
