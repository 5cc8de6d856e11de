"""Sum the gradients of all ranks, bucket by bucket, during the backward of an unmodified loop. Runs in ranks.

Each set of leaves that is trained together has its own flat tensors, allocated once; ``leaf.grad`` is afterwards a view
into them. A bucket is sent once its last gradient is complete, and buckets are sent in the same order in every rank. A
rank without a gradient for a leaf adds zeros. An `Agreement` holds what the ranks agreed on for one backward: those
whose gradients count, the weight of each term of the loss, and the losses of the whole batch.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.distributed.callers import users_frames
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.implicit.gradient_weights import Header, differ, digest
from nbaccel.train.implicit.terms import Term

__all__ = [
    "Agreement",
    "GradientExchange",
    "Round",
    "shape_of",
]

_BUCKET_BYTES = 4 << 20
_MOST_LAYOUTS = 16


class GradientExchange:
    """Memory for gradients while they are summed."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def begin(self, numbers: tuple[int, ...], tensors: Sequence[Tensor], mine: Collection[int]) -> Round:
        """Begin to sum values for `tensors`, whose numbers are `numbers` in all ranks.

        mine: those for which this rank will bring a value.
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

    value: by number, the sum of what all ranks brought; valid after `finish`.
    """

    def __init__(self, collectives: Collectives, layout: _Layout, buffers: _Buffers, mine: Collection[int]) -> None:
        self._collectives = collectives
        self._layout = layout
        self._buffers = buffers
        self._lock = threading.Lock()
        self._sent = 0
        self._sums: list[Any] = []
        self._returns: list[tuple[Tensor, Tensor]] = []  # flat tensors that were sent from another device
        self._missing = list(layout.sizes)
        self._waits_for = set(mine)
        self.value = dict(zip(layout.numbers, buffers.views, strict=True))
        for number in layout.numbers:
            if number not in self._waits_for:
                self.value[number].zero_()
                self._missing[layout.bucket_of[number]] -= 1

    def bring(self, number: int, value: Tensor, factor: float) -> None:
        """Add `factor` times `value`, and send what is complete. A second value for a number replaces the first."""
        if number not in self._waits_for:
            return
        self._waits_for.discard(number)
        view = self.value[number]
        with torch.no_grad():
            if not factor:  # and not nan where a rank has only ignored targets
                view.zero_()
            elif value.layout is torch.strided:
                torch.mul(value.detach(), factor, out=view)
            else:
                view.copy_(value.detach().to_dense()).mul_(factor)
        bucket = self._layout.bucket_of[number]
        with self._lock:  # leaves on a device and on the host are completed by separate threads
            self._missing[bucket] -= 1
            while self._sent < len(self._missing) and not self._missing[self._sent]:
                self._send()

    def finish(self) -> None:
        """Wait until everything is summed. Values that this rank did not bring count as zeros."""
        for number in list(self._waits_for):
            self.value[number].zero_()
            self._missing[self._layout.bucket_of[number]] -= 1
        self._waits_for.clear()
        while self._sent < len(self._missing):
            self._send()
        self._collectives.finish_sums("loss.backward()", self._sums)
        for flat, moved in self._returns:
            flat.copy_(moved)

    def _send(self) -> None:
        flat = self._buffers.flats[self._sent]
        sent = flat.to(self._collectives.device)  # no copy if it is there already
        if sent is not flat:
            self._returns.append((flat, sent))
        self._sums.append(self._collectives.start_sum(sent))
        self._sent += 1


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
        return all(
            template == (tensor.shape, tensor.dtype, tensor.device)
            for template, tensor in zip(self._templates, tensors, strict=True)
        )

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
        return sum(sys.getrefcount(view) + getattr(view, "_use_count", int)() for view in self.views), memory


