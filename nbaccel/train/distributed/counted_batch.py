"""CountedBatch: a batch with its number of samples, which says what of it belongs to which sample. Runs in ranks.

The number comes from whoever drew the samples: a loader, or the program. No tensor tells it: the first dimension of an
image counts channels, that of a detection's boxes counts boxes. With the number, what has as many rows or entries is
cut, and everything else belongs to the whole batch. Lists are the only doubt: two tensors of two rows each are two
columns or two samples. Batches of other sizes and `ListLayout` decide that; where neither does, nothing is guessed.
Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from nbaccel.errors import CannotSplit
from nbaccel.train.distributed.nested import children, is_container, map_children

__all__ = [
    "CountedBatch",
    "ListLayout",
    "belongs_to_samples",
    "doubtful_lists",
    "has_columns",
    "is_array",
    "is_shared",
    "joined",
    "lengths_of_lists",
    "named_children",
    "named_leaves",
    "possible_counts",
]

_SHARED = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device, torch.Generator)
"""Leaves that belong to the whole batch; so are 0-d tensors."""


@dataclass(frozen=True, slots=True)
class ListLayout:
    """Knowledge of the lists and tuples in the batches of one collate_fn; asked only where their lengths allow both.

    Args:
        entries: By path, ``batch[0]``: True for one entry per sample, False for entries that are columns.
        are_columns: Whether all other lists hold columns.
    """

    entries: Mapping[str, bool] = field(default_factory=dict)
    are_columns: bool = False

    def holds_samples(self, path: str) -> bool | None:
        return self.entries.get(path, False if self.are_columns else None)


class CountedBatch(NamedTuple):
    """A batch of so many samples. A tuple, so that it passes through a loader's worker processes and pinned memory.

    Example:
        >>> batch = CountedBatch({"x": torch.arange(3), "name": ["a", "b", "c"], "scale": torch.ones(2)}, 3)
        >>> batch.take(1, 3)
        {'x': tensor([1, 2]), 'name': ['b', 'c'], 'scale': tensor([1., 1.])}
    """

    batch: Any
    samples: int
    layout: ListLayout = ListLayout()

    def take(self, start: int, stop: int) -> Any:
        """Return a batch of the samples `start` to `stop`, with tensors as views; `batch` itself for all of them.

        Raises:
            CannotSplit: It is not known what of the batch belongs to which sample.
        """
        return joined([self], start, stop)

    def check(self) -> None:
        """Find out whether samples can be taken.

        Raises:
            CannotSplit: The samples cannot be taken.
        """
        _Samples([self], lambda values: values[0], lambda values, _: values[0]).of_batch()

    def pick(self, rows: Sequence[int], others: Sequence[CountedBatch] = ()) -> Any:
        """Return a batch of the samples `rows`, in this order, with repetitions; copies.

        Args:
            others: Batches that show what belongs to samples.
        """

        def picked(values: list[Any]) -> Any:
            value = values[0]
            return value[list(rows)] if is_array(value) else type(value)([value[row] for row in rows])

        return _Samples([self, *others], picked, lambda values, _: values[0]).of_batch()


def joined(parts: Sequence[CountedBatch], start: int, stop: int) -> Any:
    """Return the samples `start` to `stop` of `parts`, which follow one another, as one batch.

    Parts that do not take part count as evidence: what belongs to samples has as many rows in each part as that has
    samples.

    Raises:
        CannotSplit: It is not known what of a part belongs to which sample, the parts do not fit together, or there is
            no sample from `start` to `stop`.

    Example:
        >>> pairs = [CountedBatch((["a", "b"], torch.ones(4)), 2), CountedBatch((["c"], torch.ones(4)), 1)]
        >>> joined(pairs, 1, 3)
        (['b', 'c'], tensor([1., 1., 1., 1.]))
    """
    spans: list[tuple[int, int, int]] = []
    begin = 0
    for number, part in enumerate(parts):
        first, last = max(start - begin, 0), min(stop - begin, part.samples)
        if first < last:
            spans.append((number, first, last))
        begin += part.samples
    if not spans:
        raise CannotSplit(f"there are no samples {start} to {stop} among {begin}")
    if len(spans) == 1 and spans[0][1:] == (0, parts[spans[0][0]].samples):
        return parts[spans[0][0]].batch

    def rows(values: list[Any]) -> Any:
        return _concatenated([values[number][first:last] for number, first, last in spans])

    def shared(values: list[Any], path: str) -> Any:
        one, *others = [values[number] for number, _, _ in spans]
        different = next((other for other in others if not _are_same(one, other)), one)
        if different is not one:
            raise CannotSplit(
                f"{path} is no value of each sample, and differs between the batches to be joined: "
                f"{_shown(one)} and {_shown(different)}"
            )
        return one

    return _Samples(parts, rows, shared).of_batch()


class _Samples:
    """One walk through the containers of some batches, all at once: rebuilds them from what belongs to samples.

    Args:
        rows: A function that is called with a value of each part that belongs to samples.
        shared: A function that is called with one that does not, and its path.
    """

    def __init__(
        self,
        parts: Sequence[CountedBatch],
        rows: Callable[[list[Any]], Any],
        shared: Callable[[list[Any], str], Any],
    ) -> None:
        self._parts = parts
        self._rows = rows
        self._shared = shared
        self._has_found = False

    def of_batch(self) -> Any:
        rebuilt = self._of([part.batch for part in self._parts], "batch")
        if not self._has_found:
            counts = " and ".join(map(str, sorted({part.samples for part in self._parts})))
            kind = type(self._parts[0].batch).__name__
            raise CannotSplit(f"nothing in this {kind} has {counts} rows or entries, one for each of its samples")
        return rebuilt

    def _of(self, values: list[Any], path: str) -> Any:
        first = values[0]
        if self._belong_to_samples(values, path):
            self._has_found = True
            try:
                return self._rows(values)
            except (RuntimeError, ValueError, TypeError) as error:  # of torch or numpy: shapes that differ
                raise CannotSplit(f"the rows of {path} do not fit together: {error}") from error
        if _goes_deeper(first):
            below = [dict(named_children(value, path)) for value in values]
            if any(each.keys() != below[0].keys() for each in below):
                raise CannotSplit(f"{path} holds other things in each of the batches to be joined")
            names = iter(below[0])

            def of_child(_: Any) -> Any:
                name = next(names)
                return self._of([each[name] for each in below], name)

            return map_children(of_child, first)
        if not (is_array(first) or is_shared(first)):
            raise CannotSplit(f"it is not known what of {path} ({type(first).__name__}) belongs to which sample")
        if self._has_samples_elsewhere(values):
            raise CannotSplit(f"{path} has its samples in another dimension than the first")
        return self._shared(values, path)

    def _has_samples_elsewhere(self, values: list[Any]) -> bool:
        """Return whether arrays have as many columns as samples, of which each batch has other ones: time goes first.

        What belongs to a whole batch may have that many by chance; of one batch alone it is not known.
        """
        if not all(is_array(value) and value.ndim > 1 for value in values):
            return False
        sizes = [
            [size == part.samples for size in value.shape] for value, part in zip(values, self._parts, strict=True)
        ]
        is_columns = any(map(all, zip(*sizes, strict=False)))
        return is_columns and any(not _are_same(values[0], other) for other in values[1:])

    def _belong_to_samples(self, values: list[Any], path: str) -> bool:
        known = {
            belongs_to_samples(value, part.samples, path, part.layout)
            for value, part in zip(values, self._parts, strict=True)
        }
        if False in known:
            return False
        if True in known:
            return True
        one, count = values[0], self._parts[0].samples
        if len(self._parts) == count == 1:
            return False  # a single sample is not cut
        raise CannotSplit(
            f"{path} is a {type(one).__name__} of {count} values of one kind with {count} rows each, in a batch of "
            f"{count} samples: they may be samples, or columns"
        )


def belongs_to_samples(value: Any, count: int, path: str, layout: ListLayout) -> bool | None:
    """Return whether `value` has a row or an entry for each of `count` samples; None where a list may be either."""
    if is_array(value):
        return bool(value.shape[0] == count)
    if type(value) not in (list, tuple) or len(value) != count:
        return False
    own = _lists_samples(value, count)
    return layout.holds_samples(path) if own is None else own


def doubtful_lists(batch: Any, count: int, path: str = "batch") -> Iterator[tuple[str, bool | None]]:
    """Yield the paths of lists with `count` entries, and whether these are samples; None where that is not known."""
    if not _goes_deeper(batch):
        return
    if type(batch) in (list, tuple) and len(batch) == count:
        own = _lists_samples(batch, count)
        yield path, own
        if own:
            return
    for below, child in named_children(batch, path):
        yield from doubtful_lists(child, count, below)


def possible_counts(batch: Any) -> tuple[int | None, set[int]]:
    """Return by what a batch may be divided: the number of rows that all its arrays have, and lengths of lists."""
    rows = {leaf.shape[0] for _, leaf in named_leaves(batch, "batch") if is_array(leaf)}
    lengths = {length for length in set(_outer_lengths(batch, is_outermost=True)) if _fits(batch, length)}
    common = rows.pop() if len(rows) == 1 and _fits(batch, *rows) else None
    return common, lengths - {common}


def _outer_lengths(value: Any, is_outermost: bool = False) -> Iterator[int]:
    """Yield the length of each list that is in no other one but the batch itself."""
    if type(value) in (list, tuple):
        yield len(value)
        if not is_outermost:
            return
    if _goes_deeper(value):
        for _, child in children(value):
            yield from _outer_lengths(child)


def has_columns(batch: Any) -> bool:
    """Return whether an array stands in no list, or in one that is the batch itself."""
    entries = batch if type(batch) in (list, tuple) else [batch]
    return any(map(is_array, entries)) or any(map(is_array, _outside_of_lists(batch)))


def _outside_of_lists(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        return
    if not _goes_deeper(value):
        yield value
        return
    for _, child in children(value):
        yield from _outside_of_lists(child)


def _fits(batch: Any, count: int) -> bool:
    """Return whether all that `batch` holds can be divided among `count` samples, or belongs to all of them."""
    if belongs_to_samples(batch, count, "", ListLayout()) is not False:
        return True
    if _goes_deeper(batch):
        return all(_fits(child, count) for _, child in children(batch))
    return is_shared(batch)


def lengths_of_lists(value: Any, path: str = "batch") -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each list and tuple in `value`."""
    if type(value) in (list, tuple):
        yield path, len(value)
    if _goes_deeper(value):
        for below, child in named_children(value, path):
            yield from lengths_of_lists(child, below)


