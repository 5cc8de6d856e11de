"""``memory.py cycles|errors``: what out of memory leaves behind on a card, and how its errors read when it is full."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from device import TRAININGS, cut_down, fill, release

from nbaccel import Accelerator
from nbaccel.failures import Recovery, recovery_of
from nbaccel.train.data.placement import to_device
from nbaccel.train.memory import free_memory

CUDA = torch.device("cuda", 0)
CYCLES = 20


def cycles() -> dict[str, object]:
    """Allocated and reserved bytes after each of twenty times out of memory and `free_memory`."""
    cut_down()
    training = TRAININGS["gpt2"]
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(*training.make())

    def step(size: int) -> bool:
        try:
            accelerator.backward(training.loss(model, to_device(training.batch(size), CUDA)))
        except torch.OutOfMemoryError:
            return False
        optimizer.step()
        return True

    assert step(1), "one sample of GPT-2 does not fit into a T4"  # optimizer state, cuBLAS workspaces
    optimizer.zero_grad()
    release()
    baseline = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    ooms = torch.cuda.memory_stats()["num_ooms"]
    allocated, reserved = [], []
    for _ in range(CYCLES):
        assert not step(4096), "4096 sequences fit into a T4"
        optimizer.zero_grad()
        free_memory()
        allocated.append(torch.cuda.memory_allocated() - baseline[0])
        reserved.append(torch.cuda.memory_reserved() - baseline[1])
    counted = torch.cuda.memory_stats()["num_ooms"] - ooms
    return {"allocated": allocated, "reserved": reserved, "counted": counted, "works": step(1)}


def _allocation() -> None:
    torch.empty(2**33, device="cuda")


def _cublas() -> None:
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")


def _cudnn() -> None:
    torch.nn.Conv2d(3, 64, 7).cuda()(torch.ones(2, 3, 64, 64, device="cuda"))


def _kernel() -> None:
    torch.cuda.FloatTensor(2**20).normal_().sort()


def errors() -> list[dict[str, object]]:
    """For each thing that needs memory: what it raises on a full card, and what we make of it."""
    torch.cuda.init()
    held = fill(all_but_bytes=2**20)
    needs: list[Callable[[], None]] = [_allocation, _cublas, _cudnn, _kernel]
    found: list[dict[str, object]] = []
    for need in needs:
        try:
            need()
        except Exception as error:
            recovery = recovery_of(error)
            retry = recovery in (Recovery.RETRY, Recovery.RETRY_IF_NEARLY_FULL)
            found.append(
                {"need": need.__name__, "type": type(error).__name__, "text": str(error)[:300], "retry": retry}
            )
    del held
    return found


def main() -> None:
    print(json.dumps({"cycles": cycles, "errors": errors}[sys.argv[1]]()))


if __name__ == "__main__":
    main()
