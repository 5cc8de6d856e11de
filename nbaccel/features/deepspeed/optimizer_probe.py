"""Refuse what cannot be cut: optimizers whose step needs whole parameters, and types that DeepSpeed changes. In ranks.

DeepSpeed gives an optimizer flat pieces of all parameters together. That is the same training only if each element is
stepped by itself, which a small trial of the same class shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

__all__ = ["refuse_optimizer", "refuse_types"]

_WAYS_OF_A_DEVICE = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
"""Arguments that change how a step is computed and not what, and may not work for the trial."""

_SHAPES = ((4, 3), (3,))
_PIECE = 7
"""The piece of a rank: a half of both parameters of the trial, flat."""


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that trains something else when it gets flat pieces.

    Raises:
        NotImplementedError: The message says why, and what to use.
    """
    kind = type(optimizer)
    if callable(getattr(optimizer, "eval", None)):
        raise NotImplementedError(
            f"{kind.__name__} swaps weights for an evaluation, and DeepSpeed gives it copies of the model's: use AdamW "
            "or SGD, or strategy='ddp'"
        )
    arguments = inspect.signature(kind.__init__).parameters.keys() - _WAYS_OF_A_DEVICE
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name in arguments}
    make = partial(kind, **settings)
    whole = _stepped(make, _SHAPES)
    if whole is None:
        whole = _stepped(make, _SHAPES[:1])  # Muon, which wants matrices
    if whole is None:
        return  # it needs more than gradients, and says so in its first step
    piece = _stepped(make, ((_PIECE,),))
    if piece is None or not torch.allclose(piece, whole[:_PIECE], rtol=1e-4, atol=1e-6, equal_nan=False):
        raise NotImplementedError(
            f"{kind.__name__} computes with whole parameters, and DeepSpeed gives it flat pieces of them: use AdamW or "
            "SGD, or strategy='ddp'"
        )


def _stepped(make: Callable[[list[Parameter]], Any], shapes: tuple[tuple[int, ...], ...]) -> Tensor | None:
    """Return the elements of parameters after three steps, the same ones in any shapes; None if it cannot."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    elements = torch.linspace(-1, 1, sum(torch.Size(shape).numel() for shape in _SHAPES), device="cpu")
    own = [
        Parameter(part.reshape(shape).clone())
        for part, shape in zip(elements[: sum(sizes)].split(sizes), shapes, strict=True)
    ]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            optimizer = make(own)
            # Without hooks on steps, by which the steps of a training are counted.
            step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
            for number in range(3):
                gradients = (elements * 3 + number).sin()[: sum(sizes)].split(sizes)
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient.reshape(parameter.shape).clone()
                step(optimizer)
    except Exception:
        return None
    return torch.cat([parameter.detach().flatten() for parameter in own])


def refuse_types(model: Module, precision: str, stage: int) -> None:
    """Refuse parameters in a type that DeepSpeed would change, and those that it cannot cut.

    Args:
        precision: "no", "fp16" or "bf16".

    Raises:
        ValueError: Names some of them.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars and stage == 3:
        raise ValueError(
            f"{', '.join(scalars[:3])} has no dimension, and DeepSpeed's stage 3 cannot cut it: give it the shape "
            "(1,), or use zero_stage=2, or strategy='fsdp'"
        )
    halves = (torch.float16, torch.bfloat16)
    others = [
        f"{name} ({parameter.dtype})".replace("torch.", "")
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dtype != torch.float32
        and not (parameter.dtype in halves and (precision != "no" or (stage == 3 and not parameter.requires_grad)))
    ]
    if others:
        raise ValueError(
            f"mixed_precision={precision!r}, and DeepSpeed would change the type of {len(others)} parameters, "
            f"{', '.join(others[:3])}: give mixed_precision='bf16' for a model in half precision, or call "
            "model.float() before prepare, or use strategy='ddp'"
        )