def _lists_samples(value: Sequence[Any], count: int) -> bool | None:
    """Return whether a list of `count` entries has one per sample; None where they may as well be columns.

    Columns have `count` rows each, and samples are all of one kind.
    """
    are_columns = [_is_column(entry, count) is True for entry in value]
    if not _are_alike(value):
        return not any(are_columns) and not any(map(_holds_array, value))
    if not any(are_columns):
        return True
    if not all(are_columns):
        return None if any(entry is None for entry in value) else True
    return None if len({_kind(entry) for entry in value}) == 1 else False


def _is_column(value: Any, count: int) -> bool | None:
    """Return whether the members of `value` have `count` rows or entries; None if no member has rows."""
    if is_array(value):
        return bool(value.shape[0] == count)
    if type(value) in (list, tuple) and len(value) == count and _are_alike(value):
        return True
    if not _goes_deeper(value):
        return None
    below = {_is_column(child, count) for _, child in children(value)}
    return False if False in below else (True if True in below else None)


def _are_alike(entries: Sequence[Any]) -> bool:
    """Return whether `entries` may be values of several samples: of one kind, apart from None and empty lists."""
    return len({_outer_kind(entry) for entry in entries if not (entry is None or _is_empty_list(entry))}) <= 1


def _is_empty_list(value: Any) -> bool:
    return type(value) in (list, tuple) and not value


