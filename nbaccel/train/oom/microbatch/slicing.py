"""Take samples out of a collated batch, whatever containers it has, and split it into parts. Runs in ranks.

A batch that can only be cut by guessing is refused: a batch that is cut wrongly would train without any notice.
`BatchCut` decides which samples are in which part. The gate (`nbaccel.train.oom.split_batches`) decides when parts are
handed out, and what waits for the last of them. Nothing here knows memory, gradients or other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from nbaccel.errors import CannotCut, CannotSplit
from nbaccel.train.distributed.nested import children, is_container, map_children
from nbaccel.values import frozen

__all__ = [
    "BatchCut",
    "BatchPart",
    "Samples",
    "SplitFunction",
    "is_array",
    "is_shared",
    "named_children",
    "sample_shapes",
]

SplitFunction = Callable[[Any, int, int], Any]
"""``split_fn(batch, start, stop)``: returns a batch of the samples `start` to `stop`."""

_SHARED = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device, torch.Generator)
"""Leaves that belong to the whole batch and are copied unchanged into every part; so are 0-d tensors."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A batch, and the number of its samples.

    split: takes some of them; by default every tensor and array is cut along its first dimension, and lists with
    one entry per sample. Numbers, strings and 0-d tensors are copied into every part.

    >>> batch = Samples.of({"x": torch.arange(6).reshape(3, 2), "name": ["a", "b", "c"], "train": True})
    >>> batch.count
    3
    >>> batch.take(1, 3)
    {'x': tensor([[2, 3],
            [4, 5]]), 'name': ['b', 'c'], 'train': True}
    """

    batch: Any
    count: int
    split: SplitFunction | None = None

    @classmethod
    def of(cls, batch: Any, split: SplitFunction | None = None, count: int | None = None) -> Samples:
        """Count the samples of `batch`, or use `count`.

        Raises:
            CannotSplit: it is not clear how many there are, or which parts of the batch belong to which sample.
        """
        if split is None:
            counted = _count(batch)
            if count is not None and count != counted:
                raise CannotSplit(f"samples={count}, and the tensors of this batch have {counted}")
            return cls(batch, counted)
        if count is None:
            raise CannotSplit(
                "a split_fn takes samples out of the batch, but nobody says how many there are: "
                "forward_backward(loss_fn, batch, split_fn=..., samples=...)"
            )
        return cls(batch, count, split)

    def take(self, start: int, stop: int) -> Any:
        """Return a batch of the samples `start` to `stop`, with tensors as views; `batch` itself for all of them."""
        if start == 0 and stop == self.count:
            return self.batch
        if self.split is not None:
            return self.split(self.batch, start, stop)
        return _sliced(self.batch, start, stop, self.count)

    def pick(self, rows: Sequence[int]) -> Any:
        """Return a batch of the samples `rows`, in this order, with repetitions; copies. Not with a `split`."""
        return _picked(self.batch, list(rows), self.count)


def sample_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one sample in each tensor of `batch`, in the order of its containers."""
    return tuple(tuple(leaf.shape[1:]) for _, leaf in _leaves(batch, "batch") if is_array(leaf))


def _count(batch: Any) -> int:
    found: dict[str, int] = {}
    others = []
    for path, leaf in _leaves(batch, "batch"):
        if is_array(leaf):
            found[path] = leaf.shape[0]
        elif not is_shared(leaf):
            others.append(leaf)
    lengths = set(found.values())
    if len(lengths) > 1:
        shown = ", ".join(f"{path} {length}" for path, length in list(found.items())[:_SHOWN])
        raise CannotSplit(
            f"the first dimensions of this batch disagree, so they do not all count samples: {shown}. A tensor that "
            f"belongs to no sample is better named in the loss function than carried in the batch. {_REMEDY}"
        )
    count: int | None = lengths.pop() if lengths else None
    for path, stranger in _strangers(batch, "batch", count) if others else ():
        raise CannotSplit(
            f"it is not known what of {path} ({type(stranger).__name__}) belongs to which sample. {_REMEDY}"
        )
    if count is None:
        raise CannotSplit(f"this {type(batch).__name__} holds no tensor with a dimension for samples. {_REMEDY}")
    return count


_SHOWN = 6

_REMEDY = (
    "Tell how to cut it, forward_backward(..., split_fn=lambda batch, start, stop: ..., samples=...), or use "
    "find_executable_batch_size, which cuts nothing."
)


def _sliced(value: Any, start: int, stop: int, count: int) -> Any:
    if is_array(value) or _lists_samples(value, count):
        return value[start:stop]
    return map_children(lambda child: _sliced(child, start, stop, count), value)


def _picked(value: Any, rows: list[int], count: int) -> Any:
    if is_array(value):
        return value[rows]
    if _lists_samples(value, count):
        return type(value)([value[row] for row in rows])
    return map_children(lambda child: _picked(child, rows, count), value)


