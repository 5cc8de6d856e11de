"""Measure how much memory a step takes at its peak, and how much it may take. Runs in ranks and scripts.

Each device type has the `Meter` that fits it best, for trial steps; without one, `Meter` itself returns None and the
plan works by trial and error. `Peak` tells the share of its memory that an attempt took.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nbaccel.base.hardware import usable_memory
from nbaccel.base.world import World
from nbaccel.train.oom.memory.mem_limit import MemLimit

__all__ = [
    "CudaMeter",
    "GivenMeter",
    "HostMeter",
    "Meter",
    "Peak",
    "PeakGauge",
    "make_meter",
]

_WHERE_RESERVED_COUNTS = 0.75
"""Share of the limit above which the bytes that CUDA's allocator has reserved are the measure."""

_SHARE_OF_HOST = 0.8
"""Share of the host's available memory for all ranks of the machine; the rest is for loaders, the kernel, files."""

_SHARE_OF_ULIMIT = 0.9
"""Share of what ``ulimit`` leaves: malloc never gives all of it to tensors, and kernels need memory internally."""


class PeakGauge(Protocol):
    """Interface of a measure that a program may give instead; `nbaccel.testing.MemLimit` is one.

    Attributes:
        limit_bytes: What the training may hold at a time; None for no limit.
        peak_bytes: The most that it held since `reset_peak`.
    """

    limit_bytes: int | None
    peak_bytes: int

    def reset_peak(self) -> None:
        """Restart the peak from the bytes that are held now."""


class Meter:
    """A device without memory reports (mps, xla).

    Attributes:
        limit_bytes, peak_bytes: As in `PeakGauge`; None where that is unknown.
        source: A description of the limit.
    """

    limit_bytes: int | None = None
    source = "not known on this device"

    @property
    def peak_bytes(self) -> int | None:
        return None

    def reset_peak(self) -> None:
        """Do nothing: there is no record to reset."""

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context for each trial."""
        return nullcontext()


class GivenMeter(Meter):
    """A measure that the program gave, and has entered itself if that is needed."""

    source = "of the meter that was given"

    def __init__(self, gauge: PeakGauge) -> None:
        self._gauge = gauge
        self.limit_bytes = gauge.limit_bytes

    @property
    def peak_bytes(self) -> int | None:
        return self._gauge.peak_bytes

    def reset_peak(self) -> None:
        self._gauge.reset_peak()


class CudaMeter(Meter):
    """A CUDA device, measured by torch's caching allocator.

    The limit is the free memory plus the memory that the allocator has reserved already, and at most the share of the
    device that `torch.cuda.set_per_process_memory_fraction` leaves to this process. Memory of other processes and of
    the CUDA context is not free, so it is taken into account. The limit is read again after each trial: the first step
    loads kernels and makes the handles and workspaces of cuBLAS and cuDNN, some 100 to 400 MB that the allocator does
    not know, and another size may use other kernels.

    Small steps are measured by the bytes of living tensors, which are exact. Near the limit the bytes that the
    allocator has reserved are used: it never fills its blocks completely.
    """

    source = "what this process can get on its GPU"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.limit_bytes: int = self._read_limit()

    @property
    def peak_bytes(self) -> int:
        reserved = torch.cuda.max_memory_reserved(self._device)
        if reserved > _WHERE_RESERVED_COUNTS * self.limit_bytes:
            return reserved
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def watch(self) -> Iterator[None]:
        try:
            yield
        finally:
            with suppress(RuntimeError):  # a device that failed; the trial's own error reports it
                self.limit_bytes = self._read_limit()

    def _read_limit(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch >= 2.8
        allowed = total if fraction is None else int(fraction(self._device) * total)
        return min(allowed, free + torch.cuda.memory_reserved(self._device))


class HostMeter(Meter):
    """The CPU, measured by the bytes of the tensors that trials make.

    Not measured is what a kernel uses within one operation (oneDNN's convolutions: a quarter more) and what malloc
    loses between blocks. A size that ran in a trial may therefore fail later where a ``ulimit`` is tight.

    The operating system does not refuse memory before it is too late and kills a process instead, so the meter itself
    enforces the limit: what the process may have by its own limits (``ulimit -d``, ``ulimit -v``), and a
    share of what the machine or its container has available, divided among the ranks.

    Args:
        things: Models and optimizers that exist already and are counted too.
    """

    def __init__(self, things: Sequence[Any], world: World) -> None:
        room_bytes, self.source = min(_rooms(world))
        self._limit = MemLimit(None)
        self._limit.count(*things)
        self._limit.limit_bytes = self._limit.live_bytes + max(0, room_bytes)

    @property
    def limit_bytes(self) -> int | None:  # type: ignore[override]
        return self._limit.limit_bytes

    @property
    def peak_bytes(self) -> int:
        return self._limit.peak_bytes

    def reset_peak(self) -> None:
        self._limit.reset_peak()

    def watch(self) -> AbstractContextManager[Any]:
        return self._limit


def make_meter(device: torch.device, things: Sequence[Any], world: World) -> Meter:
    """Return the meter for `device`, where `things` (models, optimizers) are. Inside a `MemLimit` that is the CPU."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        entered = MemLimit.innermost()
        return HostMeter(things, world) if entered is None else GivenMeter(entered)
    return Meter()


def _rooms(world: World) -> list[tuple[int, str]]:
    """Return how many more bytes this process may have, for each limit."""
    import psutil  # 10 ms that only planning costs

    ranks = world.local_world_size
    shared = f"{_SHARE_OF_HOST:.0%} of the available memory" + (f", divided among {ranks} ranks" if ranks > 1 else "")
    rooms = [(int(_SHARE_OF_HOST * usable_memory().available_bytes) // ranks, shared)]
    process = psutil.Process()
    used = process.memory_info()
    for name, used_bytes in (("RLIMIT_DATA", getattr(used, "data", 0)), ("RLIMIT_AS", used.vms)):
        if hasattr(psutil, name):  # not on macOS
            soft, _ = process.rlimit(getattr(psutil, name))
            if soft != psutil.RLIM_INFINITY:
                rooms.append(
                    (int(_SHARE_OF_ULIMIT * (soft - used_bytes)), f"{_SHARE_OF_ULIMIT:.0%} of what {name} leaves")
                )
    return rooms


class Peak:
    """The largest amount held since this object was made. It resets the allocator's own record of that.

    Known on CUDA by torch's caching allocator, and on the CPU where the program has entered a `MemLimit`. No device is
    touched that is not in use.
    """

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
