"""Placement: moves batches to the device. Runs in ranks.

On CUDA the next batch is copied on a side stream while the program computes on the current one; elsewhere a batch
is moved when it is handed out, and on the CPU it is not moved.
"""

from __future__ import annotations

import functools
import os
import time
from collections import UserDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from nbaccel.train.distributed.nested import children, map_children

__all__ = ["Copier", "CudaCopier", "place", "prefetched", "to_device"]

_MOST_STAGED_BYTES = 256 << 20
"""Limit for one tensor. Pinned memory cannot be swapped out, and torch keeps it for the next batch."""

_POLL_S = 0.0005


class Copier(Protocol):
    """Copies batches in two steps."""

    def start(self, batch: Any) -> Any:
        """Begin a copy; return, without waiting, the argument for `finish`."""

    def finish(self, started: Any) -> Any:
        """Return the copied batch, ready for computation."""

    def settle(self) -> None:
        """Wait until the last started copy has read its batch, whose memory may then be overwritten."""


class CudaCopier:
    """Copies to `device` on a stream beside the one that computes; the copy overlaps with the step in between.

    A batch is in memory of the computing stream, as if the program had moved it there: the memory is freed and reused
    in that stream's order, so there is nothing to record. It may be memory that the step before has just freed,
    hence a copy begins when the steps that are queued by then are over. When batch n + 1 is begun, step n is not
    queued yet.

    A value that cannot be taken apart, of a class of its own with a `to`, is moved in the computing stream itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = _stream_beside(
            os.getpid(), torch.cuda.current_device() if device.index is None else device.index
        )
        self._is_lent = False  # the batch is read from memory that its loader may fill again
        self._reading: torch.cuda.Event | None = None
        self._can_pin = True

    def start(self, batch: Any) -> Any:
        computing = torch.cuda.current_stream(self._device)
        copies: list[tuple[Tensor, Tensor]] = []
        self._is_lent = False
        moved = self._place(batch, copies)
        # In place of https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html.
        self._beside.wait_stream(computing)  # after all memory was allocated: another thread may have freed it just now
        with torch.cuda.stream(self._beside):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        event = self._beside.record_event()
        self._reading = event if self._is_lent else None
        return moved, event, computing

    def finish(self, started: Any) -> Any:
        batch, event, origin = started
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        if computing != origin:  # the program has changed streams between two batches
            _hand_over(batch, computing)
        return batch

    def settle(self) -> None:
        """Wait for a copy that is a step old: the step that was queued since keeps the device busy meanwhile."""
        while self._reading is not None and not self._reading.query():
            time.sleep(_POLL_S)  # torch's own wait would ignore interrupts, and a step may wait for a lost peer
        self._reading = None

    def _place(self, value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
        """Return `value` on the device; tensors without their contents, whose copies are noted in `copies`."""
        if _is_plain(value):
            source = self._staged(value)
            self._is_lent |= source is value
            target = torch.empty_like(value, device=self._device)
            copies.append((target, source))
            return target
        # transformers' BatchEncoding has a `to`, which would copy from unpinned memory and block the host for a step.
        is_whole = isinstance(value, Tensor) or (hasattr(value, "to") and not isinstance(value, UserDict))
        if is_whole:
            self._is_lent |= not (isinstance(value, Tensor) and value.device.type == self._device.type)
            return to_device(value, self._device)
        return map_children(lambda child: self._place(child, copies), value)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in pinned memory: a copy from other memory blocks the host for a step, until it begins."""
        if self._can_pin and 0 < tensor.nbytes <= _MOST_STAGED_BYTES and not tensor.is_pinned():
            try:
                return tensor.pin_memory()
            except RuntimeError:  # the system has no more memory to pin, or does not let this process
                self._can_pin = False
        return tensor


@functools.cache
def _stream_beside(pid: int, index: int) -> torch.cuda.Stream:
    """Return the stream for all loops of this process with batches for that device. A forked child needs its own."""
    return torch.cuda.Stream(index)


def place(batches: Iterator[tuple[Any, bool]], device: torch.device | None) -> Iterator[tuple[Any, bool]]:
    """Return `batches`, each with its flag, on `device`; for None and the CPU they are not moved."""
    if device is None or device.type == "cpu":
        return batches
    if device.type == "cuda":
        return prefetched(batches, CudaCopier(device))
    return ((to_device(batch, device), is_last) for batch, is_last in batches)


def prefetched(batches: Iterator[tuple[Any, bool]], copier: Copier) -> Iterator[tuple[Any, bool]]:
    """Yield each batch copied; the copy of the next one has been started when a batch is handed out."""
    ahead: tuple[Any, bool] | None = None
    try:
        for batch, is_last in batches:
            done, ahead = ahead, (copier.start(batch), is_last)
            if done is not None:
                yield copier.finish(done[0]), done[1]
                del done
            copier.settle()  # before the loader is called, which may fill the same memory again
        if ahead is not None:
            done, ahead = ahead, None
            yield copier.finish(done[0]), done[1]
    finally:
        if ahead is not None:  # its memory may be freed only after its copy
            with suppress(RuntimeError):  # of a device that failed; the original error reports it
                copier.finish(ahead[0])


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with everything in it that has a `to` on `device`. Copies to CUDA do not wait for the host."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if hasattr(value, "to"):
        return _to_cuda(value, device) if device.type == "cuda" else value.to(device)
    return map_children(lambda child: to_device(child, device), value)


def _to_cuda(value: Any, device: torch.device) -> Any:
    """Move `value` by its own `to`, which may accept non_blocking (PyG's ``Data``) or not (DETR's ``NestedTensor``)."""
    try:
        return value.to(device, non_blocking=True)
    except TypeError:
        return value.to(device)


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a tensor on the host that is nothing but its elements."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.requires_grad
    )


def _hand_over(value: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of each tensor from being reused before `stream` has used it."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            value.record_stream(stream)
        return
    for _, child in children(value):
        _hand_over(child, stream)
