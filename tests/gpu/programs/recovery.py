"""``recovery.py overhead|ranks|segments``: `forward_backward` on a card, against the plain loop and in two ranks."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device import TRAININGS, cut_down
from torch import Tensor

from nbaccel import Accelerator
from nbaccel.events import Event, OutOfMemory, outlet
from nbaccel.failures import Recovery, recovery_of
from nbaccel.train.data.placement import to_device

CUDA = torch.device("cuda", 0)
TURNS, STEPS, MICRO = 20, 10, 8


def overhead() -> dict[str, float]:
    """Seconds per step of GPT-2 at eight sequences, plain and by `forward_backward`, in turns."""
    training = TRAININGS["gpt2"]
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(*training.make())
    batch = to_device(training.batch(MICRO), CUDA)

    def plain() -> None:
        accelerator.backward(training.loss(model, batch))

    def ours() -> None:
        accelerator.forward_backward(lambda part: training.loss(model, part), batch)

    def turn(step: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    turn(plain)
    turn(ours)
    taken = [(turn(plain), turn(ours)) for _ in range(TURNS)]
    return {
        "plain_s": statistics.median(one for one, _ in taken),
        "ours_s": statistics.median(other for _, other in taken),
        "ratio": statistics.median(other / one for one, other in taken),
    }


def _trained(batch_size: int, micro_batch_size: int | None) -> tuple[list[float], list[int]]:
    """Losses of four steps in double precision, and the sizes at which memory ran out."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 4096),
        torch.nn.GELU(),
        torch.nn.Linear(4096, 4096),
        torch.nn.GELU(),
        torch.nn.Linear(4096, 1),
    ).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(batch_size, 64, generator=generator, dtype=torch.float64).to(CUDA)
    seen: list[Event] = []
    losses = []

    def loss_fn(part: Tensor) -> Tensor:
        loss: Tensor = model(part).square().mean()
        return loss

    with outlet(seen.append):
        for _ in range(4):
            loss = accelerator.forward_backward(loss_fn, batch, micro_batch_size=micro_batch_size)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    failed = [event.micro_batch_size for event in seen if isinstance(event, OutOfMemory)]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    losses.append(float(weights.sum()))
    return losses, failed


def segments() -> dict[str, Any]:
    """Out of memory with expandable segments: the losses of a run that fits, or an error that asks for a restart."""
    cut_down(4 * 2**30)
    expected, _ = _trained(40_000, micro_batch_size=1000)
    try:
        losses, failed = _trained(40_000, micro_batch_size=None)
    except RuntimeError as error:
        return {"restart": recovery_of(error) is Recovery.RESTART, "text": str(error)[:300]}
    return {"losses": losses, "expected": expected, "failed": failed}


def ranks() -> dict[str, Any] | None:
    """Two ranks on one card, exchanging by gloo; the second one has little memory. What rank 0 reports of both."""
    os.environ["LOCAL_RANK"] = "0"  # both on the one card, where NCCL would refuse them
    dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 1:
            cut_down(4 * 2**30)
        losses, failed = _trained(40_000, micro_batch_size=None)
        said: list[Any] = [None, None]
        dist.all_gather_object(said, (losses, failed))
    finally:
        dist.destroy_process_group()
    return {"losses": [one for one, _ in said], "failed": [one for _, one in said]}


def main() -> None:
    result = {"overhead": overhead, "segments": segments, "ranks": ranks}[sys.argv[1]]()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))


if __name__ == "__main__":
    main()
