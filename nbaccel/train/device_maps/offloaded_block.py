"""Blocks whose weights wait on the host or on the disk, and come to their device for a forward. Runs in ranks.

Between forwards the tensors of a block are on the meta device, so that a use of them outside of the block's forward is
an error. The block that follows is fetched while one computes: as the last forward had it, and in the first one as the
model has them. On the CPU that means that the system reads its pages ahead; on CUDA it is copied on a side stream, as
soon as the block before it is queued, and at most two blocks are on the device. No thread is needed for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.device_maps.weight_slots import RecordedWeights, Slot, placed

__all__ = ["OffloadedBlock", "Offloading"]

_MOST_STAGED_BYTES = 1 << 30
"""Limit for one tensor in pinned memory, which cannot be swapped out; a larger one is copied from where it is."""


class OffloadedBlock:
    """A module with the tensors in it that are fetched for its forward. Its methods are hooks of the module.

    slots: of all tensors below the module, or of those of its own.  device: where it computes.
    """

    def __init__(self, name: str, module: Module, slots: Sequence[Slot], offloading: Offloading) -> None:
        self.name = name
        self.module = module
        self.slots = slots
        self.next: OffloadedBlock | None = None
        self._offloading = offloading
        self._depth = 0
        self._recorded: RecordedWeights | None = None
        self._empty()

    def before(self, module: Module, args: Any) -> None:
        """Put the tensors in; called before the module's forward."""
        if self._depth == 0:
            fetched = self._offloading.take(self)
            tensors = [slot.put(tensor) for slot, tensor in zip(self.slots, fetched, strict=True)]
            if torch.is_grad_enabled():
                self._recorded = RecordedWeights(self.name, self.slots, tensors)
        self._depth += 1

    def after(self, module: Module, args: Any, output: Any) -> None:
        """Take the tensors out; called after the module's forward, also if it has failed."""
        if self._depth == 0:
            return  # the fetching itself has failed
        self._depth -= 1
        if self._depth == 0:
            self._offloading.give_back(self)

    def release(self) -> None:
        """Put the placeholders back."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.leave()
        self._empty()

    def _empty(self) -> None:
        for slot in self.slots:
            slot.put(slot.placeholder)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_depth": 0, "_recorded": None}


class Offloading:
    """Fetches the blocks of one model that wait elsewhere, one ahead.

    device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[OffloadedBlock] = []
        self._forget()

    def _forget(self) -> None:
        self._last: OffloadedBlock | None = None
        self._ahead: tuple[OffloadedBlock, Any] | None = None
        self._copier = _CudaCopies(self.device) if self.device.type == "cuda" else _PlainCopies(self.device)

    def add(self, block: OffloadedBlock) -> None:
        if self.blocks:
            self.blocks[-1].next = block
        self.blocks.append(block)

    def take(self, block: OffloadedBlock) -> Sequence[Tensor]:
        """Return the tensors of `block`, ready for its computation."""
        if self._last is not None:
            self._last.next = block
        self._last = block
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is block:
            started = ahead[1]
        else:
            del ahead  # of another block: its memory first
            started = self._copier.start(block)
        tensors = self._copier.finish(block, started)
        if self._copier.fetches_before:
            self._fetch_after(block)
        return tensors

    def give_back(self, block: OffloadedBlock) -> None:
        """Take the tensors out of `block`, whose computation is over or queued."""
        block.release()
        self._copier.computed()
        if not self._copier.fetches_before:
            self._fetch_after(block)

    def _fetch_after(self, block: OffloadedBlock) -> None:
        if block.next is not None and self._copier.fetches_ahead:
            self._ahead = block.next, self._copier.start(block.next)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "blocks": self.blocks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


class _PlainCopies:
    """Reads tensors where they are needed. On the CPU the next block's files are mapped, and read ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.fetches_ahead = self.fetches_before = device.type == "cpu"

    def start(self, block: OffloadedBlock) -> list[Tensor]:
        opened: dict[str, Any] = {}
        return [slot.stored.read(opened) for slot in block.slots]

    def finish(self, block: OffloadedBlock, started: list[Tensor]) -> Sequence[Tensor]:
        started.reverse()  # so that the pages of each are given back as soon as it is copied
        return [placed(started.pop(), slot.placeholder.dtype, self._device) for slot in block.slots]

    def computed(self) -> None:
        """Note that a block is queued: nothing to do."""


class _CudaCopies:
    """Copies on a stream beside the one that computes, from pinned memory.

    The memory of a block is the side stream's, and may be used again when the computing stream is past the block. The
    host waits for the block before the last one, or it would queue all blocks of the model and hold all their memory.
    """

    fetches_ahead, fetches_before = True, False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None
        self._can_pin = True
        self._queued: list[torch.cuda.Event] = []

    def start(self, block: OffloadedBlock) -> tuple[Sequence[Tensor], torch.cuda.Event]:
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._device)
        while len(self._queued) > 1:
            self._queued.pop(0).synchronize()
        opened: dict[str, Any] = {}
        with torch.cuda.stream(self._beside):
            tensors = [self._pinned(slot.read(opened)).to(self._device, non_blocking=True) for slot in block.slots]
            return tensors, self._beside.record_event()

    def finish(self, block: OffloadedBlock, started: tuple[Sequence[Tensor], torch.cuda.Event]) -> Sequence[Tensor]:
        tensors, copied = started
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(computing)
        return tensors

    def computed(self) -> None:
        self._queued.append(torch.cuda.current_stream(self._device).record_event())

    def _pinned(self, tensor: Tensor) -> Tensor:
        if self._can_pin and tensor.device.type == "cpu" and tensor.nbytes <= _MOST_STAGED_BYTES:
            try:
                return tensor if tensor.is_pinned() else tensor.pin_memory()
            except RuntimeError:  # the system has no more memory to pin, or does not let this process
                self._can_pin = False
        return tensor
