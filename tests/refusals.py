"""A program that meets a limit of memory at ever other operations: `python refusals.py KIND ISA`.

It forks a process for each of many limits. Each trains one step of a small model and says as a line of JSON how it
ended: the text of its error, and what `nbaccel.base.memory_limit` makes of it. Where a limit falls, an allocation of
torch's, code that oneDNN generates, its work space or a reordered tensor is what is refused.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base.failures import Recovery, recovery_of
from nbaccel.base.memory_limit import fullness, is_shortage

STEP_BYTES = 500_000
MOST_BYTES = 45_000_000


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)[0]


def linear(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    return model.to(dtype), torch.randn(2048, 256, dtype=dtype)


def convolution(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1))
    return model.to(dtype), torch.randn(16, 3, 64, 64, dtype=dtype)


def recurrent(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    return Recurrent().to(dtype), torch.randn(64, 32, 64, dtype=dtype)


KINDS: dict[str, Callable[[torch.dtype], tuple[nn.Module, torch.Tensor]]] = {
    "linear": linear,
    "convolution": convolution,
    "recurrent": recurrent,
}


def held_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def limit_to(more_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed is given back, as in notebook 04
    libc.mallopt(-1, 131072)  # M_TRIM_THRESHOLD
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes() + more_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def step(kind: str, dtype: torch.dtype, more_bytes: int) -> dict[str, Any]:
    """One step with `more_bytes` to spare."""
    model, x = KINDS[kind](dtype)
    limit_to(more_bytes)
    try:
        model(x).float().square().mean().backward()
    except Exception as error:
        is_ambiguous = recovery_of(error) is Recovery.RETRY_IF_NEARLY_FULL
        is_memory, share = is_shortage(error), fullness(error)
        return {"text": str(error).splitlines()[0], "ambiguous": is_ambiguous, "memory": is_memory, "share": share}
    return {"text": ""}


def main() -> None:
    kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    torch.set_num_threads(1)
    for more_bytes in range(0, MOST_BYTES, STEP_BYTES):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                line = json.dumps(step(kind, dtype, more_bytes))
                os.write(1, line.encode() + b"\n")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
