"""Models whose memory grows with the batch, and the largest batch that a plain loop can train them with.

A small GPT and a small CNN: attention, embeddings and cross-entropy, convolutions and batch norm, AdamW and momentum
make the memory of a step as crooked as that of large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbaccel.testing import MemLimit

VOCABULARY, CONTEXT = 128, 32


class Gpt(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        hidden = self.embedding(tokens_BT) + self.position[:T]
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Hungry:
    """One training: how to make its model and optimizer, its loss, and a batch of n samples."""

    name: str
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]

    def make_seeded(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        return self.make()

    def trains(self, size: int, limit_bytes: int, steps: int = 3) -> bool:
        """Whether a plain loop gets through `steps` steps with batches of `size`."""
        model, optimizer = self.make_seeded()
        try:
            with MemLimit(limit_bytes) as memory:
                memory.count(model)
                for _ in range(steps):
                    batch = self.batch(size)
                    loss = self.loss(model, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return False
        return True

    def largest(self, limit_bytes: int) -> int:
        """The largest batch that trains within `limit_bytes`, by trying; 0 if none does."""
        low, high = 0, 1
        while self.trains(high, limit_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.trains(middle, limit_bytes) else (low, middle)
        return low


def _gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Gpt()
    return model, torch.optim.AdamW(model.parameters())


def _gpt_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits_BTV = model(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def _cnn() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = cnn()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


GPT = Hungry("GPT", _gpt, _gpt_loss, lambda size: torch.zeros(size, CONTEXT, dtype=torch.int64))
CNN = Hungry(
    "CNN",
    _cnn,
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    lambda size: (torch.zeros(size, 3, 16, 16), torch.zeros(size, dtype=torch.int64)),
)
