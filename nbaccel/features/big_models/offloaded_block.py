"""Blocks whose weights wait on the host or on the disk, and come to their device for a forward. Runs in ranks.

Between forwards the tensors of a block are on the meta device, so that a use of them outside of the block's forward is
an error. The block that follows is fetched while one computes: as the last forward had it, and in the first one as the
model has them. On the CPU that means that the system reads its file ahead; on CUDA it is copied on a side stream, as
soon as the block before it is queued, and at most two blocks are on the device. No thread is needed for either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention

from nbaccel.features.big_models.stored_tensors import KeptTensor
from nbaccel.features.big_models.weight_slots import RecordedWeights, Slot

__all__ = ["OffloadedBlock", "Offloading"]

_ALIGNMENT_BYTES = 64
"""Where tensors of torch begin on the CPU."""

_MOST_STAGED_BYTES = 1 << 30
"""Limit for one tensor in pinned memory, which cannot be swapped out; a larger one is copied from where it is."""


class OffloadedBlock:
    """A module with the tensors in it that are fetched for its forward. Its methods are hooks of the module.

    Args:
        slots: The places of all tensors below the module, or of those of its own.

    Attributes:
        device: Where it computes.
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

    @property
    def device(self) -> torch.device:
        return self._offloading.device

    def release(self) -> None:
        """Put the placeholders back."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.leave()
        self._empty()

    def _empty(self) -> None:
        for slot in self.slots:
            slot.put(slot.placeholder)

    @property
    def is_filled(self) -> bool:
        """True while the forward of the block runs."""
        return self._depth > 0

    def parts(self) -> Iterator[tuple[Module, LonePart]]:
        """Yield each module inside of the block that has tensors of its own, and what fetches them for it alone."""
        owners = dict.fromkeys(slot.owner for slot in self.slots if slot.owner is not self.module)
        for owner in owners:
            inside = set(owner.modules()) if isinstance(owner, MultiheadAttention) else {owner}
            yield owner, LonePart(self, [slot for slot in self.slots if slot.owner in inside])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_depth": 0, "_recorded": None}


class LonePart:
    """Fetches the tensors of one module whose forward runs outside of its block's. Its methods are hooks of the module.

    So it is where activations are computed again in the backward, since transformers calls the block's forward without
    its hooks then, and where a program calls a module inside of a block by itself.
    """

    def __init__(self, block: OffloadedBlock, slots: Sequence[Slot]) -> None:
        self._block = block
        self._slots = slots
        self._depth = 0

    def before(self, module: Module, args: Any) -> None:
        if self._block.is_filled:
            return
        if self._depth == 0:
            opened: dict[str, Any] = {}
            for slot in self._slots:
                slot.put(slot.on(self._block.device, opened))
        self._depth += 1

    def after(self, module: Module, args: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if self._depth == 0:
                for slot in self._slots:
                    slot.put(slot.placeholder)


class Offloading:
    """Fetches the blocks of one model that wait elsewhere, one ahead.

    Args:
        device: Where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[OffloadedBlock] = []
        self._forget()

    def _forget(self) -> None:
        self._last: OffloadedBlock | None = None
        self._ahead: tuple[OffloadedBlock, Any] | None = None
        self._copier: _CudaCopies | _HostReads | _PlainCopies
        if self.device.type == "cuda":
            self._copier = _CudaCopies(self.device)
        else:
            self._copier = _HostReads() if self.device.type == "cpu" else _PlainCopies(self.device)

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
    """Reads tensors where they are needed, none ahead."""

    fetches_ahead = fetches_before = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, block: OffloadedBlock) -> None:
        """Nothing is fetched ahead."""

    def finish(self, block: OffloadedBlock, started: None) -> Sequence[Tensor]:
        opened: dict[str, Any] = {}
        return [slot.on(self._device, opened) for slot in block.slots]

    def computed(self) -> None:
        """Note that a block is queued: nothing to do."""


class _HostReads:
    """Reads blocks into the host's memory, where they compute; the system reads the next one ahead.

    The memory of the last block is used again, unless somebody has a tensor of it still, such as an output that is a
    part of a weight: new memory would cost a fault for each of its pages.
    """

    fetches_ahead = fetches_before = True

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._uses = 0

    def start(self, block: OffloadedBlock) -> None:
        for slot in block.slots:
            slot.stored.advise()

    def finish(self, block: OffloadedBlock, started: None) -> Sequence[Tensor]:
        sizes = [slot.nbytes for slot in block.slots]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes))
        memory = self._of(ends[-1] if ends else 0)
        tensors: list[Tensor] = []
        opened: dict[str, Any] = {}
        for slot, begin, size in zip(block.slots, [0, *ends], sizes, strict=False):
            tensor = memory[begin : begin + size].view(slot.dtype).view(slot.shape)
            slot.stored.fill(tensor, opened)
            tensors.append(tensor)
        return tensors

    def computed(self) -> None:
        """Note that a block is done: nothing to do."""

    def _of(self, nbytes: int) -> Tensor:
        """Return memory of at least `nbytes` that nobody uses, and of at most twice as many."""
        memory = self._memory
        if memory is None or _uses(memory) != self._uses or not nbytes <= memory.numel() <= 2 * nbytes:
            del memory
            self._memory = None  # the old memory first
            self._memory = memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._uses = _uses(memory)
        return memory


def _uses(tensor: Tensor) -> int:
    """Return how many references to its memory there are: one more for each other tensor that shares it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


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
            tensors = [self._pinned(slot, opened).to(self._device, non_blocking=True) for slot in block.slots]
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

    def _pinned(self, slot: Slot, opened: dict[str, Any]) -> Tensor:
        """Return a tensor in pinned memory, which torch keeps for the next ones; or where it is, if that cannot be."""
        if self._can_pin and not isinstance(slot.stored, KeptTensor) and slot.nbytes <= _MOST_STAGED_BYTES:
            try:
                staged = torch.empty(slot.shape, dtype=slot.dtype, device="cpu", pin_memory=True)
            except RuntimeError:  # the system has no more memory to pin, or does not let this process
                self._can_pin = False
            else:
                slot.stored.fill(staged, opened)
                return staged
        return slot.read(opened)
