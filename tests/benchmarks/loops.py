"""Loops: the same training, written for raw PyTorch and for each toolkit. Runs in the ranks of a party.

Every loop sees the same samples in the same windows from the same start, so that all of them must end with the same
parameters; what differs is who divides losses, holds gradients back and deals batches. Toolkits are imported where
they are used: each party has one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness import Make, installed
from benchmarks.party import Bout

__all__ = ["NBACCEL", "Training", "contenders", "loss_of", "nbaccel"]

NBACCEL = "nbaccel"

_NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning"}


@dataclass(frozen=True)
class Training:
    """A small training: `batches` batches of 8 samples on each rank, in windows of `accumulation`."""

    batches: int = 200
    accumulation: int = 1
    bf16: bool = False
    width: int = 16

    def __post_init__(self) -> None:
        if self.batches % self.accumulation:
            raise ValueError(f"{self.batches} batches are not whole windows of {self.accumulation}")

    def things(self) -> tuple[Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Model, optimizer and loader, alike in every process; the loader still has the samples of all ranks."""
        torch.manual_seed(0)
        layers = torch.nn.Linear(self.width, self.width), torch.nn.ReLU(), torch.nn.Linear(self.width, 1)
        model = torch.nn.Sequential(*layers)
        samples = torch.randn(self.batches * 8 * world_size(), self.width)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2), DataLoader(TensorDataset(samples), batch_size=8)

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "no"


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _bout(model: Module, turn: Callable[[], None]) -> Bout:
    return Bout(turn, lambda: torch.cat([_whole(parameter).flatten() for parameter in model.parameters()]))


def _whole(parameter: Any) -> Tensor:
    """The values of a parameter, also where it is sharded; collective then."""
    values: Tensor = parameter.detach()
    return getattr(values, "full_tensor", lambda: values)()


def raw(training: Training) -> Bout:
    """What one writes by hand, with DDP where there are ranks."""
    model, optimizer, loader = training.things()
    if world_size() > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
        loader = DataLoader(loader.dataset, batch_size=8, sampler=DistributedSampler(loader.dataset, shuffle=False))
    steps = training.accumulation

    def turn() -> None:
        for index, (x,) in enumerate(loader):
            sync = (index + 1) % steps == 0
            with nullcontext() if sync or world_size() == 1 else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16) if training.bf16 else nullcontext():
                    output = model(x)
                loss = loss_of(output)
                (loss if steps == 1 else loss / steps).backward()
            if sync:
                optimizer.step()
                optimizer.zero_grad()

    return _bout(model, turn)


def _prepared(accelerator: Any, training: Training) -> Bout:
    model, optimizer, loader = accelerator.prepare(*training.things())

    def turn() -> None:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x)))
                optimizer.step()
                optimizer.zero_grad()

    return _bout(model, turn)


def accelerate(training: Training) -> Bout:
    from accelerate import Accelerator

    return _prepared(
        Accelerator(mixed_precision=training.precision, gradient_accumulation_steps=training.accumulation, cpu=True),
        training,
    )


def nbaccel(training: Training, **options: Any) -> Bout:
    from nbaccel import Accelerator

    return _prepared(Accelerator(training.precision, training.accumulation, cpu=True, **options), training)


def nbaccel_reporting(training: Training) -> Bout:
    """As in a notebook: every step is entered on the control page, every loss goes into the ring."""
    from nbaccel.base.events import outlet
    from nbaccel.launching.ipc.control import ControlPage, StepGate
    from nbaccel.launching.ipc.ring import RingWriter, make_ring
    from nbaccel.launching.rank.reporter import Reporter

    bout = nbaccel(training)
    gate = StepGate(ControlPage.create(1), 0)
    reporter = Reporter(RingWriter(make_ring()), gate, lambda event: None, lambda event: None)
    reporter.start()

    def turn() -> None:
        with outlet(reporter):
            bout.turn()

    return Bout(turn, bout.result)


def fabric(training: Training) -> Bout:
    from lightning.fabric import Fabric

    strategy = "ddp" if world_size() > 1 else "auto"
    precision = "bf16-mixed" if training.bf16 else "32-true"
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    bare, optimizer, loader = training.things()
    model, optimizer = fabric.setup(bare, optimizer)
    loader = fabric.setup_dataloaders(loader)
    steps = training.accumulation

    def turn() -> None:
        for index, (x,) in enumerate(loader):
            sync = (index + 1) % steps == 0
            with nullcontext() if world_size() == 1 else fabric.no_backward_sync(model, enabled=not sync):
                loss = loss_of(model(x))
                fabric.backward(loss if steps == 1 else loss / steps)
            if sync:
                optimizer.step()
                optimizer.zero_grad()

    return _bout(model, turn)


def contenders(training: Training) -> Mapping[str, Make]:
    """All that are installed, each with this training."""
    ways = {
        "raw": raw,
        "Accelerate": accelerate,
        "Fabric": fabric,
        NBACCEL: nbaccel,
        "nbaccel, reporting": nbaccel_reporting,
    }
    return installed({name: (lambda way=way: way(training)) for name, way in ways.items()}, _NEEDS)  # type: ignore[misc]
