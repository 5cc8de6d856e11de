"""Memory: give back what nobody holds any more. Runs in ranks and scripts; starts no process, holds no tensor."""

from __future__ import annotations

import gc
import sys

__all__ = ["release_unused"]


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
