"""An unmodified loop in two gloo ranks: its step beside DDP's, and what the line alone saves where a forward waits.

The step's rows have batches of the same samples: DDP's ranks each take their half of one, ours are given it. The first
pass is not in them. Ours ask each other before each backward, through shared memory as in a cell, and sum small
gradients there; a machine that is busy with other things makes waits of both longer, and shows little. In the last row
the model sleeps as long as a device would compute, and raw is one process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL
from benchmarks.party import Bout, Sample

__all__ = ["rows"]

_FEATURES = 64
_WIDTHS = {"10 M parameters": (1750, 3), "10 k parameters": (96, 1), "100 tensors": (64, 48)}
_TARGETS = {"10 M parameters": 0.95, "10 k parameters": 1.3, "100 tensors": 1.3}
_BATCH, _BATCHES = 64, 10

_WAITING_BATCH, _WAITING_BATCHES = 128, 30
_SLEEP_S = 0.020 / 32  # for a sample
_FASTER = 1 / 1.7
_SETUP = "nbaccel.train.setup:setup_rank"  # as a cell has it


def _things(width: int, layers: int) -> tuple[Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    hidden = [layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(torch.nn.Linear(_FEATURES, width), torch.nn.ReLU(), *hidden, torch.nn.Linear(width, 1))
    samples = torch.randn(_BATCH * _BATCHES, _FEATURES)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), TensorDataset(samples, samples.sum(1, keepdim=True))


def _pass(model: Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


def _parameters(model: Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _ddp(width: int, layers: int) -> Bout:
    model, optimizer, data = _things(width, layers)
    torch.distributed.init_process_group("gloo")
    rank, half = torch.distributed.get_rank(), _BATCH // 2
    mine = [first + rank * half + at for first in range(0, len(data), _BATCH) for at in range(half)]
    loader = DataLoader(data, half, sampler=mine)
    parallel = DistributedDataParallel(model)
    _pass(parallel, optimizer, loader)
    return Bout(partial(_pass, parallel, optimizer, loader), lambda: _parameters(model))


def _by_the_line(width: int, layers: int) -> Bout:
    from nbaccel.base.settings import RunSettings
    from nbaccel.base.world import World
    from nbaccel.train.raw_loop.loop import RawLoopTraining

    model, optimizer, data = _things(width, layers)
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    loader = DataLoader(data, _BATCH)
    _pass(model, optimizer, loader)
    return Bout(partial(_pass, model, optimizer, loader), lambda: _parameters(model))


class _Waiting(torch.nn.Module):
    """A model that takes its time for each sample, as on a device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(_FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_SLEEP_S * len(x))
        result: Tensor = self.layers(x)
        return result


def _waiting() -> tuple[float, Tensor]:
    """Seconds of two passes, and the parameters that they lead to."""
    model = _Waiting()
    samples = torch.randn(_WAITING_BATCH * _WAITING_BATCHES, _FEATURES, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), _WAITING_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    began = time.perf_counter()
    for _ in range(2):
        _pass(model, optimizer, loader)
    return time.perf_counter() - began, _parameters(model)


def _waiting_bout(ranks: int) -> Bout:
    from nbaccel import launch

    ends: list[Tensor] = []

    def turn() -> Sample:
        seconds, end = launch(_waiting, ranks, cpu=True, setup=_SETUP).value if ranks > 1 else _waiting()
        ends.append(end)
        return Sample(seconds, 0.0)

    return Bout(turn, lambda: ends[-1])


def rows() -> Sequence[Row]:
    steps = [
        Row(
            name=f"step of an unmodified loop, 2 ranks, {size}",
            contenders={"raw": partial(_ddp, *shape), NBACCEL: partial(_by_the_line, *shape)},
            units=_BATCHES,
            world_size=2,
            turns=20,
            judged="wall",
            targets={NBACCEL: _TARGETS[size]},
            tolerance=1e-4,
        )
        for size, shape in _WIDTHS.items()
    ]
    waiting = {"raw": partial(_waiting_bout, 1), NBACCEL: partial(_waiting_bout, 2)}
    return [
        *steps,
        Row(
            name=f"a loop that waits, 2 ranks by the line, batches of {_WAITING_BATCH}",
            contenders=waiting,
            units=2 * _WAITING_BATCHES,
            turns=5,
            judged="wall",
            targets={NBACCEL: _FASTER},
        ),
    ]
