"""Reads the host and device memory of a rank. Runs in ranks; creates no CUDA context, waits for nothing.

Host bytes come from the kernel's own counts, device bytes from torch's caching allocator. Not covered: devices other
than CUDA's (and those that ROCm presents as CUDA's), and memory that libraries take outside of the allocator.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from typing import Any

from nbaccel.events import Memory
from nbaccel.hardware import usable_memory

__all__ = ["MemoryMeter"]

_STATM = "/proc/self/statm"


class MemoryMeter:
    """Reads this process's memory; some 20 us without a device, as much again for each.

    >>> MemoryMeter().read().host_bytes > 0
    True
    """

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    @functools.cached_property
    def _limit_bytes(self) -> int | None:
        return usable_memory().total_bytes or None

    def read(self) -> Memory:
        with open(_STATM, "rb", buffering=0) as statm:
            resident_pages = int(statm.read().split()[1])
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        host_bytes = resident_pages * self._page_bytes
        return Memory(host_bytes, max(host_bytes, peak_bytes), self._limit_bytes, *self._device_bytes())

    def _device_bytes(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return allocated, reserved, most ever reserved and total bytes of the devices with this process's tensors."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None, None, None, None
        rows = [_of_device(torch, index) for index in range(torch.cuda.device_count())]
        used = [row for row in rows if row[2]]  # the rank's own device, or all devices that a model is spread over
        allocated, reserved, peak, total = (sum(column) for column in zip(*used, strict=True)) if used else (0, 0, 0, 0)
        return allocated, reserved, peak, total or None


def _of_device(torch: Any, index: int) -> tuple[int, int, int, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(index)  # nested: flattening and sorting it takes most of the time
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (
        allocated["current"],
        reserved["current"],
        reserved["peak"],
        torch.cuda.get_device_properties(index).total_memory,
    )