def _aligned(count: int) -> int:
    """Return `count` rounded up to 16 elements, since vector instructions need aligned views."""
    return -(-count // 16) * 16


_FRAMES = 2
"""Fewer frames than identify a pass, so that a loss that is new to these begins with whole batches, too."""


@dataclass(slots=True)
class Agreement:
    """One backward, as the ranks agreed on it.

    round: where its gradients are summed.  numbers: of all tensors for which any rank has a value.
    givers: the ranks whose gradients count.  weights: by rank, the weight of each of its terms.
    obstacle: why its batches must stay whole.  named: variables of the user's with a part of the loss.
    late: values that were summed afterwards.  share: of the batch's samples, where it comes in several parts.
    """

    round: Round
    numbers: Sequence[int]
    header: Header
    givers: Sequence[int]
    weights: list[list[float]]
    terms: Sequence[Term]
    of_parameters: Sequence[bool]
    rank: int
    obstacle: str
    named: Sequence[tuple[Tensor, Any]]
    late: dict[int, Tensor] = field(default_factory=dict)
    share: float = 1.0

    @property
    def is_uniform(self) -> bool:
        """True if all terms have the same weight."""
        return not self.is_of_parts and not any(differ(each) for each in self.weights if each)

    @property
    def is_of_parts(self) -> bool:
        """True if ranks have parts of a batch. Terms are then weighted where their gradients begin: hooks and inputs
        see the same as with the whole batch."""
        return any(self.header.says[rank].part for rank in self.givers)

    @property
    def factor(self) -> float:
        """The weight of this rank's gradients; 1 where terms differ, since their weights are applied already."""
        return self.weights[self.rank][0] if self.is_uniform else 1.0

    def inject(self) -> list[Any]:
        """Apply the weights of terms that differ, where their gradients begin; return the hooks."""
        if self.is_uniform:
            return []
        mine = self.weights[self.rank]
        if self.share != 1.0:
            mine = [factor * self._share_of(at) for at, factor in enumerate(mine)]
        return [term.node.register_prehook(_times(factor)) for term, factor in zip(self.terms, mine, strict=True)]

    def _share_of(self, at: int) -> float:
        """Return the share of the term at `at` in its batch: for a mean that of its part's samples, for a sum 1."""
        total = sum(self.weights[rank][at] for rank in self.givers)
        return self.share if math.isclose(total, 1.0) else 1.0

    def whole_values(self) -> list[float | None]:
        """Return the losses of the whole batch, None for an unknown one; empty where they are those already."""
        says = self.header.says
        if not any(says[rank].part or says[rank].own for rank in self.givers):
            return []
        if not (self.header.all_equal("terms", self.givers) and self.header.all_equal("shape", self.givers)):
            return [None]
        terms = [tuple(range(len(self.terms))), *(indices for _, indices in self.named)]
        found: list[float | None] = []
        for at in range(min(len(self.header.values[rank]) for rank in self.givers)):
            shares = self._shares(terms[at])
            if shares is None:
                found.append(None)
            else:
                found.append(sum((share * self.header.values[rank][at] for rank, share in shares if share), 0.0))
        return found

    def _shares(self, indices: Sequence[int]) -> list[tuple[int, float]] | None:
        """Return the weight of each rank's value of the terms at `indices`; None where their weights differ.

        Terms of parameters are the same in all ranks, so any shares that sum to one are right for them, and for a
        single number in parts of different sizes.
        """
        own = [at for at in indices if not self.of_parameters[at] and not self._is_fixed(at)]
        columns = [[self.weights[rank][at] for rank in self.givers] for at in own]
        pure = [sum(self.weights[rank][at] for rank in self.givers) for at in indices if self.of_parameters[at]]
        if not all(math.isclose(total, 1.0) for total in pure):  # divided by a quantity of the batch, after all
            return None
        if not columns:
            columns = [[1.0 / len(self.givers)] * len(self.givers)]
        if any(differ(pair) for column in columns for pair in zip(column, columns[0], strict=True)):
            return None
        if len(own) < len(indices) and not math.isclose(sum(columns[0]), 1.0):
            return None
        return list(zip(self.givers, columns[0], strict=True))

    def _is_fixed(self, at: int) -> bool:
        counts = [self.header.counts[rank][at] for rank in self.givers]
        return set(counts) == {1.0} and differ([self.header.says[rank].rows for rank in self.givers])


def shape_of(terms: Sequence[Term]) -> int:
    """Return a number for the kinds of `terms` and the lines that led here: it differs between two losses of a loop."""
    lines = [f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in users_frames(_FRAMES)]
    return digest(" ".join([*(type(term.node).__name__ for term in terms), *lines]))


def _times(factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def scale(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        if not factor:  # and not nan where a rank has nothing but ignored targets
            return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
        return tuple(None if each is None else each * factor for each in gradients)

    return scale
