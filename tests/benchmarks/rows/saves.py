"""Saves of model and AdamW state, in wall time: raw is ``torch.save``, fsync and rename, so that the file is durable.

Accelerate and Fabric do not wait for the disk, so what they leave to be written later is in nobody's time: only raw
and our rows say when a checkpoint is safe. "nbaccel, in background" is how long the training was blocked.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from benchmarks.harness import Row, installed
from benchmarks.party import Bout, Sample

__all__ = ["rows"]

_MEGABYTES = (60, 600)
_LAYERS = 8

_DISK = Path(__file__).parents[3] / "build"
"""On a disk: in memory, where temporary files may lie, fsync costs nothing."""


def _things(megabytes: int) -> tuple[Module, torch.optim.Optimizer]:
    """Parameters and their two averages, `megabytes` all together."""
    torch.manual_seed(0)
    width = int((megabytes * 1e6 / 4 / 3 / _LAYERS) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)])
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def _train(model: Module, optimizer: Any) -> None:
    """One step, after which the optimizer has its state."""
    model(torch.ones(1, model[0].in_features)).sum().backward()  # type: ignore[operator,index]
    optimizer.step()
    optimizer.zero_grad()


def _sums(tensors: Any) -> Tensor:
    return torch.stack([tensor.detach().double().sum() for tensor in tensors])


def _folder() -> tempfile.TemporaryDirectory[str]:
    _DISK.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="saves-", dir=_DISK)


def _raw(megabytes: int) -> Bout:
    model, optimizer = _things(megabytes)
    _train(model, optimizer)
    folder = _folder()
    path = Path(folder.name, "state.pt")

    def save() -> None:
        with open(path.with_suffix(".new"), "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".new"), path)

    return Bout(save, lambda: _sums(torch.load(path)["model"].values()), folder.cleanup)


def _fabric(megabytes: int) -> Bout:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*_things(megabytes))
    _train(model.module, optimizer)
    folder = _folder()
    path = Path(folder.name, "state.ckpt")
    return Bout(
        lambda: fabric.save(path, {"model": model, "optimizer": optimizer}),
        lambda: _sums(fabric.load(path)["model"].values()),
        folder.cleanup,
    )


def _loaded(accelerator: Any, model: Module, path: Path) -> Tensor:
    """What is in the model after it was emptied and loaded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(path)
    return _sums(model.parameters())


def _accelerate(megabytes: int) -> Bout:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_things(megabytes))
    _train(model, optimizer)
    folder = _folder()
    path = Path(folder.name, "state")
    return Bout(
        lambda: accelerator.save_state(path) and None, lambda: _loaded(accelerator, model, path), folder.cleanup
    )


def _nbaccel(blocking: bool, megabytes: int) -> Bout:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_things(megabytes))
    _train(model, optimizer)
    folder = _folder()
    path = Path(folder.name, "state")

    def save() -> Sample:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        accelerator.save_state(path, blocking=blocking)
        blocked = Sample(time.perf_counter() - wall_s, time.process_time() - cpu_s)
        accelerator._writer.join()  # the next turn is somebody else's
        return blocked

    return Bout(save, lambda: _loaded(accelerator, model, path), folder.cleanup)


def _row(megabytes: int) -> Row:
    makes: dict[str, Callable[[int], Bout]] = {
        "raw": _raw,
        "Accelerate, not durable": _accelerate,
        "Fabric, not durable": _fabric,
        "nbaccel": partial(_nbaccel, True),
        "nbaccel, in background": partial(_nbaccel, False),
    }
    needs = {"Accelerate, not durable": "accelerate", "Fabric, not durable": "lightning"}
    return Row(
        f"save of {megabytes} MB",
        installed({name: partial(make, megabytes) for name, make in makes.items()}, needs),
        unit="ms",
        judged="wall",
        targets={"nbaccel": 1.15},
    )


def rows() -> Sequence[Row]:
    return [_row(megabytes) for megabytes in _MEGABYTES]
