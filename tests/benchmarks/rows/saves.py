"""Saves and loads of model and AdamW state, in wall time: raw is ``torch.save``, fsync and rename, so it is durable.

Accelerate and Fabric do not wait for the disk, so what they leave to be written later is in nobody's time: only raw,
torch's distributed checkpoint (DCP) and our rows say when a checkpoint is safe. "in background", DCP's and ours, is how
long the training was blocked. Raw and the peers load what they find; we compare every byte with its checksum first.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from benchmarks.harness import Row, installed
from benchmarks.kernels import new_kernel
from benchmarks.party import Bout, Sample
from benchmarks.targets import AtMost

__all__ = ["OURS", "OURS_BEHIND", "Store", "available", "rows"]

_BEHIND = ", in background"
OURS, OURS_BEHIND = "nbaccel", f"nbaccel{_BEHIND}"

_MEGABYTES = (60, 600)
_LAYERS = 8
_BLOCKED_MS = 100.0
"""What a save in the background may hold the training up for, 600 MB."""

_BETWEEN_SAVES = 1.01
"""What a cell with --checkpoint-every may take for a step of 20 ms that nothing is saved after."""

_SETUP = """
%load_ext nbaccel
import time, torch
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(torch.randn(110, 20))
"""

_STEPS = """
ends = []
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    ends.append(time.perf_counter())
seconds = (ends[-1] - ends[9]) / 100
"""

_DISK = Path(__file__).parents[3] / "build"
"""On a disk: in memory, where temporary files may lie, fsync costs nothing."""


def _things(megabytes: int, device: str) -> tuple[Module, torch.optim.Optimizer]:
    """Parameters and their two averages, `megabytes` all together."""
    torch.manual_seed(0)
    width = int((megabytes * 1e6 / 4 / 3 / _LAYERS) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def _train(model: Module, optimizer: Any) -> None:
    """One step, after which the optimizer has its state."""
    weight = model.get_parameter("0.weight")
    model(torch.ones(1, weight.shape[1], device=weight.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Store:
    """How one toolkit keeps a training.

    model, optimizer: what is kept, the optimizer as it was before the toolkit prepared it.
    save: may return the part of its time in which the training was held up.  load: into the same objects.
    """

    model: Module
    optimizer: torch.optim.Optimizer
    save: Callable[[], Sample | None]
    load: Callable[[], object]
    holder: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        return Path(self.holder.name)

    def close(self) -> None:
        self.holder.cleanup()

    def loaded(self) -> Tensor:
        """What is in model and optimizer after they were emptied and loaded."""
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.zero_()
        self.load()
        return torch.stack([tensor.detach().double().sum() for tensor in self._tensors()])

    def _tensors(self) -> list[Tensor]:
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*self.model.parameters(), *moments]


def _holder() -> tempfile.TemporaryDirectory[str]:
    _DISK.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="saves-", dir=_DISK)


def _raw(device: str, megabytes: int) -> Store:
    model, optimizer = _things(megabytes, device)
    _train(model, optimizer)
    holder = _holder()
    path = Path(holder.name, "state.pt")

    def save() -> None:
        with open(path.with_suffix(".new"), "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".new"), path)

    def load() -> None:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Store(model, optimizer, save, load, holder)


def _distributed(blocking: bool, device: str, megabytes: int) -> Store:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _things(megabytes, device)
    _train(model, optimizer)
    holder = _holder()
    path = Path(holder.name, "state")

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def save() -> Sample | None:
        if blocking:
            dcp.save(state(), checkpoint_id=path, no_dist=True)
            return None
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        written = dcp.async_save(state(), checkpoint_id=path, no_dist=True)
        blocked = Sample(time.perf_counter() - wall_s, time.process_time() - cpu_s)
        written.result()  # the next turn is somebody else's
        return blocked

    def load() -> None:
        filled = state()
        dcp.load(filled, checkpoint_id=path, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=filled["model"], optim_state_dict=filled["optimizer"])

    return Store(model, optimizer, save, load, holder)


def _fabric(device: str, megabytes: int) -> Store:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1)
    bare, inner = _things(megabytes, device)
    model, optimizer = fabric.setup(bare, inner)
    _train(bare, optimizer)
    holder = _holder()
    path = Path(holder.name, "state.ckpt")
    state = {"model": model, "optimizer": optimizer}
    return Store(bare, inner, lambda: fabric.save(path, state), lambda: fabric.load(path, state), holder)


def _accelerate(device: str, megabytes: int) -> Store:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    bare, inner = _things(megabytes, device)
    _, optimizer = accelerator.prepare(bare, inner)
    _train(bare, optimizer)
    holder = _holder()
    path = Path(holder.name, "state")

    def save() -> None:
        accelerator.save_state(path)

    return Store(bare, inner, save, lambda: accelerator.load_state(path), holder)


def _nbaccel(blocking: bool, device: str, megabytes: int) -> Store:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    bare, inner = _things(megabytes, device)
    _, optimizer = accelerator.prepare(bare, inner)
    _train(bare, optimizer)
    holder = _holder()
    path = Path(holder.name, "state")

    def save() -> Sample:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        accelerator.save_state(path, blocking=blocking)
        blocked = Sample(time.perf_counter() - wall_s, time.process_time() - cpu_s)
        accelerator._checkpoints.writer.join()  # the next turn is somebody else's
        return blocked

    return Store(bare, inner, save, lambda: accelerator.load_state(path), holder)


def available(device: str = "cpu") -> Mapping[str, Callable[[int], Store]]:
    """All ways whose toolkit is installed; each makes a store of so many megabytes, which lie on `device`."""
    makes: dict[str, Callable[[int], Store]] = {
        "raw": partial(_raw, device),
        "DCP": partial(_distributed, True, device),
        f"DCP{_BEHIND}": partial(_distributed, False, device),
        "Accelerate, not durable": partial(_accelerate, device),
        "Fabric, not durable": partial(_fabric, device),
        OURS: partial(_nbaccel, True, device),
        OURS_BEHIND: partial(_nbaccel, False, device),
    }
    return installed(makes, {"Accelerate, not durable": "accelerate", "Fabric, not durable": "lightning"})


def _saving(make: Callable[[int], Store], megabytes: int) -> Bout:
    store = make(megabytes)
    return Bout(store.save, store.loaded, store.close)


def _loading(make: Callable[[int], Store], megabytes: int) -> Bout:
    store = make(megabytes)
    store.save()

    def turn() -> None:
        store.load()

    return Bout(turn, store.loaded, store.close)


def rows() -> Sequence[Row]:
    return [*(row for megabytes in _MEGABYTES for row in (_save(megabytes), _load(megabytes))), _between()]


def _between() -> Row:
    """Steps of an unmodified loop, of which the first alone comes with what is read once."""
    flags = {"raw": "", "--checkpoint-every 10h": " --checkpoint-every 10h"}
    makes = {name: partial(_stepping, each) for name, each in flags.items()}
    targets = {"--checkpoint-every 10h": _BETWEEN_SAVES}
    return Row("a step of 20 ms between saves; raw: no flag", makes, unit="ms", turns=5, judged="wall", targets=targets)


def _stepping(flags: str) -> Bout:
    until_closed = ExitStack()
    kernel = until_closed.enter_context(new_kernel())

    def turn() -> Sample:
        kernel.do(_SETUP)
        kernel.do(f"%%accelerate --cpu -n 1{flags}\n{_STEPS}", timeout_s=120)
        return Sample(float(kernel.value("seconds")), 0.0)  # the kernel's processor time is not ours to read

    return Bout(turn, lambda: torch.zeros(1), until_closed.close)


def _save(megabytes: int) -> Row:
    makes = {name: partial(_saving, make, megabytes) for name, make in available().items()}
    blocked = {OURS_BEHIND: AtMost(_BLOCKED_MS)} if megabytes == max(_MEGABYTES) else {}
    targets = {OURS: 1.15, **blocked}
    return Row(f"save of {megabytes} MB", makes, unit="ms", judged="wall", targets=targets)


def _load(megabytes: int) -> Row:
    makes = {
        name: partial(_loading, make, megabytes) for name, make in available().items() if not name.endswith(_BEHIND)
    }
    return Row(f"load of {megabytes} MB", makes, unit="ms", judged="wall")
