"""`find_executable_batch_size`: run a function again at smaller sizes until it fits, equally on all ranks.

It hooks in as that name, and as what forms the groups of ranks that stay anew. Runs in ranks and scripts. Imports
`train`, `base` and other features.
"""

from __future__ import annotations

from nbaccel.features.retry.search import find_executable_batch_size

__all__ = [
    "find_executable_batch_size",
]
