"""Names of ``accelerate.memory_utils``, for programs that import from there. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.oom.memory import release_memory
from nbaccel.train.oom.retry import find_executable_batch_size

__all__ = ["find_executable_batch_size", "release_memory"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
