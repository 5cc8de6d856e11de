"""Advice: the next move for errors whose own text does not say it in a notebook's terms. Pure; asked in the kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from nbaccel.launch.report import Link

__all__ = ["advice"]

_LITTLE_SHARED_MEMORY = (
    "/dev/shm is full, and DataLoader workers pass batches through it: use num_workers=0, smaller batches or a lower "
    "prefetch_factor, or start the container with --shm-size."
)
_FEW_FILES = (
    "This process may open no more files, and DataLoader workers pass each tensor as one: call "
    "torch.multiprocessing.set_sharing_strategy('file_system') in the cell, or use num_workers=0."
)

_DEAD_WORKER = (
    "A DataLoader worker of this rank ended while it handed over a batch. If it was killed, most often because the "
    "host's memory was full: use fewer workers (num_workers), each has a copy of what the dataset holds."
)

_WRAPPED_MODEL = (
    r"The model was prepared, so it is wrapped for training in several ranks; what your class adds to a model is under "
    r"the wrapper: accelerator.unwrap_model(model).\1"
)

_TABLE = (
    (re.compile(r"unable to (allocate|open|resize|mmap) .*shared memory|<(/torch_|filename).*No space left"),
     _LITTLE_SHARED_MEMORY),
    (re.compile(r"DataLoader worker .* killed by signal: Bus error"), _LITTLE_SHARED_MEMORY),
    (re.compile(r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)"), _DEAD_WORKER),
    (re.compile(r"Too many open files|received \d+ items of ancdata"), _FEW_FILES),
    (re.compile(r"^AttributeError: '(?:Replica|DistributedDataParallel)' object has no attribute '(\w+)'", re.M),
     _WRAPPED_MODEL),
)  # fmt: skip
"""What the texts of torch (StorageSharing.cpp, MapAllocator.cpp, dataloader.py) and of the system mean to a user."""

_LOST_CONNECTIONS = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError")
_HAND_OVER = os.path.join("torch", "multiprocessing", "reductions.py")
"""Where a batch of a worker arrives; by itself "connection reset" would say that a rank was lost."""


def advice(links: Sequence[Link]) -> str:
    """One line on what to do about an error, the last of `links`; empty where its own text has to do.

    >>> advice([Link("OSError", ["OSError: [Errno 24] Too many open files"], [])])[:37]
    'This process may open no more files, '
    >>> advice([Link("AttributeError", ["AttributeError: 'Replica' object has no attribute 'generate'"], [])])[-40:]
    'accelerator.unwrap_model(model).generate'
    >>> advice([Link("ValueError", ["ValueError: expected 10 classes, got 11"], [])])
    ''
    """
    if not links:
        return ""
    last = links[-1]
    text = "\n".join(last.headline)
    if last.type_name in _LOST_CONNECTIONS and any(place[0].endswith(_HAND_OVER) for place in last.places):
        return _DEAD_WORKER
    return next((found.expand(line) for pattern, line in _TABLE if (found := pattern.search(text))), "")
