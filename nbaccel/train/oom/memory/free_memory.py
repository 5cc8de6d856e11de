"""Free memory for a person, and report what is still held. Runs in ranks, scripts, the kernel.

Names of the notebook are the user's: they are reported with their sizes, never deleted. Memory of other processes is
not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nbaccel.base.quantities import three_digits
from nbaccel.base.values import frozen
from nbaccel.train.oom.memory.holdings import MOST_OBJECTS_OF_ALL, Holding, Names, Search, holds_tensors, named_holdings
from nbaccel.train.oom.memory.release import backends, forget_all_frames, mps, release_unused, used_by

__all__ = [
    "HOST",
    "Freed",
    "bytes_in_use",
    "free",
    "free_memory",
    "release_memory",
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
    for kind, backend in backends():
        for index in used_by(backend):
            held[f"{kind}:{index}"] = backend.memory_allocated(index)
    if mps() is not None:
        held["mps"] = mps().current_allocated_memory()
    return held
