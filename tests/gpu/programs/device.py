"""What the programs of this folder share: a card that is cut down to a T4, and two models of known size."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T4_BYTES = 15 * 2**30


def cut_down(limit_bytes: int = T4_BYTES) -> None:
    """Let this process have `limit_bytes` of the card (pytorch #69688: torch's allocator alone keeps to it)."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), 0)


def fill(all_but_bytes: int) -> Tensor:
    """Take the card's memory, as another process would, and leave `all_but_bytes`."""
    free, _ = torch.cuda.mem_get_info(0)
    return torch.empty(max(1, free - all_but_bytes), dtype=torch.uint8, device="cuda")


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class Training:
    """How to make a model with its optimizer, its loss, and a batch of n samples on the host."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]


def _gpt2() -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())  # 124 M parameters; nothing is downloaded
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _resnet50() -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))  # its defaults are ResNet-50
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


TRAININGS = {
    "gpt2": Training(
        _gpt2,
        lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        lambda size: torch.zeros(size, 512, dtype=torch.int64),
    ),
    "resnet50": Training(
        _resnet50,
        lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
        lambda size: (torch.zeros(size, 3, 224, 224), torch.zeros(size, dtype=torch.int64)),
    ),
}
