"""Slicing: takes samples out of a collated batch, whatever containers it has. Runs in ranks.

A batch that can only be cut by guessing is refused: a batch that is cut wrongly would train without any notice.
Nothing here knows memory, gradients or other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from nbaccel.errors import CannotSplit
from nbaccel.train.talk.nested import children, is_container, map_children

__all__ = ["Samples", "SplitFunction", "is_array", "is_shared", "named_children", "sample_shapes"]

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
