"""A step of a sharded model (FSDP2) in two gloo ranks, over torch's ``fully_shard`` by hand.

No peer stands beside it: on CPUs Fabric refuses FSDP, and Accelerate, with an fsdp_plugin, trains by DDP in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL, Training, loss_of, nbaccel
from benchmarks.party import Bout

__all__ = ["rows"]

_TRAINING = Training(batches=40, width=64)


def rows() -> Sequence[Row]:
    return [
        Row(
            name="step of 2 ranks, sharded",
            contenders={"raw": _raw, NBACCEL: lambda: nbaccel(_TRAINING, strategy="fsdp")},
            units=_TRAINING.batches,
            world_size=2,
            turns=20,
            judged="wall",
            targets={NBACCEL: 1.04},
            tolerance=1e-5,
        )
    ]


def _raw() -> Bout:
    from torch.distributed.fsdp import fully_shard

    model, optimizer, loader = _TRAINING.things()
    torch.distributed.init_process_group("gloo")
    for layer in (*(part for part in model.children() if any(True for _ in part.parameters())), model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(loader.dataset, batch_size=8, sampler=DistributedSampler(loader.dataset, shuffle=False))

    def turn() -> None:
        for (x,) in loader:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Bout(turn, lambda: _gathered(list(model.parameters())))


def _gathered(tensors: list[torch.Tensor]) -> torch.Tensor:
    whole = [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole])
