"""Staging: memory of the host that holds a training's state while it is written in the background. Runs in ranks.

The buffers are kept from save to save: fresh memory would cost as much to be had as the copy into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Staging"]


class Staging:
    """Copies of tensors by name, each in a buffer of its own that the next copy of that name uses again.

    >>> staging = Staging()
    >>> weight = torch.ones(2)
    >>> first = staging.copy("model", "weight", weight)
    >>> weight.zero_()
    tensor([0., 0.])
    >>> first
    tensor([1., 1.])
    >>> staging.copy("model", "weight", weight) is first
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as it is now, on the CPU. An earlier copy of that name in that part is overwritten."""
        buffer = self._buffers.get((part, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Pinned memory is what a GPU copies into at full speed.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
            self._buffers[part, name] = buffer
        buffer.copy_(tensor.detach())
        return buffer

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
