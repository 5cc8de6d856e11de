"""Scaling: which products in a graph were made by torch's GradScaler. Runs in ranks.

Its factor changes while a loop trains, and is no part of what a loss is divided by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["forget_scaled", "is_scaled", "leave_scalers", "watch_scalers"]

_last: list[Any] = []
_withholds: list[Callable[[Any], bool]] = []


def watch_scalers(withholds: Callable[[Any], bool]) -> None:
    """Know losses that a scaler has scaled, until `leave_scalers`.

    withholds: whether what a scaler is told has to wait; it then does nothing. Asked with the optimizer, if one is to
    step.
    """
    _withholds[:] = [withholds]
    kind: Any = torch.amp.GradScaler
    original = kind.scale
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if _withholds and isinstance(scaled, Tensor) and scaled is not outputs:
            _last[:] = [scaled.grad_fn]
        return scaled

    kind.scale = scale
    for name in ("unscale_", "step", "update"):
        setattr(kind, name, _unless_withheld(getattr(kind, name), steps=name == "step"))


def leave_scalers() -> None:
    """Know of no losses any more, and keep none: a graph leads to the weights of its model."""
    _withholds.clear()
    _last.clear()


def _unless_withheld(original: Callable[..., Any], steps: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = kwargs.get("optimizer", args[0] if args else None) if steps else None
        is_withheld = bool(_withholds) and _withholds[0](optimizer)
        return None if is_withheld else original(scaler, *args, **kwargs)

    return call


def is_scaled(node: Any) -> bool:
    """Whether `node` is the product that the last call of a scaler has made."""
    return bool(_last) and node is _last[0]


def forget_scaled() -> None:
    """The backward of that product is over; its graph shall not be kept."""
    _last.clear()
