"""Measure how much memory a step takes at its peak, and how much it may take. Runs in ranks and scripts.

Each device type has the `Meter` that fits it best, for trial steps; without one, `Meter` itself returns None and the
plan works by trial and error. `Peak` tells the share of its memory that an attempt took. `MemLimit` imitates a device
of a few megabytes on the CPU, in tests and, around trial steps on a CPU, in ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from nbaccel.base.hardware import usable_memory
from nbaccel.base.world import World

__all__ = [
    "CudaMeter",
    "GivenMeter",
    "HostMeter",
    "MemLimit",
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


_COUNTED = (torch.Tensor, torch.nn.Parameter)
"""Counted by exact type, since the storage of a wrapper (FakeTensor) is not memory of its own. Of a sharded tensor
(DTensor) the rows that it wraps are counted."""


class MemLimit(TorchDispatchMode):
    """Limit the bytes of the tensors on the CPU, inside this block. A tensor that would exceed the limit is out of
    memory.

    The limit counts the bytes of the tensors that exist and refuses the one that would not fit, in the operation that
    makes it: in forward, in backward, in the optimizer, in a collective. It does not count what an operation allocates
    and frees internally, tensors on devices, and what other threads make than the one that entered the block (those of
    a loader).

    It is exact to the byte: storages are counted once, whatever views there are, from the operation that makes them
    until their last tensor is freed. Each process counts for itself, so ranks can have their own limits. Blocks may be
    nested, also of one object, and read at any time. Of a sharded model (FSDP) the rows of this rank are counted, and
    gathered parameters for as long as they are gathered.

    Args:
        limit_bytes: The limit, which may be changed inside the block. None only counts.

    Attributes:
        live_bytes: The bytes that are held now.
        peak_bytes: The most bytes that were held since the start or `reset_peak`.
        refusals: How many times the limit raised.

    Raises:
        torch.OutOfMemoryError: From any operation in the block, as a full device does.

    Example:
        >>> with MemLimit(1000) as limit:
        ...     kept = torch.zeros(100)
        ...     try:
        ...         torch.zeros(200)
        ...     except torch.OutOfMemoryError as error:
        ...         print(error)
        CPU out of memory. Tried to allocate 800 bytes; MemLimit allows 1000 bytes, of which 600 bytes are free.
        >>> limit.live_bytes, limit.peak_bytes, limit.refusals
        (400, 400, 1)
        >>> model = torch.nn.Linear(3, 1)
        >>> with MemLimit(1000) as limit:
        ...     limit.count(model)  # 4 numbers, 4 bytes each
        ...     limit.reset_peak()
        >>> limit.peak_bytes
        16
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes must be 0 or more, or None to only count; got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.refusals = 0
        self._live = 0
        self._storages: dict[int, _Counted] = {}
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # FSDP frees them and keeps the tensors

    @property
    def live_bytes(self) -> int:
        """Bytes that are held now."""
        self._look_at_gathered()
        return self._live

    @classmethod
    def innermost(cls) -> MemLimit | None:
        """Return the limiting object that this thread has entered last; None outside of any block."""
        entered = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, cls)]
        return next((mode for mode in reversed(entered) if mode.limit_bytes is not None), None)

    def reset_peak(self) -> None:
        """Restart `peak_bytes` from the bytes that are held now."""
        self.peak_bytes = self.live_bytes

    def count(self, *objects: Any) -> None:
        """Count what was made before the block.

        What a forward of a sharded model has left gathered must be freed before (``reshard()``).

        Args:
            *objects: Tensors, modules with their gradients, optimizers, or containers of these. A sharded module counts
                with its rows.

        Raises:
            torch.OutOfMemoryError: The objects do not fit.
        """
        self._admit(_tensors(objects))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would wrap the method below, and the wrapper's frames would hold a refused result."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            if getattr(func, "namespace", "") == "fsdp":
                self._admit_gathered(tree_leaves((kwargs or {}).get("out")))
            self._admit(tree_leaves(result))
        except torch.OutOfMemoryError:
            # On a device nothing would have been made, and the failed operation would hold nothing. So this frame,
            # which the exception keeps alive, must hold nothing either.
            del result, args, kwargs
            raise
        return result

    def _admit(self, leaves: Iterable[Any]) -> None:
        for leaf in map(_own_rows, leaves):
            if type(leaf) in _COUNTED and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                refused_bytes = self._count(leaf.untyped_storage())
                if refused_bytes:
                    del leaf, leaves
                    self._refuse(refused_bytes)

    def _admit_gathered(self, outputs: Sequence[Any]) -> None:
        """Count the tensors into which FSDP gathers parameters, and watch their sizes from now on.

        Their storages are resized between a gather and the next one, which no operation tells.
        """
        for tensor in outputs:
            if type(tensor) in _COUNTED and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._gathered[storage._cdata] = weakref.ref(storage)
        self._admit(outputs)

    def _look_at_gathered(self) -> None:
        """Take off what has been freed of gathered parameters."""
        for key, reference in list(self._gathered.items()):
            storage, known = reference(), self._storages.get(key)
            if storage is None or known is None:
                self._gathered.pop(key, None)
                continue
            freed_bytes = known.size - storage.nbytes()
            if freed_bytes > 0:
                known.size -= freed_bytes
                self._live -= freed_bytes

    def _count(self, storage: torch.UntypedStorage) -> int:
        """Count `storage`, or its growth; return the bytes that do not fit, 0 if it fits."""
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        more = size - (0 if known is None else known.size)
        if self._gathered and self._live + more > self.peak_bytes:  # a new peak, if that is still held
            self._look_at_gathered()
            more = size - (0 if known is None else known.size)
        if more > 0 and self.limit_bytes is not None and self._live + more > self.limit_bytes:
            return more
        if known is None:
            known = self._storages[key] = _Counted()
            weakref.finalize(storage, self._forget, key).atexit = False
        known.size = size
        self._live += more
        self.peak_bytes = max(self.peak_bytes, self._live)
        return 0

    def _count_again(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of `storage` once more, for as long as it lives."""
        key = -storage._cdata  # no storage has such an address
        if key not in self._storages:
            known = self._storages[key] = _Counted()
            weakref.finalize(storage, self._forget, key).atexit = False
            known.size = storage.nbytes()
            self._live += known.size
            self.peak_bytes = max(self.peak_bytes, self._live)

    def _forget(self, key: int) -> None:
        size = self._storages.pop(key).size  # not within the next line: storages also die in gloo's threads, and a
        self._live -= size  # thread may be suspended after a call, but not between reading and writing this

    def _refuse(self, asked_bytes: int) -> None:
        self.refusals += 1
        limit_bytes = self.limit_bytes or 0
        raise torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {asked_bytes} bytes; MemLimit allows {limit_bytes} bytes, "
            f"of which {limit_bytes - self.live_bytes} bytes are free."
        )


class _Counted:
    """Size of a storage that exists, as it was last seen."""

    __slots__ = ("size",)

    size: int


def _own_rows(leaf: Any) -> Any:
    """Return the tensor that holds this rank's rows of a sharded one (DTensor); anything else as it is.

    The attribute, since ``to_local`` is an operation on the tensor, which autograd would record.
    """
    return leaf if type(leaf) in _COUNTED else getattr(leaf, "_local_tensor", leaf)


def _tensors(objects: Iterable[Any]) -> Iterable[Any]:
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            for parameter in thing.parameters():
                yield from (parameter, parameter.grad)
            yield from thing.buffers()
        elif isinstance(thing, torch.optim.Optimizer):
            yield from tree_leaves(dict(thing.state))
        else:
            yield from tree_leaves(thing)
