"""``ranks.py cuda|cpu step|function|plain``: two ranks on one card, by gloo, and one that is short of memory.

NCCL refuses two ranks on one device, and gloo does not. ``cpu`` runs the same on the host.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from device import exactly, limited
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpu.facts import tell_cases
from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.base.events import Event, OutOfMemory, outlet
from nbaccel.testing import run_ranks

_GIB = 2**30


def _enter(device: str) -> int:
    """In a rank: on the first card, whatever its number; the rank."""
    os.environ["LOCAL_RANK"] = "0"
    exactly()
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    return dist.get_rank()


def _model(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    width = 4096 if device == "cuda" else 64
    layers = torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


def _weights(model: torch.nn.Module) -> float:
    return float(torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).sum())


def _batch(device: str, size: int, rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 64, generator=generator).to(device)


def _within_a_step(device: str) -> dict[str, Any]:
    rank = _enter(device)
    size = 40_000 if device == "cuda" else 400
    seen: list[Event] = []
    losses = []
    with limited(device, (2 if rank else 30) * _GIB, 500_000 if rank else 10**9), outlet(seen.append):
        accelerator = Accelerator(cpu=device == "cpu")
        bare = _model(device)
        model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4))
        batch = _batch(device, size, rank)
        for _ in range(4):
            loss = accelerator.forward_backward(lambda part: model(part).square().mean(), batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        weights = _weights(bare)
    failed = [event.micro_batch_size for event in seen if isinstance(event, OutOfMemory)]
    dist.destroy_process_group()
    return {"losses": losses, "weights": weights, "failed": failed}


def _the_function(device: str) -> dict[str, Any]:
    rank = _enter(device)
    size = 40_000 if device == "cuda" else 400
    tried: list[int] = []
    with limited(device, (2 if rank else 30) * _GIB, 500_000 if rank else 10**9):
        accelerator = Accelerator(cpu=device == "cpu")

        @find_executable_batch_size(starting_batch_size=size)
        def train(batch_size: int) -> float:
            accelerator.free_memory()
            tried.append(batch_size)
            bare = _model(device)
            model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4))
            for step in range(3):
                accelerator.backward(model(_batch(device, batch_size, rank, step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return _weights(bare)

        weights = train()
        total = int(accelerator.reduce(torch.ones((), device=device)))
    return {"tried": tried, "weights": weights, "sum": total}


def _plain(device: str) -> dict[str, Any]:
    """DDP of torch alone, beside the same batches in this process."""
    rank = _enter(device)
    size = 256
    model = DistributedDataParallel(_model(device).to(device))
    alone = _model(device).to(device)
    ways = [(model, [rank]), (alone, [0, 1])]
    for net, parts in ways:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            batch = torch.cat([_batch(device, size, part, step) for part in parts])
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    off = max(float((one - other).detach().abs().max()) for one, other in pairs)
    weights = _weights(alone)
    dist.destroy_process_group()
    return {"off": off, "weights": weights}


def step(device: str) -> Any:
    return run_ranks(2, _within_a_step, device, timeout_s=35)


def function(device: str) -> Any:
    return run_ranks(2, _the_function, device, timeout_s=35)


def plain(device: str) -> Any:
    return run_ranks(2, _plain, device, timeout_s=35)


CASES = {case.__name__: case for case in (step, function, plain)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
