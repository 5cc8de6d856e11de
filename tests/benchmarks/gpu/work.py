"""Work: the models that the cells train, small and real, with their data; made by hand, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.place import Place

__all__ = ["REAL", "SMALL", "Transformer", "Work"]

_VOCABULARY = 4096


class Transformer(nn.Module):
    """A causal language model without dropout, so that all contenders compute the same."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, _VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTC = self.embedding(tokens_BT) + self.position
        for block in self.blocks:
            hidden_BTC = block(hidden_BTC, src_mask=self.mask, is_causal=True)
        logits_BTV: Tensor = self.head(hidden_BTC)
        return logits_BTV


@dataclass(frozen=True)
class Work:
    """One training: its model, the samples of a batch, and the loss of a batch.

    lr: of SGD, small enough for the sizes of a card: a training that diverges ends in NaN, which the guard refuses.
    """

    name: str
    lr: float
    model: Callable[[Place], nn.Module]
    samples: Callable[[Place, int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]

    def make(self, place: Place) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model(place)
        return model, torch.optim.SGD(model.parameters(), lr=self.lr)


def _mlp(place: Place) -> nn.Module:
    width = 8 * place.width
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def _next_token(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), tokens_BT[:, 1:].flatten())


SMALL = Work(
    "small",
    0.01,
    _mlp,
    lambda place, count: torch.randn(count, 8 * place.width),
    lambda output, batch: (output.float() - batch[:, :1]).square().mean(),
)

REAL = Work(
    "transformer",
    0.1,
    lambda place: Transformer(place.width, place.depth, place.context),
    lambda place, count: torch.randint(_VOCABULARY, (count, place.context)),
    _next_token,
)
