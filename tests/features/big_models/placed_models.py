"""Models for device maps: small, with tied weights, buffers, and tensors that modules have beside modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nbaccel.features.big_models.empty_weights import init_empty_weights

VOCABULARY, WIDTH, BLOCKS = 32, 24, 4


class PlacedBlock(nn.Module):
    """Attention, whose forward uses weights of a module inside without calling it, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.mlp(x) * self.scale
        return x if offset is None else x + offset


class PlacedNet(nn.Module):
    """Embeddings, blocks and a head, which may be the embeddings'; a parameter and two buffers of its own."""

    def __init__(self, tied: bool = False, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width))
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(PlacedBlock(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.linspace(0, 1, width))
        self.register_buffer("table", torch.arange(width).float(), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.embed(ids) + self.start + self.positions
        for block in self.blocks:
            x = block(x, offset=self.table)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(x), "hidden": [x]}


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))


def plain(tied: bool = False, **arguments: Any) -> PlacedNet:
    """A model with numbers, ready for evaluation."""
    torch.manual_seed(0)
    model = PlacedNet(tied, **arguments)
    with torch.no_grad():
        for buffer in model.norm.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def empty(tied: bool = False, **arguments: Any) -> PlacedNet:
    """The same model without numbers."""
    with init_empty_weights():
        return PlacedNet(tied, **arguments).eval()


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids())["logits"]
    return found


def saved(model: nn.Module, folder: Path) -> Path:
    """Write the weights of `model` into `folder` as one file; a tied tensor has one name there."""
    folder.mkdir(exist_ok=True, parents=True)
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), name)
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in seen.values()}, folder / "model.safetensors")
    return folder
