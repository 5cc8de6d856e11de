"""``cost.py cuda|cpu planner|buckets|group``: what the planner and the exchange of gradients cost; a group's ends.

Groups have one rank: the way of NCCL is gone all along, and nobody has to be waited for. ``cpu`` runs the same on the
host, by gloo; its times say nothing.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device import T4_BYTES, Training, limited, release, training_of, wait
from torch.nn.parallel import DistributedDataParallel

from gpu.facts import fact, tell_cases
from nbaccel import Accelerator
from nbaccel.base.failures import can_retry
from nbaccel.base.world import World
from nbaccel.features.micro_batches.gradient_buckets import Buckets
from nbaccel.features.micro_batches.lent_gradients import StepReport
from nbaccel.train.distributed.process_group import GroupOptions, process_group

_ON_HOST_BYTES = 3_000_000
_TURNS, _STEPS, _SIZE = 12, 5, 8
_TURNS_ON_HOST = 1


def _accelerator(device: str) -> Accelerator:
    return Accelerator("fp16" if device == "cuda" else "no", cpu=device == "cpu")


def _trains(device: str, training: Training, size: int) -> bool:
    """Whether a plain prepared loop gets through three steps of `size`."""
    accelerator = _accelerator(device)
    try:
        model, optimizer = accelerator.prepare(*training.make())
        for _ in range(3):
            accelerator.backward(training.loss(model, training.batch(size).to(device)))
            optimizer.step()
            optimizer.zero_grad()
        wait(device)
    except RuntimeError as error:
        if not can_retry(error):
            raise
        return False
    return True


def _find(device: str, training: Training) -> tuple[int, list[int]]:
    """The size that `find_batch_size` finds, and those that it tried. Nothing of it is left."""
    tried: list[int] = []
    accelerator = _accelerator(device)
    model, _ = accelerator.prepare(*training.make())

    def loss_fn(batch: Any) -> torch.Tensor:
        if tried[-1:] != [len(batch)]:
            tried.append(len(batch))
        return training.loss(model, batch.to(device))

    return accelerator.find_batch_size(loss_fn, training.batch(2)), tried


def planner(device: str) -> dict[str, Any]:
    """The batch size that `find_batch_size` finds on a T4's memory, and what it took."""
    training = training_of(device)
    with limited(device, T4_BYTES, _ON_HOST_BYTES) as limit:
        began = time.perf_counter()
        size, tried = _find(device, training)
        took_s, failed = time.perf_counter() - began, limit.refusals
        fact("planner", {"size": size, "tried": tried, "failed": failed, "took_s": round(took_s, 2)})
        release(device)
        fits = _trains(device, training, size)
        release(device)
        more_fits = _trains(device, training, max(math.ceil(size / 0.97), size + 3))
    return {"size": size, "tried": tried, "failed": failed, "took_s": took_s, "fits": fits, "more_fits": more_fits}


# A group of one rank --------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _join(device: str) -> Any:
    world = World(0, 1, 0, 1)
    os.environ |= world.environ(port=_free_port()) | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    return process_group.join(world, place, GroupOptions("nccl" if device == "cuda" else "gloo"))


def _waits(device: str, step: Callable[[], None]) -> int:
    """How often `step` waits for the card, by torch's own warnings."""
    import warnings

    if device == "cpu":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    where = [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]
    fact("waits_where", where)
    return len(where)


def _apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of their gradients, by the largest gradient."""
    pairs = [(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    largest = max(float(a.abs().max()) for a, _ in pairs if a is not None)
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None) / largest


def _size(device: str) -> int:
    """Sequences of a batch: so many that the card is busy longer than the host, whose time would be measured else."""
    is_large = device == "cuda" and torch.cuda.get_device_properties(0).total_memory > 40 * 2**30
    return 4 * _SIZE if is_large else _SIZE


def buckets(device: str) -> dict[str, Any]:
    """Seconds per step of plain DDP and of our buckets, in turns, in a group of one rank; and the waits of a step."""
    talk = _join(device)
    training = training_of(device)
    batch = training.batch(_size(device)).to(device)
    bare, plain_optimizer = training.make()
    plain_model = DistributedDataParallel(bare.to(device))
    ours_model, ours_optimizer = training.make()
    ours_model.to(device)
    gradients = Buckets([ours_model], talk, cap_bytes=25 << 20, is_main=True)

    has_bf16 = device == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16

    def plain_backward() -> None:
        with torch.autocast(device, dtype=dtype):
            loss = training.loss(plain_model, batch)
        loss.backward()

    def plain() -> None:
        plain_backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def our_backward() -> None:
        gradients.open()
        gradients.begin()
        gradients.overlap()
        gradients.is_busy = True
        with torch.autocast(device, dtype=dtype):
            loss = training.loss(ours_model, batch)
        loss.backward()
        gradients.is_busy = False
        said = gradients.exchange(StepReport(weight=1.0))
        assert said.weight == 1.0
        gradients.close(1.0)

    def ours() -> None:
        our_backward()
        ours_optimizer.step()
        ours_optimizer.zero_grad()

    def turn(step: Callable[[], None]) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        wait(device)
        return (time.perf_counter() - began) / _STEPS

    plain_backward()
    our_backward()
    off = _apart(
        bare, ours_model
    )  # before the first step: attention adds up in any order, and Adam makes steps of that
    plain_optimizer.zero_grad()
    ours_optimizer.zero_grad()
    turn(plain)
    turn(ours)
    taken = [(turn(plain), turn(ours)) for _ in range(_TURNS if device == "cuda" else _TURNS_ON_HOST)]
    waits = {"plain DDP": _waits(device, plain), "buckets": _waits(device, ours)}
    found = {
        "plain_s": statistics.median(one for one, _ in taken),
        "ours_s": statistics.median(other for _, other in taken),
        "ratio": statistics.median(other / one for one, other in taken),
        "waits": waits,
        "off": off,
    }
    fact("buckets", found)
    gradients.release()
    process_group.leave()
    return found


def group(device: str) -> dict[str, Any]:
    """Sums before an abort, in the group that is formed after it, and after a leave; and how long each end took."""
    took: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = step()
        took[name] = round(time.perf_counter() - began, 3)
        fact(name, took[name], "s")
        return result

    def total(talk: Any) -> int:
        return int(talk.reduce(torch.ones(1000, device=device)).sum())

    totals = [timed("first sum", lambda: total(timed("join", lambda: _join(device))))]
    abort = getattr(dist.group.WORLD, "abort", None)  # since torch 2.7
    fact("has_abort", abort is not None)
    if abort is not None:
        timed("abort", abort)
    timed("drop", process_group.drop)
    timed("renew", lambda: process_group.renew(dist.HashStore()))
    totals.append(timed("sum after an abort", lambda: total(process_group.talk)))
    timed("leave", process_group.leave)
    totals.append(timed("sum after a leave", lambda: total(_join(device))))
    timed("leave again", process_group.leave)
    return {"totals": totals, "took": took}


CASES = {case.__name__: case for case in (planner, buckets, group)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
