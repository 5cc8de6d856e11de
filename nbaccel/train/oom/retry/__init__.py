"""find_executable_batch_size: runs a function again at smaller batch sizes until it fits, equally on all ranks."""

from __future__ import annotations

from nbaccel.train.oom.retry.search import find_executable_batch_size

__all__ = [
    "find_executable_batch_size",
]
