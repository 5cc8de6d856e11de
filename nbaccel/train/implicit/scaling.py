"""Scaling: finds the products in a graph that torch's GradScaler made. Runs in ranks.

Its factor changes while a loop trains, and is not part of the divisor of a loss.
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
    """Record losses that a scaler has scaled, until `leave_scalers`.

    withholds: returns whether a call of a scaler has to wait; the call then does nothing. Called with the optimizer,
    if one is about to step.
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
    """Stop recording, and drop the last product: a graph leads to the weights of its model."""
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
    """Return whether `node` is the product that the last call of a scaler has made."""
    return bool(_last) and node is _last[0]


def forget_scaled() -> None:
    """Drop the product after its backward, so that its graph is freed."""
    _last.clear()
