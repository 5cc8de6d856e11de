"""A batch from a prepared loader: six small tensors by name, as a tokenizer gives them, in one process and in two.

And the first batch of a long shuffled epoch, before which torch's own sampler makes a list of the whole order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.harness import Row, installed
from benchmarks.loops import NBACCEL, world_size
from benchmarks.party import Bout

__all__ = ["rows"]

_BATCHES = 400
_BATCH_SIZE = 2
_LONG_EPOCH = 10_000_000
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "weight")


class _Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return _BATCHES * _BATCH_SIZE * world_size()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.full((4,), index) for name in _NAMES}


def _collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Only a reference to each: what torch's own collation costs is not the question."""
    return dict(samples[0])


def _loader(sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(_Tokens(), _BATCH_SIZE, sampler=sampler, collate_fn=_collate)


def _bout(loader: DataLoader[Any]) -> Bout:
    seen: list[dict[str, Tensor]] = []

    def turn() -> None:
        seen.clear()
        for batch in loader:
            seen.append(batch)  # the loop is what is measured

    # Toolkits deal in different orders, and which samples a rank sees is theirs to choose: how many it was
    # given, and that none of them came twice, is what they have in common.
    return Bout(turn, lambda: torch.tensor([len(seen), len({int(batch["labels"][0]) for batch in seen}), len(seen[0])]))


def _raw() -> Bout:
    if world_size() == 1:
        return _bout(_loader())
    torch.distributed.init_process_group("gloo")
    return _bout(_loader(DistributedSampler(_Tokens(), shuffle=False)))


def _accelerate() -> Bout:
    from accelerate import Accelerator

    return _bout(Accelerator(cpu=True).prepare(_loader()))


def _fabric() -> Bout:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy="ddp" if world_size() > 1 else "auto")
    fabric.launch()
    return _bout(fabric.setup_dataloaders(_loader()))


def _nbaccel() -> Bout:
    from nbaccel import Accelerator

    return _bout(Accelerator(cpu=True).prepare(_loader()))


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return _LONG_EPOCH

    def __getitem__(self, index: int) -> int:
        return index


def _shuffled(prepare: Callable[[DataLoader[Any]], Any]) -> Bout:
    """Its turn ends with the first batch of a new epoch."""
    loader = prepare(DataLoader(_Numbers(), 32, shuffle=True))
    first: list[Tensor] = []

    def turn() -> None:
        first[:] = [next(iter(loader))]

    return Bout(turn, lambda: torch.tensor([len(first[0]), len(first[0].unique())]))


def _shuffled_by_accelerate() -> Bout:
    from accelerate import Accelerator

    return _shuffled(Accelerator(cpu=True).prepare)


def _shuffled_by_fabric() -> Bout:
    from lightning.fabric import Fabric

    return _shuffled(Fabric(accelerator="cpu", devices=1).setup_dataloaders)


def _shuffled_by_nbaccel() -> Bout:
    from nbaccel import Accelerator

    return _shuffled(Accelerator(cpu=True).prepare)


def rows() -> Sequence[Row]:
    makes: dict[str, Callable[[], Bout]] = {
        "raw": _raw,
        "Accelerate": _accelerate,
        "Fabric": _fabric,
        NBACCEL: _nbaccel,
    }
    shuffled: dict[str, Callable[[], Bout]] = {
        "raw": lambda: _shuffled(lambda loader: loader),
        "Accelerate": _shuffled_by_accelerate,
        "Fabric": _shuffled_by_fabric,
        NBACCEL: _shuffled_by_nbaccel,
    }
    needs = {"Accelerate": "accelerate", "Fabric": "lightning"}
    return [
        Row(
            name=f"batch of a loader, {ranks}",
            contenders=installed(makes, needs),
            units=_BATCHES,
            world_size=count,
            turns=20,
            targets={NBACCEL: 1.10},
        )
        for ranks, count in (("1 process", 1), ("2 ranks", 2))
    ] + [
        Row(
            name=f"first of {_LONG_EPOCH // 10**6} million, shuffled",
            contenders=installed(shuffled, needs),
            unit="ms",
            turns=5,
            targets={NBACCEL: 1 / 3},
        )
    ]
