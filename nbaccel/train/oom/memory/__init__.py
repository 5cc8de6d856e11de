"""Frees memory, and reports what still holds it. Runs in ranks, in scripts, and in the kernel.

Users call `free_memory`; the recovery from an out-of-memory error calls `release_unused` and `forget_frames`. Nothing
here decides what to do about a full device. Imports `base`.
"""

from __future__ import annotations

from nbaccel.train.oom.memory.free_memory import (
    HOST,
    Freed,
    bytes_in_use,
    forget_frames,
    free,
    free_memory,
    release_memory,
    release_unused,
)
from nbaccel.train.oom.memory.holdings import Holding, holdings, named_holdings

__all__ = [
    "HOST",
    "Freed",
    "Holding",
    "bytes_in_use",
    "forget_frames",
    "free",
    "free_memory",
    "holdings",
    "named_holdings",
    "release_memory",
    "release_unused",
]
