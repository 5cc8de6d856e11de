"""A small training in find_executable_batch_size, and what its ranks tell about it afterwards. Called in ranks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.testing import Faults

START = 16
PLACES = {
    "before DDP": "beginning",
    "forward": "forward",
    "backward": "backward",
    "optimizer step": "optimizer",
    "after the step, while peers compute": "after optimizer",
    "after peers have finished": "end",
}
"""Where memory runs out, and the point of `Faults` for it."""


def digest(model: torch.nn.Module) -> str:
    """Equal for models of equal weights, to the bit."""
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def training(accelerator: Accelerator, faults: Faults, steps: int = 3) -> Callable[..., Any]:
    """``train(batch_size)`` as Accelerate's documentation has it: everything but the Accelerator is made inside."""

    @find_executable_batch_size(starting_batch_size=START)
    def train(batch_size: int) -> tuple[int, str]:
        accelerator.free_memory()
        torch.manual_seed(0)
        faults.at("beginning")
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        with faults.in_model(model), faults.in_optimizer(optimizer.optimizer):
            for faults.step in range(steps):
                accelerator.backward(model(torch.randn(batch_size, 8)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        faults.at("end")
        return batch_size, digest(accelerator.unwrap_model(model))

    return train


def out_of_memory_everywhere(ranks: tuple[int, ...]) -> dict[str, Any]:
    """What `training` returns, and how many faults came to pass, for each place where memory runs out on `ranks`.

    The group and a DDP module are held by the program all the while.
    """
    accelerator = Accelerator()
    told: dict[str, Any] = {}
    held = [dist.group.WORLD, accelerator.prepare(torch.nn.Linear(2, 1))]
    for place, point in PLACES.items():
        faults = Faults()
        for rank in ranks:
            faults.oom_at(point, rank=rank, **({} if point in ("beginning", "end") else {"step": 1}))
        with faults:
            told[place] = (*training(accelerator, faults)(), len(faults.fired))
    del held
    told["sum"] = int(accelerator.reduce(torch.ones(())))
    told["threads"] = [thread.name for thread in threading.enumerate() if thread.name == "nbaccel-watcher"]
    return told
