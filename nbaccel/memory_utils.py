"""Names of ``accelerate.memory_utils``, for programs that import from there. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.oom.memory.free_memory import release_memory

__all__ = ["find_executable_batch_size", "release_memory"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.retry import find_executable_batch_size
