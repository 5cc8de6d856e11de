"""`find_executable_batch_size`: run a function again at smaller sizes until it fits, equally on all ranks.

Runs in ranks and scripts. Imports the rest of `train` and `base`.
"""

from __future__ import annotations

from nbaccel.train.oom.retry.search import find_executable_batch_size

__all__ = [
    "find_executable_batch_size",
]
