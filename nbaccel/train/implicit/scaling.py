"""Scaling: which products in a graph were made by torch's GradScaler. Runs in ranks.

Its factor changes while a loop trains, and is no part of what a loss is divided by.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["forget_scaled", "is_scaled", "watch_scalers"]

_last: list[Any] = []


def watch_scalers() -> None:
    """Know losses that a scaler has scaled, from now on. Once per process."""
    kind: Any = torch.amp.GradScaler
    original = kind.scale
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and scaled is not outputs:
            _last[:] = [scaled.grad_fn]
        return scaled

    kind.scale = scale


def is_scaled(node: Any) -> bool:
    """Whether `node` is the product that the last call of a scaler has made."""
    return bool(_last) and node is _last[0]


def forget_scaled() -> None:
    """The backward of that product is over; its graph shall not be kept."""
    _last.clear()
