"""Memory: give back what nobody holds any more. Runs in ranks and scripts; starts no process, holds no tensor."""

from __future__ import annotations

import gc
import sys
from typing import Any

__all__ = ["release_memory", "release_unused"]


def release_unused() -> None:
    """Collect garbage, then return the caching allocators' unused blocks to their devices.

    Call it outside of `except`: the exception's frames hold the failed attempt's tensors.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release what nobody else holds; one None per object, to be put in the places of the names.

    >>> model, optimizer = object(), object()
    >>> model, optimizer = release_memory(model, optimizer)
    """
    count = len(objects)
    del objects
    release_unused()
    return [None] * count
