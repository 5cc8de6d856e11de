"""Sharing: inputs cut into one part per rank, for inference and evaluation. Pure; runs in ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["share"]


def share(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> Any:
    """The part of `inputs` that is `rank`'s; see `ProcessControl.split_between_processes`.

    Raises:
        TypeError: `inputs` has no order to cut by.
        ValueError: values of a mapping with different lengths.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(values) for key, values in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes needs values of equal length, got {lengths}")
        return {key: share(values, rank, world_size, apply_padding) for key, values in inputs.items()}
    if isinstance(inputs, (str, bytes)) or not (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")):
        raise TypeError(
            f"split_between_processes cannot cut a {type(inputs).__name__} into parts: give it a list, "
            "a tuple, a tensor or an array"
        )
    length, extra = divmod(len(inputs), world_size)
    start = rank * length + min(rank, extra)
    part = inputs[start : start + length + (rank < extra)]
    missing = (length + bool(extra)) - len(part)
    return _repeat_last(part, inputs, missing) if apply_padding and missing and len(inputs) else part


def _repeat_last(part: Any, inputs: Any, times: int) -> Any:
    last = inputs[-1:]
    if isinstance(part, torch.Tensor):
        return torch.cat([part, *[last] * times])
    if isinstance(part, (list, tuple)):
        return part + last * times
    if "numpy" in sys.modules and isinstance(part, sys.modules["numpy"].ndarray):
        return sys.modules["numpy"].concatenate([part, *[last] * times])
    return [*part, *list(last) * times]
