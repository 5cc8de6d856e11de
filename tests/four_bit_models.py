"""A model with weights of four bits, as bitsandbytes makes them, that computes on a CPU without it.

`Params4bit` has the name, the attributes and the habits of bitsandbytes' class: packed bytes, scales beside them that
no `parameters()` shows, a `to` of its own, more entries in the state dict. Moving and casting it is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, BLOCKS, RANK = 32, 64, 2, 2

_GROUP = 64


class QuantState:
    """Scales of one weight, and its shape.  table: the value of each code."""

    def __init__(self, scales: Tensor, shape: torch.Size) -> None:
        self.scales = scales
        self.shape = shape
        self.table = torch.linspace(-1, 1, 16)


class Params4bit(nn.Parameter):
    """Two codes in each byte. It has no values of its own: `dequantised` has."""

    quant_state: QuantState

    def __new__(cls, data: Tensor, requires_grad: bool = False, quant_state: Any = None) -> Self:
        made: Self = torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[attr-defined]
        made.quant_state = quant_state
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        groups = weight.reshape(-1, _GROUP)
        scales = groups.abs().amax(1, keepdim=True)
        codes = ((groups / scales + 1) * 7.5).round().to(torch.uint8).reshape(-1, 2)
        return cls((codes[:, 0] * 16 + codes[:, 1]).reshape(-1, 1), quant_state=QuantState(scales, weight.shape))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.chunk, torch.split):  # as in bitsandbytes: pieces of packed bytes are of the class too
            raise NotImplementedError(f"{function.__name__} of packed weights")
        return super().__torch_function__(function, types, args, kwargs or {})

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        data = self.data.as_subclass(Tensor).long().reshape(-1)
        codes = torch.stack([data // 16, data % 16], 1).reshape(-1, _GROUP)
        state = self.quant_state
        return (state.table[codes] * state.scales).reshape(state.shape).to(dtype)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        raise AssertionError(f"quantised weights were moved or cast: to{args}")

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        return self.to("cuda")

    def cpu(self, *args: Any, **kwargs: Any) -> Self:
        return self.to("cpu")

    half = float = double = bfloat16 = to  # type: ignore[assignment]


class Linear4bit(nn.Linear):
    """A frozen layer. Its state dict has entries for the scales, which belong to no parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = Params4bit.of(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.dequantised(x.dtype))  # type: ignore[operator]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state  # type: ignore[union-attr]
        destination[f"{prefix}weight.absmax"] = state.scales  # type: ignore[union-attr]
        destination[f"{prefix}weight.quant_map"] = state.table  # type: ignore[union-attr]


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(inputs, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


class FourBitNet(nn.Module):
    """Embeddings, blocks of four bits with adapters, a BatchNorm and a head; all but adapters and norm are frozen.

    tied: the head is the embeddings'.  is_marked: it has transformers' attributes for models loaded in four bits.
    """

    def __init__(self, tied: bool = False, adapted: bool = True, is_marked: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layers = [Linear4bit(width, width) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(Adapted(layer, width, width) if adapted else layer for layer in layers)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)
        self.norm.requires_grad_(adapted)
        if is_marked:
            self.is_loaded_in_4bit = self.is_quantized = True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mean(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def made(seed: int = 0, **choices: Any) -> FourBitNet:
    """Return a model whose numbers depend on `seed` alone."""
    torch.manual_seed(seed)
    return FourBitNet(**choices)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def samples(count: int = 32) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(0, VOCABULARY, (5,)) for _ in range(count)]


def names_of_base(model: nn.Module) -> Iterator[str]:
    """Yield the names in the state dict that no checkpoint may have."""
    return (name for name in model.state_dict() if not ("lora" in name or name.startswith("norm.")))
