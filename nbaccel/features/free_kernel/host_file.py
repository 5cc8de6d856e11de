"""HostFile: memory of the host for models that leave the devices, where ranks find it. Runs in the kernel."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

from nbaccel.namespace.payload import aligned, write_all
from nbaccel.namespace.tensor_devices import InFile

__all__ = ["HostFile"]


class HostFile:
    """Memory of the host in a file without a name, for objects that ranks need and this process keeps.

    A payload does not copy what is in it: ranks map the file, and so does this process, each copy-on-write. So what any
    of them writes later is not in the file, and this process packs no such object that it has changed since.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("nbaccel-host", os.MFD_CLOEXEC)
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def add(self, storage: Any) -> None:
        """Write the bytes of a storage of the host."""
        torch: Any = sys.modules["torch"]
        with memoryview(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()) as source:
            offset = aligned(self._end, source.nbytes)
            write_all(self._fd, source, offset)
            self._places.append((offset, source.nbytes))
            self._end = offset + source.nbytes

    def storages(self) -> list[tuple[Any, InFile]]:
        """Return a storage of this process for each that was added, and its place in the file."""
        torch: Any = sys.modules["torch"]
        mapping = mmap.mmap(self._fd, self._end, access=mmap.ACCESS_COPY)
        flat = [
            torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=nbytes) for offset, nbytes in self._places
        ]
        places = [InFile(self._fd, offset, self._end, os.getpid()) for offset, _ in self._places]
        return [(each.untyped_storage(), place) for each, place in zip(flat, places, strict=True)]

    def close(self) -> None:
        """Close the file; what was mapped stays."""
        os.close(self._fd)
