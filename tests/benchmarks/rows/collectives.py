"""Collectives of two gloo ranks: gather and reduce of 1 KiB and 1 MiB, objects, and a barrier, in wall time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Row, installed
from benchmarks.loops import NBACCEL, world_size
from benchmarks.party import Bout

__all__ = ["rows"]

Call = Callable[[], Tensor]

_FLOATS = {"1 KiB": 256, "1 MiB": 256 * 1024}


@dataclass(frozen=True)
class _Ways:
    """How one toolkit does each; a call returns what every rank then has, as a tensor."""

    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]
    barrier: Callable[[], object]
    objects: Callable[[list[int]], Any] | None


def _raw() -> _Ways:
    dist.init_process_group("gloo")
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(mine: Tensor) -> Tensor:
        everyone = mine.new_empty(len(mine) * world_size())
        all_gather(everyone, mine)
        return everyone

    def reduce(mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    def objects(mine: list[int]) -> list[int]:
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, mine)
        return [one for part in everyone for one in part]

    return _Ways(gather, reduce, dist.barrier, objects)


def _accelerate() -> _Ways:
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    one = Accelerator(cpu=True)
    return _Ways(one.gather, lambda mine: one.reduce(mine, "sum"), one.wait_for_everyone, gather_object)


def _fabric() -> _Ways:
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=world_size(), strategy="ddp")
    one.launch()
    return _Ways(
        lambda mine: one.all_gather(mine).flatten(),
        lambda mine: one.all_reduce(mine.clone(), reduce_op="sum"),
        one.barrier,
        None,
    )


def _nbaccel() -> _Ways:
    from nbaccel import Accelerator
    from nbaccel.utils import gather_object

    one = Accelerator(cpu=True)
    return _Ways(one.gather, lambda mine: one.reduce(mine, "sum"), one.wait_for_everyone, gather_object)


def _call(kind: str, ways: _Ways) -> Call:
    what, _, size = kind.partition(" of ")
    mine = torch.arange(_FLOATS.get(size, 1), dtype=torch.float32) + dist_rank()
    if what == "gather":
        return lambda: ways.gather(mine)
    if what == "reduce":
        return lambda: ways.reduce(mine)
    if what == "barrier":
        return lambda: torch.ones(1) if ways.barrier() is None else torch.zeros(1)
    assert ways.objects is not None
    objects = ways.objects
    return lambda: torch.tensor(objects(list(range(21))))


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _bout(kind: str, calls: int, make: Callable[[], _Ways]) -> Bout:
    ways = make()
    ways.barrier()  # some form their process group at the first call
    call = _call(kind, ways)
    results: list[Tensor] = []

    def turn() -> None:
        for _ in range(calls):
            result = call()
        results[:] = [result]

    return Bout(turn, lambda: results[0])


_KINDS = {
    **{f"{what} of {size}": 1.15 for what in ("gather", "reduce") for size in _FLOATS},
    "gather_object of 21 ints": 1.15,
    "barrier": 1.15,
}
"""Each with the ratio to raw that we hold it to."""


def rows() -> Sequence[Row]:
    return [_row(kind, target) for kind, target in _KINDS.items()]


def _row(kind: str, target: float) -> Row:
    calls = 20 if "MiB" in kind else 100
    makes = {"raw": _raw, "Accelerate": _accelerate, "Fabric": _fabric, NBACCEL: _nbaccel}
    if "object" in kind:
        del makes["Fabric"]
    return Row(
        name=kind,
        contenders=installed(
            {name: (lambda make=make: _bout(kind, calls, make)) for name, make in makes.items()},  # type: ignore[misc]
            {"Accelerate": "accelerate", "Fabric": "lightning"},
        ),
        units=calls,
        world_size=2,
        turns=20,
        judged="wall",
        targets={NBACCEL: target},
    )
