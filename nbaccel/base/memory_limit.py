"""MemoryLimit: the state of a process's memory when a request was refused. Runs where the error is: in ranks and
scripts.

An error of a library that says only "could not create a primitive" is about memory if there was none left at that
moment. Afterwards there is: leaving the failed operation frees its output and its work space. So the maximum that was
held counts, as far as it is known. Nothing here uses a device that the process has not used.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbaccel.base.failures import Recovery, can_retry, is_of_host, recovery_of
from nbaccel.base.values import frozen

__all__ = ["MemoryLimit", "device_limit", "fullness", "host_limit", "is_shortage", "unused_heap"]

_STATUS_BYTES = 8192


@frozen
class MemoryLimit:
    """The limit of one kind of memory, and the part of it that a process holds.

    Args:
        limit_bytes: 0 if so little was left that it could not be read.
        peak_bytes: Maximum that was held shortly before; `used_bytes` counts if it is unknown.
    """

    used_bytes: int
    limit_bytes: int
    peak_bytes: int = 0

    @property
    def share(self) -> float:
        """Return the fraction of the limit that was in use.

        Example:
            >>> MemoryLimit(80, 100).share, MemoryLimit(80, 100, peak_bytes=99).share, MemoryLimit(0, 0).share
            (0.8, 0.99, 1.0)
        """
        if not self.limit_bytes:
            return 1.0
        return min(1.0, max(self.used_bytes, self.peak_bytes) / self.limit_bytes)


def is_shortage(error: BaseException) -> bool:
    """Return whether `error` is about memory, so that the same work may succeed in smaller pieces.

    Call it where the error was caught, before anything is freed.

    Example:
        >>> is_shortage(MemoryError()), is_shortage(ValueError("expected 10 classes"))
        (True, False)
    """
    return can_retry(error, fullness(error))


def fullness(error: BaseException) -> float | None:
    """Return the fraction, 0 to 1, in use of the memory that `error` may be about; None if unknown or irrelevant.

    Call it where the error was caught, before anything is freed.
    """
    if recovery_of(error) is not Recovery.RETRY_IF_NEARLY_FULL:
        return None
    room = host_limit() if is_of_host(error) else device_limit()
    return None if room is None else room.share


def host_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the tightest of the host's limits for this process; None if the system does not report them.

    Args:
        root: Replaces the root of the file system, in tests.
    """
    try:
        return max(_host_limits(root), key=lambda room: room.share, default=None)
    except MemoryError:
        return MemoryLimit(0, 0)


def device_limit() -> MemoryLimit | None:
    """Return the memory of the current CUDA device that all processes hold; None if this process uses none.

    Memory that this process's caching allocator keeps for later counts as free.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    unused_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return MemoryLimit(total_bytes - free_bytes - unused_bytes, total_bytes)


def unused_heap() -> int:
    """Return the bytes of freed memory that the C library's allocator keeps; 0 if it is not glibc."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>."""

    # Ten of one type: arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost.
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _host_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process, and the machine's or the container's for all."""
    held = _held(root)
    if held:
        # The most address space that was ever used, less what is used now, was freed by leaving the operation, if
        # that request was the one which came to the limit. Where the sum is beyond the limit it was another one: the
        # dynamic loader's, say, which needs more for a moment than most programs do later.
        freed_bytes = held["VmPeak"] - held["VmSize"]
        for name, kind in (("VmData", resource.RLIMIT_DATA), ("VmSize", resource.RLIMIT_AS)):
            limit_bytes, _ = resource.getrlimit(kind)
            if limit_bytes != resource.RLIM_INFINITY:
                peak_bytes = held[name] + freed_bytes
                yield MemoryLimit(held[name], limit_bytes, peak_bytes if peak_bytes <= limit_bytes else 0)
    from nbaccel.base.hardware import usable_memory  # without memory for this, `host_limit` says that there is none

    memory = usable_memory(root)
    if memory.total_bytes:
        yield MemoryLimit(memory.total_bytes - memory.available_bytes, memory.total_bytes)


def _held(root: Path) -> dict[str, int]:
    """Return this process's address space, in bytes by the names of /proc; empty if there is no such file."""
    try:
        status = os.open(os.path.join(root, "proc/self/status"), os.O_RDONLY)
    except OSError:
        return {}
    try:
        lines = os.read(status, _STATUS_BYTES).decode(errors="replace").splitlines()
    finally:
        os.close(status)
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {
        name: int(sizes[name][0]) * 1024 for name in ("VmData", "VmSize", "VmPeak") if len(sizes.get(name, ())) == 2
    }
