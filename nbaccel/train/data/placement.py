"""Placement: batches on their way to the device. Runs in ranks.

On CUDA the next batch is copied on a side stream while the program computes on the one in hand; elsewhere a batch
is moved when it is handed out, and on the CPU it is there already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from nbaccel.train.talk.nested import children, map_children

__all__ = ["Copier", "CudaCopier", "place", "prefetched", "to_device"]


class Copier(Protocol):
    """Copies batches in two steps."""

    def start(self, batch: Any) -> Any:
        """Begin to copy; returns without waiting what `finish` takes."""

    def finish(self, started: Any) -> Any:
        """The copied batch, for whoever computes from now on."""


class CudaCopier:
    """Copies to `device` on a stream of its own; copies overlap with computing where the batch is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device)
            return moved, self._stream.record_event()

    def finish(self, started: Any) -> Any:
        batch, event = started
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        _hand_over(batch, computing)
        return batch


def place(batches: Iterator[tuple[Any, bool]], device: torch.device | None) -> Iterator[tuple[Any, bool]]:
    """`batches`, each with its flag, on `device`; None and the CPU: as they are."""
    if device is None or device.type == "cpu":
        return batches
    if device.type == "cuda":
        return prefetched(batches, CudaCopier(device))
    return ((to_device(batch, device), is_last) for batch, is_last in batches)


def prefetched(batches: Iterator[tuple[Any, bool]], copier: Copier) -> Iterator[tuple[Any, bool]]:
    """Each batch copied; the copy of the next one has been started when a batch is handed out."""
    ahead: tuple[Any, bool] | None = None
    for batch, is_last in batches:
        started = copier.start(batch)
        if ahead is not None:
            yield copier.finish(ahead[0]), ahead[1]
        ahead = started, is_last
    if ahead is not None:
        yield copier.finish(ahead[0]), ahead[1]


def to_device(value: Any, device: torch.device) -> Any:
    """Everything in `value` that has a `to`, on `device`. Copies to CUDA do not wait for the host."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if hasattr(value, "to"):
        return value.to(device)
    return map_children(lambda child: to_device(child, device), value)


def _hand_over(value: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of each tensor from being given away before `stream` has used it."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
        return
    for _, child in children(value):
        _hand_over(child, stream)
