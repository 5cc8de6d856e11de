"""Print the largest model that trains on two cards of 16 GB, by strategy: a table of docs/memory.md.

    PYTHONPATH=tests python -m largest_model

Nothing is computed: models grow on the meta device until `estimate_memory` says that they do not fit. They are like
GPT, N blocks of width 64 N with N heads, a vocabulary of 32,000, batch 1, sequence 1024, fp16, recomputed block by
block, AdamW as torch makes it on CUDA. Of each card 1.2 GB are the driver's and NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nbaccel.features.batch_size.estimate import EstimatedDevices, EstimateSetting, estimate_memory
from nbaccel.train.step.recompute import recompute_activations

CARDS = EstimatedDevices(2, 16 * 10**9, "16 GB", 800_000_000, 400_000_000)
LENGTH, VOCABULARY, RANK = 1024, 32_000, 16

Layer = Callable[[int, int], nn.Module]


class _Dequantised(torch.autograd.Function):
    """A product with weights that are unpacked for its duration, again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ gradient.new_empty(ctx.shape), None


class FourBit(nn.Module):
    """A frozen layer of four bits for each weight and a scale for 64 of them, with an adapter of rank 16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = (outputs, inputs)
        self.register_buffer("codes", torch.empty(inputs * outputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(inputs * outputs // 64))
        self.before, self.after = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        half: Any = x.half()
        return _Dequantised.apply(half, self.shape) + self.after(self.before(half))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layer: Layer) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = layer(width, 3 * width), layer(width, width)
        self.up, self.down = layer(width, 4 * width), layer(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, blocks: int, layer: Layer) -> None:
        super().__init__()
        width = 64 * blocks
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, blocks, layer) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @property
    def size(self) -> int:
        """Number of weights, packed ones too."""
        packed = sum(2 * module.codes.numel() for module in self.modules() if isinstance(module, FourBit))
        return packed + sum(parameter.numel() for parameter in self.parameters())


def loss(model: Any, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def made(blocks: int, is_quantised: bool) -> Gpt:
    with torch.device("meta"):
        model = Gpt(blocks, FourBit if is_quantised else nn.Linear)
    if is_quantised:
        model.half()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("before" in name or "after" in name)
    recompute_activations(model, model.blocks)
    return model


def peak(strategy: str, model: nn.Module, is_fused: bool) -> int:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=is_fused or None)

    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    setting = EstimateSetting("fp16", device_type="cuda")
    found = estimate_memory(model, adamw, tokens, loss, ranks=[2], setting=setting, devices=CARDS)
    if not found.has_activations:
        raise RuntimeError(found.notes[0])
    return found.of(strategy, 2).peak


def largest(strategy: str, is_quantised: bool = False, is_fused: bool = False) -> tuple[int, int, int]:
    """Return blocks, weights and bytes at the peak of the largest model that fits."""
    low, high = 16, 96
    best = (0, 0, 0)
    while low <= high:
        blocks = (low + high) // 2
        model = made(blocks, is_quantised)
        used = peak(strategy, model, is_fused)
        if used <= CARDS.room(2):
            best, low = (blocks, model.size, used), blocks + 1
        else:
            high = blocks - 1
    return best


def main() -> None:
    print("| strategy | weights | blocks x width | peak on each card |")
    print("|---|---|---|---|")
    rows: list[tuple[str, str, dict[str, bool]]] = [
        ("`ddp`", "ddp", {}),
        ("`ddp`, `AdamW(fused=True)`", "ddp", {"is_fused": True}),
        ("`fsdp`", "fsdp", {}),
        ("`fsdp`, `AdamW(fused=True)`", "fsdp", {"is_fused": True}),
        ("`ddp`, a base of 4 bits with adapters of rank 16", "ddp", {"is_quantised": True}),
    ]
    for said, strategy, options in rows:
        blocks, size, used = largest(strategy, **options)
        print(f"| {said} | {size / 1e9:.2f} billion | {blocks} x {64 * blocks} | {used / 1e9:.1f} GB |", flush=True)


if __name__ == "__main__":
    main()