def _outer_kind(value: Any) -> Any:
    """Return the kind of `value`, of a list with those of its entries; mappings may lack a key."""
    if is_array(value):
        return type(value), value.ndim, value.dtype
    if type(value) in (list, tuple):
        return type(value), frozenset(_outer_kind(entry) for entry in value)
    return type(value)


def _kind(value: Any) -> Any:
    """Return the kind of `value` with those of what it holds."""
    if is_array(value) or not _goes_deeper(value):
        return _outer_kind(value)
    return type(value), frozenset(_kind(child) for _, child in children(value))


def _holds_array(value: Any) -> bool:
    return any(is_array(leaf) for _, leaf in named_leaves(value, ""))


def named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of the containers with its path, ``batch['x'][0]``."""
    if not _goes_deeper(value):
        yield path, value
        return
    for below, child in named_children(value, path):
        yield from named_leaves(child, below)


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


def _concatenated(pieces: list[Any]) -> Any:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(pieces)
    if is_array(first):
        return sys.modules["numpy"].concatenate(pieces)
    return type(first)(entry for piece in pieces for entry in piece)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if is_array(one):
        return bool(sys.modules["numpy"].array_equal(one, other))
    return bool(one == other)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} of shape {tuple(value.shape)}" if is_array(value) else repr(value)[:60]
