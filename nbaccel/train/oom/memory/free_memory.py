"""Free unused memory, and report what is still held. Runs in ranks, scripts, the kernel.

Names of the notebook are the user's: they are reported with their sizes, never deleted. A failed call's variables are
released by emptying the frames of its exception (`forget_frames`); the exceptions stay, and still print where they were
raised. No context is made on a device: one that the process has not used is not touched. Memory of other processes is
not seen.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any

from nbaccel.base.quantities import three_digits
from nbaccel.base.values import frozen
from nbaccel.train.oom.memory.holdings import MOST_OBJECTS_OF_ALL, Holding, Names, Search, holds_tensors, named_holdings

__all__ = [
    "HOST",
    "Freed",
    "bytes_in_use",
    "empty_caches",
    "forget_all_frames",
    "forget_frames",
    "free",
    "free_memory",
    "release_memory",
    "release_unused",
]

_MOST_SHOWN = 6
_MOST_OBJECTS_EACH = 100_000
_LEAST_OBJECTS_EACH = 2_000
"""Objects to look at of one output, and of one that comes when those for all are used up; it stays if no tensor was
found in it by then."""


@frozen
class Freed:
    """Memory of this process before and after a release.

    Args:
        before, after: Bytes by device, "cuda:0": its living tensors; "cpu": resident memory of the process.
        held: Names that keep tensors alive, the largest first.

    Example:
        >>> before, after = {"cuda:0": 900_000_000}, {"cuda:0": 420_000_000}
        >>> print(Freed(before, after, (Holding("model", 412_000_000, "cuda:0"),)))
        cuda:0: 480 MB freed, 420 MB in use, 8 MB of it under no name; held by model 412 MB
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    held: tuple[Holding, ...] = ()

    @property
    def freed(self) -> dict[str, int]:
        """Bytes by device that were freed; negative where more is in use now."""
        return {device: count - self.after.get(device, 0) for device, count in self.before.items()}

    @property
    def still_alive(self) -> list[tuple[str, int]]:
        """Each name that keeps tensors alive, with the bytes on all devices; the largest first."""
        totals: dict[str, int] = {}
        for holding in self.held:
            totals[holding.name] = totals.get(holding.name, 0) + holding.bytes
        return sorted(totals.items(), key=lambda item: -item[1])

    def __str__(self) -> str:
        devices = sorted(self.freed, key=lambda device: device == HOST)
        return "; ".join([*map(self._of_device, devices), _listed(self.still_alive)])

    def _of_device(self, device: str) -> str:
        in_use = self.after.get(device, 0)
        text = f"{device}: {three_digits(max(0, self.freed[device]))} freed, {three_digits(in_use)} in use"
        unnamed = in_use - sum(holding.bytes for holding in self.held if holding.device == device)
        # The host's memory holds a whole program besides tensors.
        return text if device == HOST or unnamed <= 0 else f"{text}, {three_digits(unnamed)} of it under no name"


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


def free(handed_in: tuple[Any, ...] = (), history: bool = False) -> Freed:
    """Release failed calls' variables, garbage, and the allocators' caches; return what is still held.

    Args:
        handed_in: Objects that the caller will drop; names of them are not reported.
        history: Also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.
    """
    before = bytes_in_use()
    forget_all_frames()
    if history:
        Names.of_this_process().forget_history(_Weighing().holds_tensors)
    release_unused()
    return Freed(before, bytes_in_use(), tuple(named_holdings(handed_in)))


class _Weighing:
    """Tells for many objects whether they hold tensors, in bounded work. A large one does not hide the others."""

    def __init__(self) -> None:
        self._left = MOST_OBJECTS_OF_ALL
        self._known: dict[int, bool] = {}  # an output has several names

    def holds_tensors(self, thing: Any) -> bool:
        if id(thing) not in self._known:
            search = Search(most := max(_LEAST_OBJECTS_EACH, min(self._left, _MOST_OBJECTS_EACH)))
            self._known[id(thing)] = holds_tensors(thing, search)
            self._left -= most - max(0, search.left)
        return self._known[id(thing)]


def free_memory(*objects: Any, history: bool = False) -> list[None]:
    """Release memory that nothing needs any more.

    In a notebook, what a failed cell had made is freed too, although IPython still holds its exception. What your own
    names hold stays: `Accelerator.last_free`, or ``%accelerate memory``, reports which names and how much. Nothing is
    moved to another device; for the time of a run, ``--free-kernel`` does that.

    Args:
        history: Also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.
        *objects: The program's own references, which every Accelerator of this process forgets. To forget everything
            that one has prepared, call ``accelerator.free_memory()``.

    Returns:
        One None per object, to be assigned to the names.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = free_memory(model, optimizer)
    """
    _let_go(objects)
    free(objects, history)
    return [None] * len(objects)


def release_memory(*objects: Any) -> list[None]:
    """Call `free_memory`; this is Accelerate's name.

    Args:
        *objects: As for `free_memory`.

    Returns:
        One None per object, to be assigned to the names.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
    """
    return free_memory(*objects)


def _let_go(objects: Sequence[Any]) -> None:
    """Tell the Accelerators of this process to forget `objects`."""
    group = sys.modules.get("nbaccel.train.distributed.process_group")  # no Accelerator is made without it
    for lifecycle in list(group.process_group.users) if group is not None and objects else ():
        lifecycle.let_go(objects)


def _listed(alive: Sequence[tuple[str, int]]) -> str:
    if not alive:
        return "no name holds a tensor"
    names = [f"{name} {three_digits(count)}" for name, count in alive[:_MOST_SHOWN]]
    rest = alive[_MOST_SHOWN:]
    more = [f"{len(rest)} more names {three_digits(sum(count for _, count in rest))}"] if rest else []
    return f"held by {', '.join(names + more)}"


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


_CAN_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


# An exception holds the tensors of its frames: https://github.com/pytorch/pytorch/issues/27600, and IPython
# keeps the last one: https://github.com/ipython/ipython/pull/11572.
def forget_frames(error: BaseException) -> None:
    """Empty the frames of `error` and of all exceptions that it came from, except those that are still running.

    An exception holds its traceback, the traceback holds the frames, and the frames hold what a failed step had made.
    In a notebook a failure is held long after it was shown: by `sys.last_value`, by IPython's last result, by its
    traceback printer, by a variable. Not covered: what an exception carries itself (its arguments), and the bodies of
    classes and of ``exec`` with a separate dict.

    Call it where the exception is caught, before trying again: the locals of the failed attempt are freed at once,
    without a garbage collection.

    Example:
        >>> def fail():
        ...     large = [0] * 1000
        ...     raise MemoryError
        >>> try:
        ...     fail()
        ... except MemoryError as error:
        ...     failed = error
        >>> forget_frames(failed)
        >>> failed.__traceback__.tb_next.tb_frame.f_locals
        {}
    """
    _forget(trace for link in _chain(error) for trace in _traces(link.__traceback__))


def forget_all_frames() -> None:
    """Empty the frames of every exception that is held in this process, except those that are still running.

    They may be held anywhere: in a variable of Python's or IPython's, a future, a log record. The garbage
    collector knows all tracebacks; a list of such places would miss some. Takes tens of milliseconds.
    """
    _forget(thing for thing in gc.get_objects() if type(thing) is TracebackType)


def _forget(traces: Iterable[TracebackType]) -> None:
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


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, errors handled when it was raised, and the members of groups; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
