"""Usage: the memory of one rank, as one bar shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.events import Memory

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of the memory that a rank runs out of first: its device's, or the host's for a rank without a device.

    is_device: the memory is the device's.  used_bytes: on a device the bytes that the allocator has reserved, since
    others cannot have these.  limit_bytes: 0 if unknown.
    """

    is_device: bool
    used_bytes: int
    peak_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, memory: Memory) -> Usage:
        """Return the usage of the device, or of the host for a rank without a device.

        >>> Usage.of(Memory(host_bytes=5, host_peak_bytes=7))
        Usage(is_device=False, used_bytes=5, peak_bytes=7, limit_bytes=0)
        """
        if memory.device_bytes is None:
            used = memory.host_bytes
            return cls(False, used, max(used, memory.host_peak_bytes), memory.host_limit_bytes or 0)
        used = max(memory.device_bytes, memory.device_reserved_bytes or 0)
        return cls(True, used, max(used, memory.device_peak_bytes or 0), memory.device_limit_bytes or 0)

    @property
    def used_part(self) -> float:
        """Return the used fraction, 0 to 1; 0 if the limit is unknown."""
        return min(1.0, self.used_bytes / self.limit_bytes) if self.limit_bytes else 0.0

    @property
    def peak_part(self) -> float:
        """Return the fraction at the peak, 0 to 1; 0 if the limit is unknown."""
        return min(1.0, self.peak_bytes / self.limit_bytes) if self.limit_bytes else 0.0
