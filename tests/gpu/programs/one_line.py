"""``one_line.py cuda|cpu scaled|mixed|made_inside|carried``: loops that prepare nothing, in two ranks and in one.

With one card both ranks share it, and exchange by gloo, since NCCL refuses that; with more each has its own. ``cpu``
runs the same on the host, which proves this program and says nothing about a card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpu.facts import tell_cases
from nbaccel import launch
from nbaccel.base.hardware import Survey
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.setup import setup_rank

SETUP = "nbaccel.train.setup:setup_rank"
HALF = {"cuda": torch.float16, "cpu": torch.bfloat16}


# The loops: nothing of ours in them. They say "cuda", without a number. -----------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def images(count: int = 90) -> TensorDataset:
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum((1, 2, 3)) * 3).long().remainder(4))


def scaled(device: str) -> tuple[list[Tensor], list[float]]:
    """By a gradient scaler, whose third batch overflows in the rank that has its last sample."""
    x, y = images().tensors
    targets = F.one_hot(y, 4).float()
    targets[47] = 1e36
    data = TensorDataset(x, targets)
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=4)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=16):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            printed.append(scaler.get_scale())
    return ends(model), printed


def mixed(device: str) -> tuple[list[Tensor], list[float]]:
    """In half precision, whose sums depend on who adds them: ranks are equal, and near to one process."""
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(images(), batch_size=16, pin_memory=device == "cuda"):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=HALF[device]):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            printed.append(loss.item())
    return ends(model), printed


def made_inside(device: str) -> tuple[list[Tensor], list[float]]:
    """A function that makes its model on the device, trains, and evaluates."""
    train, valid = DataLoader(images(), batch_size=16, shuffle=True), DataLoader(images(20), batch_size=7)
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    printed = []
    for _ in range(3):
        model.train()
        for x, y in train:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in valid)
        printed.append(right / 20)
    return ends(model), printed


LOOPS = {"scaled": scaled, "mixed": mixed, "made_inside": made_inside}


def ends(model: nn.Module) -> list[Tensor]:
    return [value.detach().cpu() for value in model.state_dict().values()]


# Who runs them --------------------------------------------------------------------------------------------------------


def exactly() -> None:
    """In each process: single precision is to be that."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def in_a_rank(loop: Callable[[], Any], shares: bool) -> dict[str, Any]:
    exactly()
    if shares:
        dist.init_process_group("gloo")
    watch = setup_rank(None)
    if not isinstance(watch, RawLoopTraining):  # one process, and plain torch
        weights, printed = loop()
        return {"weights": weights, "printed": printed}
    watch.begin(None)
    try:
        weights, printed = loop()
        watch.end()
    finally:
        watch.stop()
    has = {"weights": weights, "printed": printed, "is_split": watch.has_split, "backend": dist.get_backend()}
    dist.destroy_process_group()
    return has


def compared(device: str, name: str) -> dict[str, Any]:
    """The loop in two ranks, beside the same in one process."""
    loop = partial(LOOPS[name], device)
    shares = device == "cuda" and len(Survey.take().gpus) < 2
    (alone,) = run_ranks(1, in_a_rank, loop, False, timeout_s=200)
    ranks = run_ranks(2, in_a_rank, loop, shares, timeout_s=200)
    return {
        "off": max(distance(rank["weights"], alone["weights"]) for rank in ranks),
        "apart": distance(ranks[0]["weights"], ranks[1]["weights"]),
        "printed": [alone["printed"], *(rank["printed"] for rank in ranks)],
        "is_split": [rank["is_split"] for rank in ranks],
        "backends": [rank["backend"] for rank in ranks],
    }


def distance(weights: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, of a number or of one where it is smaller."""
    pairs = zip(weights, expected, strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


# What the notebook has on a device ------------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> dict[str, Any]:
    """In a rank that a zygote has started."""
    exactly()
    devices = {str(tensor.device) for tensor in (*on(model, optimizer), x, y)}
    steps(model, optimizer, x, y)
    return {"model": model, "optimizer": optimizer, "made": x[0] * 2, "devices": sorted(devices)}


def on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *model.buffers(), *state]


def carried(device: str) -> dict[str, Any]:
    """A model, an optimizer with a state, and data, all on this process's device, trained on by ranks of a zygote."""
    exactly()
    ranks = 2 if device == "cpu" or len(Survey.take().gpus) > 1 else 1
    x, y = (tensor.to(device) for tensor in images().tensors)
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps(model, optimizer, x, y)
    run = launch(
        go_on, ranks, (model, optimizer, x, y), cpu=device == "cpu", start_method="zygote", setup=SETUP, timeout_s=300
    )
    came = run.value
    steps(model, optimizer, x, y)
    steps(came["model"], came["optimizer"], x, y)  # it goes on here
    steps(model, optimizer, x, y)
    parameters = came["optimizer"].param_groups[0]["params"]
    return {
        "ranks": ranks,
        "there": [value["devices"] for value in run.values],
        "here": sorted({str(tensor.device) for tensor in (*on(came["model"], came["optimizer"]), came["made"], x)}),
        "is_one": all(a is b for a, b in zip(parameters, came["model"].parameters(), strict=True)),
        "off": distance(ends(came["model"]), ends(model)),
    }


CASES: dict[str, Callable[[str], Any]] = {
    **{name: partial(compared, name=name) for name in LOOPS},
    "carried": carried,
}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
