"""Rows of nested values: counted as a guess, and joined. Runs in ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nbaccel.train.distributed.nested import children, map_children

__all__ = ["count_rows", "join_batches"]


def count_rows(value: Any) -> int | None:
    """Return the first dimension of the first tensor; None without one. Of a batch that is a guess, to be shown only.

    A `CountedBatch` knows how many samples it has.
    """
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    for _, child in children(value):
        rows = count_rows(child)
        if rows is not None:
            return rows
    return None


def join_batches(data: Sequence[Any], dim: int = 0) -> Any:
    """Join the tensors of values of one structure along a dimension.

    Example:
        >>> join_batches([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}])["x"].shape
        torch.Size([3, 2])
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim) if first.ndim else first
    parts = iter([[child for _, child in children(value)] for value in data])
    columns = iter(list(zip(*parts, strict=True)))
    return map_children(lambda _: join_batches(next(columns), dim), first)
