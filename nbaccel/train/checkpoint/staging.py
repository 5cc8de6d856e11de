"""Staging: host memory that holds a training's state while it is written in the background. Runs in ranks.

The buffers are kept from save to save: allocating fresh memory would take as long as the copy into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nbaccel.hardware import usable_memory

__all__ = ["Staging"]

_SHARE_OF_HOST = 0.25
"""Share of the host's available memory that may be pinned: pinned memory cannot be swapped out, or used otherwise."""


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
        self._pinned = _Pinned()
        self._under_way: set[torch.device] = set()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor`, as it is now, to the CPU. An earlier copy of that name in that part is overwritten.

        A copy from CUDA is complete only after `settle`.
        """
        source = tensor.detach()
        buffer = self._buffers.get((part, name))
        if buffer is None or not _fits(buffer, source):
            self._buffers.pop((part, name), None)
            buffer = self._pinned.like(source) if source.is_cuda else torch.empty_like(source, device="cpu")
            self._buffers[part, name] = buffer
        # In the same layout the copy is one piece; in another one it needs a copy on the device, which may be full.
        if source.is_cuda and buffer.stride() == source.stride():
            buffer.copy_(source, non_blocking=True)
            self._under_way.add(source.device)
        else:
            buffer.copy_(source)
        return buffer

    def settle(self) -> None:
        """Wait until all copies are complete: one wait for all of them."""
        while self._under_way:
            torch.cuda.current_stream(self._under_way.pop()).synchronize()

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()
        self._pinned = _Pinned()


class _Pinned:
    """Memory that a GPU copies into at full speed, as long as it takes no more than its share of the host."""

    def __init__(self) -> None:
        self._left_bytes: int | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor on the CPU, in the layout of `tensor`, pinned if the share allows it."""
        if self._takes(tensor.nbytes):
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError:  # the system has no more memory to pin, or does not let this process
                self._left_bytes = 0
        return torch.empty_like(tensor, device="cpu")

    def _takes(self, size_bytes: int) -> bool:
        if self._left_bytes is None:
            self._left_bytes = int(_SHARE_OF_HOST * usable_memory().available_bytes)
        taken_bytes = 1 << max(0, size_bytes - 1).bit_length()  # torch pins powers of two
        if taken_bytes > self._left_bytes:
            return False
        self._left_bytes -= taken_bytes
        return True


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    """Return whether `buffer` is like one that would be made for `tensor`."""
    if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        return False
    if tensor.is_contiguous():  # whatever its strides along dimensions of one element
        return buffer.is_contiguous()
    return buffer.stride() == torch.empty_like(tensor, device="meta").stride()
