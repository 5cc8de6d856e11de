"""``memory.py cuda|cpu cycles|errors|compiled|segments``: what a shortage leaves behind, and how its errors read.

``cpu`` runs the same under a `MemLimit` of kilobytes, or with nothing that is full: that proves the loops alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from device import T4_BYTES, Filler, exactly, limited, release, reserved_bytes, training_of, wait
from torch import Tensor

from gpu.facts import fact, tell_cases
from nbaccel import Accelerator, free_memory
from nbaccel.base.events import Event, OutOfMemory, outlet
from nbaccel.base.failures import Recovery, recovery_of

CYCLES = 20
_TOO_MANY = 4096
MIB = 2**20
_LARGE = "a block that is larger than what is left"
FREE_MIB = (0, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)


def cycles(device: str) -> dict[str, Any]:
    """Allocated and reserved bytes after each of twenty times out of memory and `free_memory`."""
    training = training_of(device)
    with limited(device, T4_BYTES, 2_000_000) as limit:
        accelerator = Accelerator("fp16" if device == "cuda" else "no", cpu=device == "cpu")
        model, optimizer = accelerator.prepare(*training.make())

        def step(size: int) -> bool:
            try:
                accelerator.backward(training.loss(model, training.batch(size).to(device)))
            except torch.OutOfMemoryError:
                return False
            optimizer.step()
            return True

        assert step(1), "one sample does not fit"  # optimizer state, cuBLAS workspaces
        optimizer.zero_grad()
        release(device)
        baseline, ooms = (limit.live_bytes, reserved_bytes(device)), limit.refusals
        allocated, reserved = [], []
        for _ in range(CYCLES):
            assert not step(_TOO_MANY), f"{_TOO_MANY} sequences fit"
            optimizer.zero_grad()
            free_memory()
            allocated.append(limit.live_bytes - baseline[0])
            reserved.append(reserved_bytes(device) - baseline[1])
        counted = limit.refusals - ooms
        return {"allocated": allocated, "reserved": reserved, "counted": counted, "works": step(1)}


def _is_retry(error: BaseException) -> bool:
    return recovery_of(error) in (Recovery.RETRY, Recovery.RETRY_IF_NEARLY_FULL)


def _needs(device: str) -> dict[str, Callable[[], Any]]:
    """What makes a library load, or ask for memory of its own, when it is first used. Inputs are there already."""
    square = torch.randn(64, 64, device=device)
    image = torch.randn(2, 3, 64, 64, device=device)
    weight = torch.randn(64, 3, 7, 7, device=device)
    wave = torch.randn(4096, device=device)
    table = torch.randint(8, (1024,), device=device)
    half = square.to(torch.bfloat16 if device == "cpu" else torch.float16)
    heads = half[None, None]
    return {
        "cuBLAS": lambda: square @ square,
        "cuBLAS in half precision": lambda: half @ half,
        "cuDNN": lambda: F.conv2d(image, weight),
        "cuDNN, backward": lambda: F.conv2d(image.requires_grad_(), weight).sum().backward(),
        "cuFFT": lambda: torch.fft.rfft(wave),
        "cuSOLVER": lambda: torch.linalg.solve(square @ square.T + torch.eye(64, device=device), square),
        "a kernel that is loaded late": lambda: torch.unique(table),
        "random numbers": lambda: torch.randn(1000, device=device).sort(),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        _LARGE: lambda: torch.empty(2**33, device=device),
    }


def _cache_blocks(device: str) -> None:
    """Let torch's allocator have free blocks, large and small, so that outputs need nothing of the card."""
    large = [torch.empty(64 * MIB if device == "cuda" else 8, dtype=torch.uint8, device=device) for _ in range(4)]
    small = [torch.empty(1000, device=device) for _ in range(2000)]
    del large, small
    wait(device)


def errors(device: str) -> dict[str, Any]:
    """For each thing that needs memory: what it raises on a fuller and fuller card, and what we make of that.

    The free bytes rise until it works, so that each refusal is one of a first use.
    """
    needs = _needs(device)
    filler = Filler(device)
    refused: list[dict[str, Any]] = []
    worked: dict[str, int | None] = {}
    for name, need in needs.items():
        worked[name] = None
        for free_mib in FREE_MIB:
            filler.free()
            _cache_blocks(device)  # anew: where torch's own allocator was refused, it gave them back
            left = filler.fill(free_mib * MIB)
            try:
                if name == _LARGE and device == "cpu":
                    raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 8.00 GiB.")
                need()
                wait(device)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                refused.append({"need": name, "free": left, "error": text, "is_retry": _is_retry(error)})
                fact("refused", refused[-1])
            else:
                worked[name] = free_mib
                break
    filler.free()
    fact("worked_at_mib", worked)
    ones = torch.ones(2, 2, device=device)
    return {"refused": refused, "worked": worked, "after": float((ones @ ones[:, :1]).sum())}


def compiled(device: str) -> dict[str, Any]:
    """Functions that are compiled on a full card: Triton loads their kernels past torch's allocator."""
    x = torch.randn(1 << 20 if device == "cuda" else 64, device=device)
    compile_ = torch.compile(backend="inductor" if device == "cuda" else "eager")

    def function(number: int) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            return (F.gelu(x * number) + x.sin()).sum()

        return compile_(f)

    function(1)(x)  # what the compiler itself needs
    filler = Filler(device)
    refused = []
    for number, free_mib in enumerate((0, 2), start=2):
        torch._dynamo.reset()
        left = filler.fill(free_mib * MIB)
        try:
            function(number)(x)
            wait(device)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:400]
            refused.append({"free": left, "error": text, "is_retry": _is_retry(error)})
            fact("refused", refused[-1])
    filler.free()
    torch._dynamo.reset()
    return {"refused": refused, "after": float(function(9)(x)) == float(function(9)(x))}


def _trained(device: str, batch_size: int, width: int, micro: int | None) -> tuple[list[float], list[int]]:
    """Losses of four steps, and the sizes at which memory ran out."""
    exactly()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=device == "cpu")
    layers = torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = torch.randn(batch_size, 64, generator=torch.Generator().manual_seed(1)).to(device)
    seen: list[Event] = []
    losses = []

    def loss_fn(part: Tensor) -> Tensor:
        loss: Tensor = model(part).square().mean()
        return loss

    with outlet(seen.append):
        for _ in range(4):
            loss = accelerator.forward_backward(loss_fn, batch, micro_batch_size=micro)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses, [event.micro_batch_size for event in seen if isinstance(event, OutOfMemory)]


def segments(device: str) -> dict[str, Any]:
    """Out of memory, as the allocator is set: the losses of a run that fits, or an error that asks for a restart."""
    fact("allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as it comes"))
    size, width = (40_000, 4096) if device == "cuda" else (400, 64)
    with limited(device, 2 * 2**30, 500_000):
        expected, _ = _trained(device, size, width, micro=size // (40 if device == "cuda" else 4))
        try:
            losses, failed = _trained(device, size, width, micro=None)
        except RuntimeError as error:
            return {"restart": recovery_of(error) is Recovery.RESTART, "text": str(error)[:300]}
    return {"losses": losses, "expected": expected, "failed": failed}


CASES = {case.__name__: case for case in (cycles, errors, compiled, segments)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
