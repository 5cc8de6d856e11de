"""Collector: Python's garbage collector, switched off for a while. Runs in the kernel and in ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch the garbage collector off while the block runs, and on again if it was on.

    The collector's lists are left as they are: `gc.freeze` and `gc.unfreeze` in the kernel would move the young garbage
    of every cell into the oldest generation, which is collected once in dozens of cells.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
