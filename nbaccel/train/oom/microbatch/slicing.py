"""Take samples out of a collated batch, whatever containers it has, and split it into parts. Runs in ranks.

A batch that can only be cut by guessing is refused: a batch that is cut wrongly would train without any notice.
`BatchCut` decides which samples are in which part. The gate (`nbaccel.train.oom.split_batches`) decides when parts are
handed out, and what waits for the last of them. Nothing here knows memory, gradients or other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbaccel.base.values import frozen
from nbaccel.errors import CannotCut, CannotSplit
from nbaccel.train.distributed.counted_batch import (
    CountedBatch,
    ListLayout,
    has_columns,
    is_array,
    is_shared,
    named_children,
    named_leaves,
    possible_counts,
)
from nbaccel.train.distributed.nested import is_container

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

_FIELDS = ListLayout({"batch": False})
"""A batch that is itself a list of equally long tensors, as many as these have rows: default_collate's columns."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A batch, and the number of its samples.

    Args:
        split: Takes some of them; by default what has a row or an entry for each sample is cut, tensors and arrays
            along their first dimension. Numbers, strings and 0-d tensors are copied into every part.

    Example:
        >>> import torch
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
    def of(
        cls, batch: Any, split: SplitFunction | None = None, count: int | None = None, expected: int | None = None
    ) -> Samples:
        """Count the samples of `batch`, or use `count`.

        Args:
            expected: How many a loader has just handed out. A batch that may have as many, or as many as its tensors
                have rows, is refused: of two images with three channels nobody else knows.

        Raises:
            CannotSplit: It is not clear how many there are, or which parts of the batch belong to which sample.
        """
        if split is not None and count is None:
            raise CannotSplit(
                "a split_fn takes samples out of the batch, but nobody says how many there are: "
                "forward_backward(loss_fn, batch, split_fn=..., samples=...)"
            )
        if split is not None:
            return cls(batch, count, split)  # type: ignore[arg-type]
        samples = cls(batch, _count(batch, expected) if count is None else _checked(count, batch))
        samples._try()
        return samples

    def take(self, start: int, stop: int) -> Any:
        """Return a batch of the samples `start` to `stop`, with tensors as views; `batch` itself for all of them."""
        if start == 0 and stop == self.count:
            return self.batch
        if self.split is not None:
            return self.split(self.batch, start, stop)
        return CountedBatch(self.batch, self.count, _FIELDS).take(start, stop)

    def pick(self, rows: Sequence[int]) -> Any:
        """Return a batch of the samples `rows`, in this order, with repetitions; copies. Not with a `split`."""
        return CountedBatch(self.batch, self.count, _FIELDS).pick(rows)

    def _try(self) -> None:
        """Find out whether the batch can be cut.

        Raises:
            CannotSplit: It cannot.
        """
        try:
            CountedBatch(self.batch, self.count, _FIELDS).check()
        except CannotSplit as error:
            raise CannotSplit(f"{error}. {_REMEDY}") from None


def sample_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one sample in each tensor of `batch`, in the order of its containers."""
    return tuple(tuple(leaf.shape[1:]) for _, leaf in named_leaves(batch, "batch") if is_array(leaf))


def _count(batch: Any, expected: int | None) -> int:
    rows, lengths = possible_counts(batch)
    if rows is not None:
        if expected == rows or not lengths or (expected not in lengths and has_columns(batch)):
            return rows
        if expected is not None and expected in lengths and not has_columns(batch):
            return expected
        raise CannotSplit(
            f"this {type(batch).__name__} may hold {' or '.join(map(str, sorted({*lengths, rows})))} samples: so many "
            "entries are in its lists, or rows in each of its tensors. Say how many there are: "
            "forward_backward(..., samples=...)"
        )
    if expected is not None and expected in lengths:
        return expected
    if len(lengths) == 1 and not _may_be_columns(batch):
        return lengths.pop()
    found = {path: leaf.shape[0] for path, leaf in named_leaves(batch, "batch") if is_array(leaf)}
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{path} {length}" for path, length in list(found.items())[:_SHOWN])
        raise CannotSplit(
            f"the first dimensions of this batch disagree, so they do not all count samples: {shown}. A tensor that "
            f"belongs to no sample is better named in the loss function than carried in the batch. {_REMEDY}"
        )
    for path, leaf in named_leaves(batch, "batch"):
        if not (is_array(leaf) or is_shared(leaf)):
            raise CannotSplit(
                f"it is not known what of {path} ({type(leaf).__name__}) belongs to which sample. {_REMEDY}"
            )
    raise CannotSplit(f"this {type(batch).__name__} holds no tensor with a dimension for samples. {_REMEDY}")


def _may_be_columns(batch: Any) -> bool:
    """Return whether a batch is a list of tensors: of samples, or of columns of which one has too many rows."""
    return type(batch) in (list, tuple) and any(map(is_array, batch)) and not any(map(is_container, batch))


def _checked(count: int, batch: Any) -> int:
    rows, lengths = possible_counts(batch)
    if rows is not None and rows != count and count not in lengths:
        raise CannotSplit(f"samples={count}, and the tensors of this batch have {rows}")
    return count


_SHOWN = 6

_REMEDY = (
    "Tell how to cut it, forward_backward(..., split_fn=lambda batch, start, stop: ..., samples=...), or use "
    "find_executable_batch_size, which cuts nothing."
)


@frozen
class BatchPart:
    """Samples `start` to `stop` of a batch of `rows`.

    Args:
        rows: 0 where nothing was cut.
        is_first, is_last: Of its batch.
        is_repeated: Handed out again, to make up the number; its weight is zero.
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

        Example:
            >>> BatchPart(None, 0, 2, rows=8).share
            0.25
        """
        if self.is_repeated:
            return 0.0
        return (self.stop - self.start) / self.rows if self.rows else 1.0

    def real(self, samples: int, world_size: int) -> int:
        """Return how many samples of this part, of all ranks, are among the first `samples` of all ranks' batches.

        The ranks' batches have equal sizes and follow one another, as in a loader's last round that was filled up.

        Example:
            >>> [BatchPart(None, start, start + 2, rows=4).real(5, world_size=2) for start in (0, 2)]
            [3, 2]
        """
        starts = range(self.start, self.rows * world_size, self.rows)
        return sum(min(max(samples - start, 0), self.stop - self.start) for start in starts)


@frozen
class BatchCut:
    """The way in which the batches of one loader are cut.

    Args:
        parts: How many a whole batch gives.
        batch_size: Samples in a batch of this rank; None where that differs.
        is_level: Ranks hold equally many samples at the same time. A shorter batch then gives fewer parts, none larger
            than those of a whole one. Otherwise every batch gives `parts`, so that all ranks reach the collectives of a
            loop.
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
            CannotCut: It is not clear which values belong to which sample.

        Example:
            >>> [part.batch for part in BatchCut(2, batch_size=4).of(["a", "b", "c"])]
            [['a', 'b'], ['c']]
        """
        samples = _samples(batch, self.batch_size)
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


def _samples(batch: Any, expected: int | None) -> Samples:
    try:
        return Samples.of(batch, expected=expected)
    except CannotSplit as error:
        raise CannotCut(f"memory ran out with whole batches, and this one cannot be cut: {error}") from error
