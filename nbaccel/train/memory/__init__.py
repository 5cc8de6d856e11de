"""Memory: give it back, and say what still holds it. Runs in ranks, in scripts, and in the kernel.

`free_memory` is what a user calls; `release_unused` and `forget_frames` are the steps that recovery from out of memory
takes on its own. Nothing here decides what to do about a full device.
"""

from __future__ import annotations

from nbaccel.train.memory.devices import HOST, bytes_in_use
from nbaccel.train.memory.frames import forget_frames
from nbaccel.train.memory.holdings import Holding, holdings
from nbaccel.train.memory.releasing import Freed, free, free_memory, release_memory, release_unused
from nbaccel.train.memory.shell import named_holdings

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
