"""Sum the gradients of all ranks, bucket by bucket, during the backward of an unmodified loop. Runs in ranks.

Each set of leaves that is trained together has its own flat tensors, allocated once; ``leaf.grad`` is afterwards a view
into them. A bucket is sent once its last gradient is complete, and buckets are sent in the same order in every rank. A
rank without a gradient for a leaf adds zeros.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.distributed.collectives import Collectives

__all__ = ["GradientExchange", "Round"]

_BUCKET_BYTES = 4 << 20
_MOST_LAYOUTS = 16


class GradientExchange:
    """Memory for gradients while they are summed."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def begin(self, numbers: tuple[int, ...], tensors: Sequence[Tensor], mine: Collection[int]) -> Round:
        """Begin to sum values for `tensors`, whose numbers are `numbers` in all ranks.

        Args:
            mine: Those for which this rank will bring a value.
        """
        layout = self._layouts.get(numbers)
        if layout is None or not layout.fits(tensors):
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[numbers] = _Layout(numbers, tensors)
        return Round(self._collectives, layout, layout.free_buffers(), mine)

    def forget(self) -> None:
        """Free the memory; gradients stay."""
        self._layouts.clear()


class Round:
    """One exchange.

    Attributes:
        value: By number, the sum of what all ranks brought; valid after `finish`.
    """

    def __init__(self, collectives: Collectives, layout: _Layout, buffers: _Buffers, mine: Collection[int]) -> None:
        self._collectives = collectives
        self._bucket_of = layout.bucket_of
        self._buffers = buffers
        self._lock = threading.Lock()
        self._sent = 0
        self._sums: list[Any] = []
        self._returns: list[tuple[Tensor, Tensor]] = []  # flat tensors that were sent from another device
        self._missing = list(layout.sizes)
        self._waits_for = set(mine)
        self._brought: list[list[tuple[Tensor, Tensor, float]]] = [[] for _ in layout.sizes]
        self.value = dict(zip(layout.numbers, buffers.views, strict=True))
        for number in self.value.keys() - self._waits_for:
            self._lack(number)

    def bring(self, number: int, value: Tensor, factor: float) -> None:
        """Add `factor` times `value`, and send what is complete. A second value for a number has no effect.

        The value is read once all others of its bucket are there, and until then it must stay as it is.
        """
        if number not in self._waits_for:
            return
        bucket = self._bucket_of[number]
        with self._lock:  # leaves on a device and on the host are completed by separate threads
            self._waits_for.discard(number)
            self._brought[bucket].append((self.value[number], value, factor))
            self._missing[bucket] -= 1
            while self._sent < len(self._missing) and not self._missing[self._sent]:
                self._send()

    def finish(self) -> None:
        """Wait until everything is summed. Values that this rank did not bring count as zeros."""
        for number in self._waits_for:
            self._lack(number)
        self._waits_for.clear()
        while self._sent < len(self._missing):
            self._send()
        self._collectives.finish_sums("loss.backward()", self._sums)
        for flat, moved in self._returns:
            flat.copy_(moved)

    def _lack(self, number: int) -> None:
        self.value[number].zero_()
        self._missing[self._bucket_of[number]] -= 1

    def _send(self) -> None:
        _fill(self._brought[self._sent])
        flat = self._buffers.flats[self._sent]
        sent = flat.to(self._collectives.device)  # no copy if it is there already
        if sent is not flat:
            self._returns.append((flat, sent))
        self._sums.append(self._collectives.start_sum(sent, is_of_step=True))
        self._sent += 1


def _fill(brought: Sequence[tuple[Tensor, Tensor, float]]) -> None:
    """Write each value times its factor into its view, in as few operations as possible: a bucket has many."""
    together: dict[float, tuple[list[Tensor], list[Tensor]]] = {}  # dense ones, by their factor
    with torch.no_grad():
        for view, value, factor in brought:
            if not factor:  # and not nan where a rank has only ignored targets
                view.zero_()
            elif value.layout is torch.strided:
                views, values = together.setdefault(factor, ([], []))
                views.append(view)
                values.append(value)
            else:
                view.copy_(value.detach().to_dense()).mul_(factor)
        for factor, (views, values) in together.items():
            torch._foreach_copy_(views, values)
            if factor != 1.0:
                torch._foreach_mul_(views, factor)


class _Layout:
    """Positions of the tensors of one exchange in its buckets."""

    def __init__(self, numbers: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        self.numbers = numbers
        self.bucket_of: dict[int, int] = {}
        self.sizes: list[int] = []
        self._templates = [(t.shape, t.dtype, t.device) for t in tensors]
        self._places: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        self._flats: list[tuple[int, torch.dtype, torch.device]] = []
        self._buffers: list[_Buffers] = []
        open_buckets: dict[tuple[torch.dtype, torch.device], int] = {}
        for number, tensor in zip(numbers, tensors, strict=True):
            kind = tensor.dtype, tensor.device
            bucket = open_buckets.get(kind)
            if bucket is None or self._flats[bucket][0] * tensor.element_size() > _BUCKET_BYTES:
                bucket = open_buckets[kind] = len(self._flats)
                self._flats.append((0, *kind))
                self.sizes.append(0)
            offset = self._flats[bucket][0]
            self._flats[bucket] = (offset + _aligned(tensor.numel()), *kind)
            self.sizes[bucket] += 1
            self.bucket_of[number] = bucket
            strides = torch.empty_like(tensor, device="meta").stride()  # the layout that autograd gives a gradient
            self._places.append((bucket, offset, tuple(tensor.shape), strides))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return self._templates == [(t.shape, t.dtype, t.device) for t in tensors]

    def free_buffers(self) -> _Buffers:
        """Return flat tensors that nothing refers to: gradients that were not zeroed since then are in others."""
        for buffers in self._buffers:
            if buffers.are_free():
                return buffers
        del self._buffers[:-1]  # they are still referenced; a loop that zeroes in place needs two
        made = _Buffers(self._flats, self._places)
        self._buffers.append(made)
        return made


class _Buffers:
    """Flat tensors, and views into them."""

    def __init__(
        self,
        flats: Sequence[tuple[int, torch.dtype, torch.device]],
        places: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        self.flats = [torch.zeros(size, dtype=dtype, device=device) for size, dtype, device in flats]
        self.views = [
            self.flats[bucket].as_strided(shape, strides, offset).detach()  # no views to autograd: some detach in place
            for bucket, offset, shape, strides in places
        ]
        self._uses = self._count()

    def are_free(self) -> bool:
        return self._count() == self._uses

    def _count(self) -> tuple[int, int]:
        """Return the reference counts of the views and of their memory, which show other references."""
        memory = sum(torch._C._storage_Use_Count(flat.untyped_storage()._cdata) for flat in self.flats)
        # Before torch 2.10 a view that is a leaf's gradient is not seen by Python's count.
        uses = getattr(Tensor, "_use_count", lambda view: 0)
        return sum(map(sys.getrefcount, self.views)) + sum(map(uses, self.views)), memory


def _aligned(count: int) -> int:
    """Return `count` rounded up to 16 elements, since vector instructions need aligned views."""
    return -(-count // 16) * 16