def _strangers(value: Any, path: str, count: int | None) -> Iterator[tuple[str, Any]]:
    """Yield leaves that are neither cut nor shared by all samples."""
    if _lists_samples(value, count):
        return
    if not _goes_deeper(value):
        if not (is_array(value) or is_shared(value)):
            yield path, value
        return
    for below, child in named_children(value, path):
        yield from _strangers(child, below, count)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of the containers with its path, ``batch['x'][0]``."""
    if not _goes_deeper(value):
        yield path, value
        return
    for below, child in named_children(value, path):
        yield from _leaves(child, below)


def named_children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((f"{path}[{name!r}]", child) for name, child in children(value))
    if type(value) in (list, tuple):
        return ((f"{path}[{name}]", child) for name, child in children(value))
    return ((f"{path}.{name}", child) for name, child in children(value))


def _goes_deeper(value: Any) -> bool:
    return is_container(value) and not isinstance(value, PackedSequence)  # a tuple of tensors without a batch dimension


def is_array(value: Any) -> bool:
    """Return whether `value` is a dense tensor, or an array, that has a first dimension."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.layout is torch.strided and not value.is_nested
    return hasattr(value, "__array__") and bool(getattr(value, "ndim", 0))


def is_shared(leaf: Any) -> bool:
    return isinstance(leaf, _SHARED) or (hasattr(leaf, "__array__") and getattr(leaf, "ndim", None) == 0)


def _lists_samples(value: Any, count: int | None) -> bool:
    """Return whether `value` is a list with one entry per sample, as default_collate keeps strings and objects."""
    return type(value) in (list, tuple) and len(value) == count and not any(_holds_array(entry) for entry in value)


def _holds_array(value: Any) -> bool:
    return any(is_array(leaf) for _, leaf in _leaves(value, ""))


@frozen
class BatchPart:
    """Samples `start` to `stop` of a batch of `rows`.

    rows: 0 where nothing was cut.
    is_first, is_last: of its batch.  is_repeated: handed out again, to make up the number; its weight is zero.
    """

    batch: Any
    start: int = 0
    stop: int = 0
    rows: int = 0
    is_first: bool = True
    is_last: bool = True
    is_repeated: bool = False

    @property
    def share(self) -> float:
        """The fraction of the batch's samples in this part.

        >>> BatchPart(None, 0, 2, rows=8).share
        0.25
        """
        if self.is_repeated:
            return 0.0
        return (self.stop - self.start) / self.rows if self.rows else 1.0

    def real(self, samples: int, world_size: int) -> int:
        """Return how many samples of this part, of all ranks, are among the first `samples` of all ranks' batches.

        The ranks' batches have equal sizes and follow one another, as in a loader's last round that was filled up.

        >>> [BatchPart(None, start, start + 2, rows=4).real(5, world_size=2) for start in (0, 2)]
        [3, 2]
        """
        starts = range(self.start, self.rows * world_size, self.rows)
        return sum(min(max(samples - start, 0), self.stop - self.start) for start in starts)


@frozen
class BatchCut:
    """The way in which the batches of one loader are cut.

    parts: how many a whole batch gives.  batch_size: samples in a batch of this rank; None where that differs.
    is_level: ranks hold equally many samples at the same time. A shorter batch then gives fewer parts, none larger
    than those of a whole one. Otherwise every batch gives `parts`, so that all ranks reach the collectives of a loop.
    """

    parts: int
    batch_size: int | None = None
    is_level: bool = True

    @property
    def part_size(self) -> int | None:
        """Samples in the largest part; None where that differs."""
        return None if self.batch_size is None else math.ceil(self.batch_size / self.parts)

    def of(self, batch: Any) -> list[BatchPart]:
        """Return the parts of `batch`, as equal as possible, in its order.

        Raises:
            CannotCut: it is not clear which values belong to which sample.

        >>> [part.batch for part in BatchCut(2, batch_size=4).of(["a", "b", "c"])]
        [['a', 'b'], ['c']]
        """
        samples = _samples(batch)
        rows = samples.count
        number = self._number(rows)
        cuts = max(1, min(number, rows))
        spans = list(pairwise(math.ceil(rows * at / cuts) for at in range(cuts + 1)))  # the larger parts come first
        spans += [spans[-1]] * (number - cuts)
        return [
            BatchPart(
                samples.take(start, stop),
                start,
                stop,
                rows,
                is_first=at == 0,
                is_last=at == len(spans) - 1,
                is_repeated=at >= cuts,
            )
            for at, (start, stop) in enumerate(spans)
        ]

    def _number(self, rows: int) -> int:
        if not self.is_level:
            return self.parts
        size = self.part_size
        return min(self.parts, rows if size is None else math.ceil(rows / size)) or 1


def _samples(batch: Any) -> Samples:
    try:
        return Samples.of(batch)
    except CannotSplit as error:
        if type(batch) in (list, tuple) and not any(hasattr(entry, "__array__") for entry in batch):
            return Samples(batch, len(batch), lambda whole, start, stop: whole[start:stop])  # texts or objects
        raise CannotCut(f"memory ran out with whole batches, and this one cannot be cut: {error}") from error
