"""Memory that ran out, and is released: ``accelerate.utils.memory``. Runs in ranks and scripts."""

from __future__ import annotations

import gc

import torch

from nbaccel.base.failures import can_retry
from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.oom.memory.free_memory import release_memory

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error says that memory ran out, so that a smaller batch may help.

    Args:
        exception: The error.

    Example:
        >>> should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory"))
        True
    """
    return can_retry(exception)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the unused device memory that torch's allocator keeps, so that other processes can take it.

    Args:
        garbage_collection: Run Python's garbage collection first.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_available():
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.retry import find_executable_batch_size
