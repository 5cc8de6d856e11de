"""Memory: how a batch size is found on a card that is cut down to a T4's 15 GB, and what is left there after a run.

The truth is the largest batch that a plain loop trains with, found by trying. Every search has a process of its own.
On the host a `MemLimit` of a few megabytes stands in for the card.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from benchmarks.findings import Finding
from benchmarks.gpu.place import Place
from benchmarks.gpu.work import REAL
from benchmarks.party import Bout, Party
from benchmarks.planner import Device
from nbaccel.base.hardware import Survey
from nbaccel.testing import MemLimit

__all__ = ["report"]

_START = 1024
"""Where Accelerate's decorator begins."""

_STEPS = 3
_LEFT_MB = 16.0
"""On a device after a run, at most: what the driver and other programs move meanwhile."""


class Limit(Protocol):
    """A limit on memory, while it is entered.  refusals: how often something did not fit."""

    refusals: int

    def count(self, model: torch.nn.Module) -> None:
        """What `model` holds is held of it."""


class _CardLimit:
    """The card's own allocator refuses (pytorch #69688: it alone keeps to the fraction)."""

    refusals = 0

    def count(self, model: torch.nn.Module) -> None:
        """The allocator knows."""


@contextmanager
def _card_limit(limit_bytes: int) -> Iterator[Limit]:
    limit = _CardLimit()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), 0)
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    yield limit
    limit.refusals = torch.cuda.memory_stats().get("num_ooms", 0) - before


_LIMITS: dict[str, Callable[[int], AbstractContextManager[Any]]] = {"cuda": _card_limit, "cpu": Device}


def _release(place: Place) -> None:
    gc.collect()
    if place.device_type == "cuda":
        torch.cuda.empty_cache()


def _train(place: Place, device: torch.device, size: int, limit: Limit) -> int:
    """A plain training of some steps with batches of `size`."""
    model, optimizer = REAL.make(place)
    model.to(device)
    limit.count(model)
    for _ in range(_STEPS):
        batch = REAL.samples(place, size).to(device)
        REAL.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    place.wait()
    return size


def _largest(place: Place, device: torch.device, limit: Limit) -> tuple[int, int]:
    """The truth."""

    def fits(size: int) -> bool:
        try:
            _train(place, device, size, limit)
        except torch.OutOfMemoryError:
            return False
        finally:
            _release(place)
        return True

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, 0


def _ours(place: Place, device: torch.device, limit: Limit) -> tuple[int, int]:
    from nbaccel import Accelerator

    tried: list[int] = []
    accelerator = Accelerator(cpu=place.device_type == "cpu")
    model, _ = accelerator.prepare(*REAL.make(place))
    limit.count(model)

    def loss_fn(batch: Any) -> Tensor:
        if tried[-1:] != [len(batch)]:
            tried.append(len(batch))
        moved = batch.to(device)
        return REAL.loss(model(moved), moved)

    return accelerator.find_batch_size(loss_fn, REAL.samples(place, 2)), len(tried)


def _decorated(place: Place, device: torch.device, limit: Limit) -> tuple[int, int]:
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return _train(place, device, batch_size, limit)

    return find_executable_batch_size(train, starting_batch_size=_START)(), len(tried)


Search = Callable[[Place, torch.device, Limit], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Found:
    size: int
    trials: int
    refusals: int
    seconds: float

    @classmethod
    def by(cls, search: Search, place: Place) -> _Found:
        """In a process of its own."""
        told = _in_a_process(partial(_searched, search, place))
        return cls(*map(int, told[:3]), seconds=told[3])


def _searched(search: Search, place: Place) -> Tensor:
    device = place.enter()
    with _LIMITS[place.device_type](place.limit_bytes) as limit:
        began = time.perf_counter()
        size, trials = search(place, device, limit)
        seconds = time.perf_counter() - began
    return torch.tensor([size, trials, limit.refusals, seconds], dtype=torch.float64)


def _in_a_process(measure: Callable[[], Tensor]) -> list[float]:
    party = Party("memory", lambda: Bout(lambda: None, measure), 1, ())
    try:
        told: list[float] = party.result().tolist()
        return told
    finally:
        party.close()


def _left_in_the_process(place: Place) -> Tensor:
    """Bytes that a second training leaves after `free_memory`, beside those that the first one left."""
    from nbaccel import Accelerator, free_memory

    place.enter()
    with MemLimit() as counted:

        def held() -> int:
            return torch.cuda.memory_allocated() if place.device_type == "cuda" else counted.live_bytes

        left = []
        for _ in range(2):
            accelerator = Accelerator(cpu=place.device_type == "cpu")
            model, optimizer = accelerator.prepare(*REAL.make(place))
            batch = REAL.samples(place, place.batch).to(accelerator.device)
            accelerator.backward(REAL.loss(model(batch), batch))
            optimizer.step()
            del accelerator, model, optimizer, batch
            free_memory()
            left.append(held())
    return torch.tensor([float(left[1] - left[0])])


def _one_run(place: Place) -> None:
    """In a rank of a launch."""
    _train(place, place.enter(), place.batch, _CardLimit())


def _left_by_a_run(place: Place) -> int:
    """Bytes that are in use after a launch and were not before: of the device, or of this process on the host."""
    from nbaccel import launch

    def used() -> int:
        return Survey.take().gpus[0].used_bytes if place.device_type == "cuda" else psutil.Process().memory_info().rss

    is_cpu = place.device_type == "cpu"
    launch(_one_run, 1, (place,), cpu=is_cpu)  # what is made once is made now
    before = used()
    launch(_one_run, 1, (place,), cpu=is_cpu)
    return used() - before


def report(place: Place) -> Iterator[Finding]:
    """The findings of a place, one after the other."""
    largest = _Found.by(_largest, place).size
    what = f"batch size in {place.limit_bytes / 1e9:.3g} GB, {largest} samples fit"
    searches: dict[str, tuple[Search, tuple[float | None, ...]]] = {
        "nbaccel": (_ours, (7, 1, 97)),
        "Accelerate x 0.9": (_decorated, (None, None, None)),
    }
    for who, (search, (trials, refusals, share)) in searches.items():
        found = _Found.by(search, place)
        yield Finding(what, f"{who}: trials", found.trials, "", at_most=trials)
        yield Finding(what, f"{who}: of them out of memory", found.refusals, "", at_most=refusals)
        yield Finding(what, f"{who}: landed", 100 * found.size / largest, "%", at_least=share)
        yield Finding(what, f"{who}: took", found.seconds, "s")
    (left,) = _in_a_process(partial(_left_in_the_process, place))
    yield Finding("memory left", "in the process, after free_memory()", left, "bytes", at_most=0)
    left_mb = _left_by_a_run(place) / 1e6
    yield Finding("memory left", f"on {place.device_type}, after a launch", left_mb, "MB", at_most=_LEFT_MB)
