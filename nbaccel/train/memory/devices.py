"""Devices: how many bytes this process holds on each, and what can be given back to them. Runs anywhere.

Makes no context: a device that the process has not used is not touched. What other processes hold is not seen.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["HOST", "bytes_in_use", "empty_caches"]

HOST = "cpu"


def bytes_in_use() -> dict[str, int]:
    """Bytes by device: resident memory under "cpu", living tensors under "cuda:0" and its like."""
    import psutil  # 10 ms that only who asks has to pay

    held = {HOST: psutil.Process().memory_info().rss}
    for kind, backend in _backends():
        for index in _used(backend):
            held[f"{kind}:{index}"] = backend.memory_allocated(index)
    if _mps() is not None:
        held["mps"] = _mps().current_allocated_memory()
    return held


def empty_caches() -> None:
    """Return what the allocators keep for later: to the devices, and to the host."""
    for kind, backend in _backends():
        if kind == "cuda":
            _clear_cublas_workspaces()
        if used := _used(backend):
            # It empties the caches of all devices. With expandable segments that is an illegal access where another
            # device than the current one still works on them (pytorch #196258): it waits for the current one alone.
            for index in used[1:]:
                backend.synchronize(index)
            with backend.device(used[0]):
                backend.empty_cache()
        _empty_pinned_cache()
    if _mps() is not None:
        _mps().empty_cache()
    _trim_heap()


def _backends() -> Iterator[tuple[str, Any]]:
    """The kinds of devices that this process has initialised."""
    torch: Any = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            yield kind, backend


def _used(backend: Any) -> list[int]:
    """Devices on which this process has memory; entering any other would make a context there."""
    return [index for index in range(backend.device_count()) if backend.memory_reserved(index)]


def _mps() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch.mps if torch is not None and torch.backends.mps.is_available() else None


def _clear_cublas_workspaces() -> None:
    """They are tensors of the caching allocator that nobody can name: 8 MB per stream, 32 on newer GPUs."""
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
    """glibc keeps freed memory below the top of its heaps; other allocators have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
