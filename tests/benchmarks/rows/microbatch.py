"""A step by `forward_backward` where nothing runs out of memory, beside plain DDP in two gloo ranks, in wall time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL
from benchmarks.party import Bout

__all__ = ["rows"]


def large() -> torch.nn.Module:
    """8.4 million parameters in 8 tensors."""
    return torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 1792), torch.nn.ReLU(), torch.nn.Linear(1792, 10),
    )  # fmt: skip


def many() -> torch.nn.Module:
    """100 tensors of 64 to 4096 parameters."""
    layers = [layer for _ in range(50) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    return torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False), *layers[:98], torch.nn.Linear(64, 10, bias=False))


def tiny() -> torch.nn.Module:
    """Two layers of a few hundred parameters."""
    return torch.nn.Sequential(torch.nn.Linear(256, 2), torch.nn.ReLU(), torch.nn.Linear(2, 10))


MODELS = {"8M parameters": (large, 64, 4), "100 tensors": (many, 32, 20), "tiny": (tiny, 8, 60)}
"""Each with the samples of a batch, and the steps of a turn."""


def _batch(samples: int) -> Any:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return (
        torch.randn(samples, 256, generator=generator),
        torch.randint(0, 10, (samples,), generator=generator),
    )


def _bout(model: torch.nn.Module, step: Callable[[], object], steps: int) -> Bout:
    def turn() -> None:
        for _ in range(steps):
            step()

    return Bout(turn, lambda: torch.cat([parameter.flatten()[:1000] for parameter in model.parameters()]))


def _plain(name: str) -> Bout:
    make, samples, steps = MODELS[name]
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = _batch(samples)

    def step() -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _bout(model, step, steps)


def _recovering(name: str) -> Bout:
    from nbaccel import Accelerator

    make, samples, steps = MODELS[name]
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = _batch(samples)

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]), part[1])

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.forward_backward(loss, batch)
            optimizer.step()
            optimizer.zero_grad()

    return _bout(model, step, steps)


def rows() -> Sequence[Row]:
    return [
        Row(
            name=f"forward_backward, {name}",
            contenders={"raw": lambda name=name: _plain(name), NBACCEL: lambda name=name: _recovering(name)},
            units=steps,
            unit="ms",
            world_size=2,
            turns=20,
            judged="wall",
            targets={NBACCEL: 1.05},
        )
        for name, (_, _, steps) in MODELS.items()
    ]
