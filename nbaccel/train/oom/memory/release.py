"""Release memory that nothing needs: garbage, caches, variables of failed calls. Runs in ranks, scripts, the kernel.

A failed call's variables are released by emptying the frames of its exception (`forget_frames`); the exceptions stay,
and still print where they were raised. No context is made on a device: one that the process has not used stays
untouched.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any

__all__ = ["backends", "empty_caches", "forget", "forget_all_frames", "mps", "release_unused", "used_by"]


def release_unused(only_young: bool = False) -> None:
    """Collect garbage, then return the caching allocators' unused blocks to their devices.

    Call it outside of `except`, or after `forget_frames`: the exception's frames hold the failed attempt's tensors.

    Args:
        only_young: Only check recently made objects, which takes no time; all of a large program's take half a second.
    """
    if only_young:
        gc.collect(1)
    elif gc.collect():
        gc.collect()  # objects that the first collection ended may have held more
    empty_caches()


def empty_caches() -> None:
    """Return the allocators' unused memory to the devices and to the host."""
    for kind, backend in backends():
        if kind == "cuda":
            _clear_cublas_workspaces()
        if used := used_by(backend):
            # This empties the caches of all devices. With expandable segments that is an illegal access where another
            # device than the current one still works on them (pytorch #196258): torch waits for the current one alone.
            for index in used[1:]:
                backend.synchronize(index)
            with backend.device(used[0]):
                backend.empty_cache()
        _empty_pinned_cache()
    if mps() is not None:
        mps().empty_cache()
    _trim_heap()


def backends() -> Iterator[tuple[str, Any]]:
    """Yield the kinds of devices that this process has initialised."""
    torch: Any = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            yield kind, backend


def used_by(backend: Any) -> list[int]:
    """Return the devices on which this process has memory; entering any other would make a context there."""
    return [index for index in range(backend.device_count()) if backend.memory_reserved(index)]


def mps() -> Any:
    """Return the backend of Apple's GPU; None where there is none."""
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


_CAN_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def forget_all_frames() -> None:
    """Empty the frames of every exception that is held in this process, except those that are still running.

    They may be held anywhere: in a variable of Python's or IPython's, a future, a log record. The garbage
    collector knows all tracebacks; a list of such places would miss some. Takes tens of milliseconds.
    """
    forget(thing for thing in gc.get_objects() if type(thing) is TracebackType)


def forget(traces: Iterable[TracebackType]) -> None:
    """Empty the frames of some tracebacks, except those that are still running."""
    frames = {id(trace.tb_frame): trace.tb_frame for trace in traces}
    if any(frame.f_code.co_flags & _CAN_BE_SUSPENDED for frame in frames.values()):
        for key in _suspended():
            frames.pop(key, None)
    _empty_closures([frame for frame in frames.values() if _empty(frame)])


def _empty(frame: FrameType) -> bool:
    """Forget the variables of a call that is over; return False for one that runs: a caller of ours, or a thread's."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    # PEP 667, https://peps.python.org/pep-0667/, ended these copies.
    # Up to Python 3.12 a frame whose locals were read, as IPython does to print them, keeps a copy. The copy is
    # updated when the locals are read again.
    frame.f_locals  # noqa: B018
    return True


def _empty_closures(frames: list[FrameType]) -> None:
    """Forget the variables that the functions of these calls closed over, where no code can call those any more.

    A frame holds its function, and the function its closure: the body of a comprehension, for example, holds all that
    it mentions. Only a function that nothing but such frames refer to is an orphan; one that a caller, an object or a
    hook still has keeps what it closed over, and so does one that mentions itself.
    """
    orphans = _held_by_nobody_else(
        thing
        for frame in frames
        for thing in gc.get_referents(frame)
        if type(thing) is FunctionType and thing.__code__ is frame.f_code
    )
    for cell in _held_by_nobody_else(cell for function in orphans for cell in function.__closure__ or ()):
        with suppress(ValueError):  # it is empty already
            del cell.cell_contents
    for function in orphans:
        function.__defaults__ = function.__kwdefaults__ = None


def _held_by_nobody_else(things: Iterator[Any]) -> list[Any]:
    """Return those of `things`, each given once by each of its known holders, that have no other holder."""
    known: Counter[int] = Counter()
    unique = []
    thing = None
    for thing in things:
        known[id(thing)] += 1
        if known[id(thing)] == 1:
            unique.append(thing)
    del thing, things  # otherwise they would count
    listed_only = _references([object()])[0]
    counts = _references(unique)
    return [unique[at] for at, count in enumerate(counts) if count == listed_only + known[id(unique[at])]]


def _references(things: list[Any]) -> list[int]:
    """Return how many references there are to each, counted alike: the list's, those of this call, and all others."""
    return [sys.getrefcount(thing) for thing in things]


def _suspended() -> Iterator[int]:
    """Yield the ids of suspended frames: clearing those would close their generators."""
    for thing in gc.get_objects():
        frame: FrameType | None = None
        if type(thing) is GeneratorType:
            frame = thing.gi_frame
        elif type(thing) is CoroutineType:
            frame = thing.cr_frame
        elif type(thing) is AsyncGeneratorType:
            frame = thing.ag_frame
        if frame is not None:
            yield id(frame)
