"""``device_maps.py cuda|cpu CASES``: models with parts on the host and on the disk, that compute on the card.

``cpu`` runs the same on the host, where parts on the host stay and none is copied between streams.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from device import allocated_bytes, busy, exactly, wait
from quantised import trained
from torch import Tensor, nn

from benchmarks.offloading import Model, ids
from gpu.facts import fact, tell_cases
from nbaccel import Accelerator, dispatch_model, init_empty_weights, launch, load_checkpoint_and_dispatch

_BLOCKS, _WIDTH = 12, {"cuda": 2048, "cpu": 64}
_TURNS = 5


def _plain(device: str) -> nn.Module:
    torch.manual_seed(0)
    exactly()
    return Model(_BLOCKS, _WIDTH[device]).eval()


def _main(device: str) -> Any:
    return 0 if device == "cuda" else "cpu"


def _loaded(device: str, folder: Path, places: dict[str, Any]) -> nn.Module:
    Accelerator(cpu=True).save_model(_plain(device), folder)
    with init_empty_weights():
        model = Model(_BLOCKS, _WIDTH[device])
    loaded: nn.Module = load_checkpoint_and_dispatch(model.eval(), folder, places)
    return loaded


def _logits(model: nn.Module, device: str, where: str) -> Tensor:
    with torch.no_grad():
        busy(device)  # copies and computation shall really overlap
        found: Tensor = model(ids().to(where))
    wait(device)
    return found.cpu()


def _compared(device: str, model: nn.Module) -> dict[str, Any]:
    """How far logits are from those of the plain model on the device, over several forwards, and their seconds."""
    plain = _plain(device).to(device)
    wanted = _logits(plain, device, device)
    del plain
    off, seconds = [], []
    for _ in range(_TURNS):
        begun = time.perf_counter()
        found = _logits(model, device, "cpu")
        seconds.append(time.perf_counter() - begun)
        off.append(float((found - wanted).abs().max()))
    fact("forward", sorted(seconds)[len(seconds) // 2], "s")
    return {"off": off, "device": str(found.device)}


def host(device: str) -> dict[str, Any]:
    """Blocks wait in pinned memory of the host."""
    model = dispatch_model(_plain(device), {"": _main(device), "blocks": "cpu"})
    return _compared(device, model)


def disk(device: str) -> dict[str, Any]:
    """Blocks are read from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        return _compared(device, _loaded(device, Path(folder), {"": _main(device), "blocks": "disk"}))


def memory(device: str) -> dict[str, Any]:
    """The most that the card held in forwards, beside what stays there, in blocks."""
    with tempfile.TemporaryDirectory() as folder:
        model = _loaded(device, Path(folder), {"": _main(device), "blocks": "disk"})
        block = sum(slot.numel() * slot.itemsize for slot in model.blocks[0].parameters())
        _logits(model, device, "cpu")
        before = allocated_bytes(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_TURNS):
            _logits(model, device, "cpu")
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    blocks = max(0, peak - before) / block  # after the first forward it is not known yet what to fetch ahead
    fact("peak", blocks, "blocks")
    return {"blocks": blocks}


def cards(device: str) -> dict[str, Any]:
    """One model over two cards; the same card twice is no test of it."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    if count < 2:
        return {"cards": count, "off": []}
    places = {"embed": 0, "head": 1, **{f"blocks.{number}": 2 * number // _BLOCKS for number in range(_BLOCKS)}}
    model = dispatch_model(_plain(device), places)
    found = _compared(device, model)
    model(ids().to("cuda:0")).square().mean().backward()
    graded = all(parameter.grad is not None for parameter in model.parameters())
    return {"cards": count, "off": found["off"], "graded": graded}


def pairs(device: str) -> dict[str, Any]:
    """Two ranks train a model over two cards each; with the same samples they end as one process on one card."""
    count = torch.cuda.device_count() if device == "cuda" else 0  # by NVML: the ranks are forks
    if count < 4:
        return {"cards": count, "off": []}
    run = launch(_trained_over_two, 2, devices="0,1,2,3", setup="nbaccel.train.setup:setup_rank", timeout_s=100.0)
    model = _plain(device).to(device)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    wanted = [parameter.detach().cpu() for parameter in model.parameters()]
    off = [float((one - other).abs().max()) for got in run.values for one, other in zip(got, wanted, strict=True)]
    return {"cards": count, "off": [max(off)]}


def _trained_over_two() -> list[Tensor]:
    accelerator = Accelerator()
    model = dispatch_model(_plain("cuda"), {"": 0, **{f"blocks.{number}": 1 for number in range(_BLOCKS // 2)}})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _train(model, optimizer, "cuda")
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    accelerator.end_training()
    return found


def _train(model: nn.Module, optimizer: Any, device: str) -> None:
    for _ in range(3):
        model(ids().to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = {case.__name__: case for case in (pairs, host, disk, memory, cards, trained)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
