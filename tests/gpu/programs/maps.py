"""``maps.py cuda|cpu CASES``: items answered on a card, among them one that breaks its process's use of the device.

Ranks share a single card where there is no second one: they have no collective. ``cpu`` raises what a card would.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from one_card import let_ranks_share
from torch import nn

import nbaccel
from gpu.facts import fact, tell_cases

_RANKS, _ITEMS, _BREAKS, _FITS = 2, 64, 13, 8
_BLOCK_BYTES = 64 * 2**20
_WIDTH = 256


def _load(accelerator: Any) -> tuple[nn.Module, torch.device]:
    torch.manual_seed(0)
    return nn.Linear(_WIDTH, 1).to(accelerator.device), accelerator.device


def _answers(state: tuple[nn.Module, torch.device], items: list[int]) -> list[float]:
    model, device = state
    with torch.no_grad():
        rows = torch.tensor(items, dtype=torch.float32, device=device)[:, None].expand(-1, _WIDTH)
        return [round(float(value), 3) for value in model(rows)[:, 0].cpu()]


def _short(state: tuple[nn.Module, torch.device], items: list[int]) -> list[float]:
    """Need a block for each item, of which a rank may hold eight."""
    device = state[1]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((_FITS + 0.5) * _BLOCK_BYTES / total, device)
    elif len(items) > _FITS:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    blocks = [
        torch.empty(_BLOCK_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device) for _ in items
    ]
    assert len(blocks) == len(items)
    return _answers(state, items)


def _broken(state: tuple[nn.Module, torch.device], items: list[int]) -> list[float]:
    """Fail in a kernel for one of the items: no later call of this process reaches the device any more."""
    device = state[1]
    if _BREAKS in items:
        if device.type != "cuda":
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.zeros(3, device=device)[torch.tensor([7], device=device)].cpu()
    return _answers(state, items)


def _wanted(device: str) -> list[float]:
    state = _load(nbaccel.Accelerator(cpu=device == "cpu"))
    return _answers((state[0].cpu(), torch.device("cpu")), list(range(_ITEMS)))


def _mapped(device: str, function: Any, **options: Any) -> Any:
    let_ranks_share(device)
    begun = time.perf_counter()
    answers = nbaccel.map(
        function, list(range(_ITEMS)), setup=_load, num_processes=_RANKS, cpu=device == "cpu", **options
    )
    fact(function.__name__.strip("_"), time.perf_counter() - begun, "s")
    return answers


def _told(device: str, answers: Any) -> dict[str, Any]:
    wanted = _wanted(device)
    failed = {failed.index: failed.error for failed in answers.failed}
    off = [abs(one - two) for n, (one, two) in enumerate(zip(answers, wanted, strict=True)) if n not in failed]
    return {"failed": failed, "off": max(off), "count": len(answers)}


def short(device: str) -> dict[str, Any]:
    """Calls that run out of the card's memory are halved."""
    return _told(device, _mapped(device, _short, batch_size=32))


def broken(device: str) -> dict[str, Any]:
    """An item that breaks the device is given up, after new processes; the others are answered."""
    return _told(device, _mapped(device, _broken, batch_size=8))


def used(device: str) -> dict[str, Any]:
    """This process has used the device: the ranks start from a clean one, and get the items."""
    torch.zeros(1, device=device)
    return _told(device, _mapped(device, _answers))


CASES = {case.__name__: case for case in (short, broken, used)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
