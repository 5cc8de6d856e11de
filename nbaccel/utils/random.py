"""Names that programs import from ``accelerate.utils.random``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.distributed.rng import set_seed

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.shared_generators import synchronize_rng_state, synchronize_rng_states
