"""Objects of all ranks: convert any picklable value to bytes and back, and join the ranks' values.

Pure; runs in ranks. Only pickles that ranks of our own process group wrote are read here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["join", "pack", "unpack"]


def pack(value: Any) -> bytes:
    """Return `value` as bytes; tensors of a device are copied to the host."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def unpack(data: bytes, device: torch.device) -> Any:
    """Return what was packed; tensors that were on a device are on `device`, whatever the sender's number was."""
    return _Unpickler(io.BytesIO(data), device).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Tensor | None:
        return value.detach().cpu() if isinstance(value, Tensor) and value.device.type != "cpu" else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def join(values: list[Any]) -> Any:
    """Join the values of all ranks: lists joined, mappings joined by key, tensors by rows, others listed by rank.

    Values of different kinds are listed by rank too.

    >>> join([["a"], ["b", "c"]]), join([{"loss": 1}, {"loss": 2}]), join(["a", "b"]), join([[1], None])
    (['a', 'b', 'c'], {'loss': [1, 2]}, ['a', 'b'], [[1], None])
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, Tensor):
        return torch.cat([tensor if tensor.ndim else tensor[None] for tensor in values])
    if isinstance(first, Mapping):
        is_alike = all(value.keys() == first.keys() for value in values)
        return {key: join([value[key] for value in values]) for key in first} if is_alike else values
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*[join(list(column)) for column in zip(*values, strict=True)])
    if isinstance(first, (list, tuple)):
        return type(first)(child for value in values for child in value)
    return values
