"""``quantised.py cuda|cpu CASES``: adapters beside weights of four bits, which bitsandbytes packs on the card.

``cpu`` trains the stand-in of `four_bit_models`, and so does a card without bitsandbytes: the fact says which it was.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from device import allocated_bytes, exactly
from safetensors.torch import load_file
from torch import Tensor, nn

from four_bit_models import RANK, Adapted, Linear4bit
from gpu.facts import fact, tell_cases
from nbaccel import Accelerator

_BLOCKS, _WIDTH = 4, {"cuda": 1024, "cpu": 64}
_STEPS = 3


def _is_real(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("bitsandbytes") is not None


def _layer(device: str) -> nn.Module:
    width = _WIDTH[device]
    if not _is_real(device):
        return Linear4bit(width, width)
    import bitsandbytes

    layer: nn.Module = bitsandbytes.nn.Linear4bit(
        width, width, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True
    )
    return layer.to(device)  # here it is packed


def _made(device: str) -> nn.Module:
    torch.manual_seed(0)
    exactly()
    width = _WIDTH[device]
    model = nn.Sequential(*(Adapted(_layer(device), width, width) for _ in range(_BLOCKS)))
    if _is_real(device):
        for block in model:
            block.lora_A.to(device)
            block.lora_B.to(device)
    return model


def _bits(model: nn.Module) -> list[int]:
    frozen = (each for each in model.parameters() if not each.requires_grad)
    return [int(each.detach().as_subclass(Tensor).view(torch.uint8).sum(dtype=torch.int64)) for each in frozen]


def trained(device: str) -> dict[str, Any]:
    """Three steps of fp16, a checkpoint after the first of them, and the same steps again from there."""
    is_real = _is_real(device)
    accelerator = Accelerator(mixed_precision="fp16" if is_real else "no", cpu=not is_real)
    model: Any = _made(device)
    before = _bits(model)
    optimizer: Any = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.linspace(-1, 1, _WIDTH[device]).repeat(4, 1).to(accelerator.device)

    def step() -> float:
        loss = (model(inputs) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with tempfile.TemporaryDirectory() as folder:
        first = step()
        accelerator.save_state(Path(folder) / "saved")
        after = [step() for _ in range(_STEPS)]
        accelerator.load_state(Path(folder) / "saved")
        again = [step() for _ in range(_STEPS)]
        state = load_file(Path(folder) / "saved" / "model.safetensors")
    fact("checkpoint", sum(tensor.nbytes for tensor in state.values()), "bytes")
    fact("card", allocated_bytes(device), "bytes")
    return {
        "is_real": is_real,
        "losses": [first, *after],
        "off": [abs(one - other) for one, other in zip(after, again, strict=True)],
        "base": _bits(model) == before,
        "names": sorted(state),
        "wanted": 2 * _BLOCKS,
        "rank": RANK,
    }


CASES = {case.__name__: case for case in (trained,)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
