"""Memory that ran out, and is released: ``accelerate.utils.memory``. It defines nothing. Runs in ranks and scripts."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.oom.memory.free_memory import release_memory

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.further_helpers import clear_device_cache, should_reduce_batch_size
with shown_by(__name__):
    from nbaccel.features.retry import find_executable_batch_size
