"""Record the memory that a rank has held at its peak in a dry run, and with which batch it rose. Runs in ranks.

The device's peak is that of torch's allocator, on the device where it is highest; what CUDA itself, other libraries and
other processes have there is not in it, and takes of the room that there is. The host's is the resident memory of the
process (`VmHWM`), without its worker processes; pages that are shared with the kernel it was forked from count in full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbaccel.features.check.dry_run.step_times import ObservedPass

__all__ = ["MemoryPeaks"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_PEAK = "5"
"""Resets the peak of the resident memory (``man 5 proc``)."""


class MemoryPeaks:
    """Peaks of this process, one record of the kind "peak" at the end of each pass, and one at the end of all.

    Each has the peaks so far, and of each the batch that was the loop's when it rose: place, kind and size; None before
    the first batch. "batch" is the newest: in the last record, that of an error which ended the program.

    "room" is how much torch's allocator could have had on the device at the end of the pass, if there is one.

    Args:
        write: Appends a record.
        read: Returns the peaks by name, in bytes.
        room: See `read_room`.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None],
        read: Callable[[], Mapping[str, int]] | None = None,
        room: Callable[[], int | None] | None = None,
    ) -> None:
        self._write = write
        self._read = read or read_peaks
        self._room = room or read_room
        self._peaks: dict[str, int] = {}
        self._with: dict[str, dict[str, Any] | None] = {}
        self._now: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        self._pid = 0

    def begin(self) -> None:
        """Record from now on. Peaks of the host before are forgotten, where the system allows that."""
        self._pid = os.getpid()
        with suppress(OSError):
            _RESET.write_text(_PEAK, encoding="ascii")
        self._look()

    def end(self) -> None:
        """Write the peaks of the whole time."""
        self._look()
        self._report()

    def begin_pass(self, this: ObservedPass) -> None:
        self._look()

    def batch(self, this: ObservedPass, size: float | None, kind: str) -> None:
        """Note that the loop gets another batch: what has risen until now was the one before."""
        self._look()
        self._now = self._newest = {"place": this.place, "kind": kind, "size": size}

    def end_pass(self, this: ObservedPass) -> None:
        self._look()
        self._now = None
        self._report()

    def _look(self) -> None:
        for name, peak in self._read().items():
            if peak > self._peaks.get(name, -1):
                self._peaks[name] = peak
                self._with[name] = self._now

    def _report(self) -> None:
        if os.getpid() == self._pid:
            peaks = {name: {"bytes": peak, "batch": self._with[name]} for name, peak in self._peaks.items()}
            room = self._room()
            more = {} if room is None else {"room": room}
            self._write({"kind": "peak", "peaks": peaks, "batch": self._newest, **more})


def read_peaks() -> dict[str, int]:
    """Return the peaks of this process in bytes: "host", and "device" and "device_reserved" once it uses CUDA."""
    peaks: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        text = _STATUS.read_text(encoding="ascii", errors="replace")
        peaks["host"] = int(text.partition("VmHWM:")[2].split()[0]) * 1024
    import torch

    if torch.cuda.is_initialized():
        stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in range(torch.cuda.device_count())]
        for name, of in (("device", "allocated_bytes"), ("device_reserved", "reserved_bytes")):
            peaks[name] = max((each[of]["all"]["peak"] for each in stats), default=0)  # a rank may have several
    return peaks


def read_room() -> int | None:
    """Return the bytes that torch's allocator has, or could get, on the device where its peak is highest."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    fullest = max(range(torch.cuda.device_count()), key=torch.cuda.max_memory_reserved, default=0)
    if not torch.cuda.memory_reserved(fullest):  # asking would give this process a context there
        return None
    with suppress(RuntimeError):  # a device that has failed
        return int(torch.cuda.mem_get_info(fullest)[0] + torch.cuda.memory_reserved(fullest))
    return None
