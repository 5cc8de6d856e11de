"""Devices: measures how many bytes this process holds on each, and empties caches. Runs anywhere.

It makes no context: a device that the process has not used is not touched. Memory of other processes is not seen.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["HOST", "bytes_in_use", "empty_caches"]

HOST = "cpu"


def bytes_in_use() -> dict[str, int]:
    """Return bytes by device: resident memory under "cpu", living tensors under "cuda:0" and the like."""
    import psutil  # takes 10 ms, only where it is called

    held = {HOST: psutil.Process().memory_info().rss}
    for kind, backend in _backends():
        for index in _used(backend):
            held[f"{kind}:{index}"] = backend.memory_allocated(index)
    if _mps() is not None:
        held["mps"] = _mps().current_allocated_memory()
    return held


def empty_caches() -> None:
    """Return the allocators' unused memory to the devices and to the host."""
    for kind, backend in _backends():
        if kind == "cuda":
            _clear_cublas_workspaces()
        if used := _used(backend):
            # This empties the caches of all devices. With expandable segments that is an illegal access where another
            # device than the current one still works on them (pytorch #196258): torch waits for the current one alone.
            for index in used[1:]:
                backend.synchronize(index)
            with backend.device(used[0]):
                backend.empty_cache()
        _empty_pinned_cache()
    if _mps() is not None:
        _mps().empty_cache()
    _trim_heap()


def _backends() -> Iterator[tuple[str, Any]]:
    """Yield the kinds of devices that this process has initialised."""
    torch: Any = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            yield kind, backend


def _used(backend: Any) -> list[int]:
    """Return the devices on which this process has memory; entering any other would make a context there."""
    return [index for index in range(backend.device_count()) if backend.memory_reserved(index)]


def _mps() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch.mps if torch is not None and torch.backends.mps.is_available() else None


def _clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces: tensors of the caching allocator without a name, 8 MB per stream, 32 on newer GPUs."""
    clear = getattr(sys.modules["torch"]._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _empty_pinned_cache() -> None:
    torch: Any = sys.modules["torch"]
    empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)  # torch >= 2.13
    if empty is None:
        empty = getattr(torch._C, "_host_emptyCache", None)  # in builds for CUDA
    if empty is not None:
        empty()


def _trim_heap() -> None:
    """Return free heap memory: glibc keeps it below the top of its heaps; other allocators have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
