"""What `forward_backward` costs where nothing runs out, beside plain DDP: ``python tests/benchmarks/microbatch.py``.

Two gloo ranks on the CPU, each with one thread. Turns of both loops, and of the plain one again, come in random order,
the same on both ranks, so that the machine's mood falls on all of them. The ratio is that of the medians of wall time
per step; the second plain row says how far two equal things lie apart.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Accelerator
from nbaccel.testing import run_ranks

Loop = Callable[[], None]


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


def _plain(make: Callable[[], torch.nn.Module], batch: Any) -> Loop:
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _recovering(make: Callable[[], torch.nn.Module], batch: Any) -> Loop:
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]), part[1])

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.forward_backward(loss, batch)
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(name: str, turns: int) -> dict[str, list[float]]:
    """Seconds per step of each turn, by loop. In a rank."""
    gc.freeze()
    make, samples, steps = MODELS[name]
    Accelerator().wait_for_everyone()  # forms the process group that all of them share
    batch = torch.randn(samples, 256), torch.randint(0, 10, (samples,))
    loops = {"plain": _plain(make, batch), "ours": _recovering(make, batch), "plain again": _plain(make, batch)}
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    order = random.Random(0)
    for turn in range(turns + 2):
        for loop in order.sample(list(loops), len(loops)):
            step = loops[loop]
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            if turn >= 2:  # the first ones allocate
                seconds[loop].append((time.perf_counter() - start) / steps)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    for name in MODELS:
        seconds = run_ranks(2, measure, name, turns, timeout_s=600)[0]
        plain = statistics.median(seconds["plain"])
        for loop, values in seconds.items():
            median = statistics.median(values)
            pairs = statistics.median(one / other for one, other in zip(values, seconds["plain"], strict=True))
            print(f"{name:14} {loop:12} {median * 1e3:8.2f} ms   {median / plain:.3f} x plain   by turn {pairs:.3f}")


if __name__ == "__main__":
    main()
