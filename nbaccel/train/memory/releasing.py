"""Releasing: frees unused memory, and reports what is still held. Runs in ranks, scripts, the kernel.

Names of the notebook are the user's: they are reported with their sizes, never deleted.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.train.checkpoint.folder import in_units
from nbaccel.train.memory.devices import HOST, bytes_in_use, empty_caches
from nbaccel.train.memory.frames import forget_all_frames
from nbaccel.train.memory.holdings import Holding, holds_tensors
from nbaccel.train.memory.shell import Names, named_holdings

__all__ = ["Freed", "free", "free_memory", "release_memory", "release_unused"]

_MOST_SHOWN = 6
_MOST_SECONDS = 0.6
_MOST_SECONDS_EACH = 0.1
_LEAST_SECONDS_EACH = 0.002
"""Times for searching all outputs, and one; an output stays if no tensor was found in it by then."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Memory of this process before and after a release.

    before, after: bytes by device, "cuda:0": its living tensors; "cpu": resident memory of the process.
    held: names that keep tensors alive, the largest first.

    >>> before, after = {"cpu": 2_000_000_000, "cuda:0": 900_000_000}, {"cpu": 2_000_000_000, "cuda:0": 420_000_000}
    >>> print(Freed(before, after, (Holding("model", 412_000_000, "cuda:0"),)))
    cuda:0: 480 MB freed, 420 MB in use, 8 MB of it under no name; cpu: 0 bytes freed, 2 GB in use; held by model 412 MB
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
        text = f"{device}: {in_units(max(0, self.freed[device]))} freed, {in_units(in_use)} in use"
        unnamed = in_use - sum(holding.bytes for holding in self.held if holding.device == device)
        # The host's memory holds a whole program besides tensors.
        return text if device == HOST or unnamed <= 0 else f"{text}, {in_units(unnamed)} of it under no name"


def release_unused(only_young: bool = False) -> None:
    """Collect garbage, then return the caching allocators' unused blocks to their devices.

    only_young: only check recently made objects, which takes no time; all of a large program's take half a second.
    Call it outside of `except`, or after `forget_frames`: the exception's frames hold the failed attempt's tensors.
    """
    if only_young:
        gc.collect(1)
    elif gc.collect():
        gc.collect()  # objects that the first collection ended may have held more
    empty_caches()


def free(handed_in: tuple[Any, ...] = (), history: bool = False) -> Freed:
    """Release failed calls' variables, garbage, and the allocators' caches; return what is still held.

    handed_in: objects that the caller will drop; names of them are not reported.
    history: also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.
    """
    before = bytes_in_use()
    forget_all_frames()
    if history:
        Names.of_this_process().forget_history(_Weighing().holds_tensors)
    release_unused()
    return Freed(before, bytes_in_use(), tuple(named_holdings(handed_in)))


class _Weighing:
    """Tells for many objects, in about a second, whether they hold tensors. A large one does not hide the others."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _MOST_SECONDS
        self._known: dict[int, bool] = {}  # an output has several names

    def holds_tensors(self, thing: Any) -> bool:
        if id(thing) not in self._known:
            now = time.monotonic()
            until = max(now + _LEAST_SECONDS_EACH, min(self._until, now + _MOST_SECONDS_EACH))
            self._known[id(thing)] = holds_tensors(thing, until)
        return self._known[id(thing)]


def free_memory(*objects: Any, history: bool = False) -> list[None]:
    """Release what nothing needs any more; return one None per object, to be assigned to the names.

    In a notebook, what a failed cell had made is freed too, although IPython still holds its exception. What your own
    names hold stays: `Accelerator.last_free`, or `%accelerate memory`, reports which and how much.

    objects: no Accelerator of this process holds them any longer. Other objects that one has prepared stay prepared;
    ``accelerator.free_memory()`` forgets all of it.
    history: also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.

    >>> model, optimizer = object(), object()
    >>> model, optimizer = free_memory(model, optimizer)
    """
    _let_go(objects)
    free(objects, history)
    return [None] * len(objects)


def release_memory(*objects: Any) -> list[None]:
    """Call `free_memory`; this is Accelerate's name.

    >>> model, optimizer = object(), object()
    >>> model, optimizer = release_memory(model, optimizer)
    """
    return free_memory(*objects)


def _let_go(objects: Sequence[Any]) -> None:
    """Tell the Accelerators of this process to forget `objects`."""
    group = sys.modules.get("nbaccel.train.talk.process_group")  # no Accelerator is made without it
    for accelerator in list(group.process_group.users) if group is not None and objects else ():
        accelerator._let_go(objects)


def _listed(alive: Sequence[tuple[str, int]]) -> str:
    if not alive:
        return "no name holds a tensor"
    names = [f"{name} {in_units(count)}" for name, count in alive[:_MOST_SHOWN]]
    rest = alive[_MOST_SHOWN:]
    more = [f"{len(rest)} more names {in_units(sum(count for _, count in rest))}"] if rest else []
    return f"held by {', '.join(names + more)}"
