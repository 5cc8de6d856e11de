"""Peak: the share of its memory that an attempt took. Runs in ranks and scripts; touches no device not in use.

Known on CUDA by torch's caching allocator, and on the CPU where the program has entered a `MemLimit`.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nbaccel.train.memlimit import MemLimit
from nbaccel.train.planning.meters import CudaMeter, GivenMeter, Meter

__all__ = ["Peak"]


class Peak:
    """The largest amount held since this object was made. It resets the allocator's own record of that."""

    def __init__(self) -> None:
        _meter().reset_peak()

    @property
    def share(self) -> float | None:
        """Share of the memory that this process may hold; None where that is unknown."""
        with contextlib.suppress(RuntimeError):  # a device that does not answer any more
            meter = _meter()  # now: the attempt may have been the first to use its device
            if meter.limit_bytes and meter.peak_bytes is not None:
                return min(1.0, meter.peak_bytes / meter.limit_bytes)
        return None


def _meter() -> Meter:
    if torch.cuda.is_initialized():
        return CudaMeter(torch.device("cuda", torch.cuda.current_device()))
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, MemLimit):
            return GivenMeter(mode)
    return Meter()
