"""Values that describe batches of an unmodified loop: what a rank was given, where the samples are. Run in ranks.

`GivenBatches`, `Split`, `Turn` and `Label` describe whole batches or parts. A `Layout` finds the samples in the batches
that a loader's own collate_fn makes, so that whole batches can be cut; a `Cutter` decides where. A part may be longer
than
another: the first batches of a loop are cut unevenly on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from nbaccel.base.values import frozen
from nbaccel.errors import CannotSplit
from nbaccel.train.distributed.nested import map_children
from nbaccel.train.oom.microbatch.slicing import Samples, is_array, is_shared, named_children

__all__ = [
    "ALONE",
    "UNKNOWN",
    "Cutter",
    "GivenBatches",
    "Label",
    "Layout",
    "Split",
    "Turn",
    "is_own",
]


@frozen
class Split:
    """Decision on a loader's batches.

    Args:
        name: The variable that holds the loader, else a description.
        batches: len(loader), if it has one.
        why: Text instead of the usual one.
        remark: Text beside the usual one.
        is_own: Ranks get whole batches of their own.
    """

    name: str
    batches: int | None
    batch_size: int | None
    is_split: bool
    why: str = ""
    remark: str = ""
    is_own: bool = False


class Turn(NamedTuple):
    """One of the parts of a batch that come one after the other.

    Args:
        share: The share of its samples, those of all ranks.
        is_mixed: The batch of another loader is also used, and cut differently.
    """

    share: float = 1.0
    is_first: bool = True
    is_last: bool = True
    is_mixed: bool = False


ALONE = Turn()


class GivenBatches(NamedTuple):
    """Batches that a rank was given since the last backward, or of that backward while nothing new has come.

    Args:
        is_part: A batch was cut.
        rows: Samples of this rank in the largest cut one, else in the largest; 0 unknown.
        whole: Samples of all of that batch; 0 unknown.
        sizes: The ranks' numbers of samples, where it was cut.
        batches: How many the last loader has handed out.
        turn: That of the last batch, where a batch comes in several parts.
    """

    is_part: bool = False
    rows: int = 0
    whole: int = 0
    sizes: frozenset[int] = frozenset()
    batches: int = 0
    turn: Turn = ALONE


class Label(NamedTuple):
    """One batch, or part of one: whether other ranks have other samples, this rank's number, and all; 0 unknown."""

    is_apart: bool
    rows: int
    whole: int
    turn: Turn = ALONE
    sizes: frozenset[int] = frozenset()


UNKNOWN = Label(False, 0, 0)


_COLUMNS = 2
"""Up to this number of tensors they are more likely the columns of a batch: inputs and targets."""

_MOST_UNDECIDED = 4
"""Whole batches after which dimensions of equal length are no chance any more."""

_TORCHS = (default_collate, default_convert)


def is_own(collate_fn: Any) -> bool:
    """Return whether `collate_fn` is none of torch's, which handle each sample by itself."""
    return collate_fn not in _TORCHS


class Layout:
    """Positions of the samples in one loader's batches.

    A loader's own collate_fn may pad to the longest sample, or mix samples, so that its result for a part is not a part
    of its result for the batch. Its batches are made whole and cut afterwards, along dimensions whose length is the
    number of samples. These are learnt from the batches before the first cut: lengths that are only equal by chance
    differ in another batch.

    Attributes:
        is_known: Batches can be cut, judging by those seen so far.
        makes_parts: They cannot, but the collate_fn can be given a part of the samples: its batch is an object that has
            what belongs to a sample side by side, such as a PyG batch of graphs. What else cannot be cut, such as all
            pairs of samples or an episode, has to be made of all of them.

    Example:
        >>> layout, lengths = Layout(), torch.tensor([3, 2])
        >>> layout.learn((torch.ones(3, 2), lengths), 2)
        >>> layout.samples((torch.arange(6).reshape(3, 2), lengths), 2).take(1, 2)
        (tensor([[1],
                [3],
                [5]]), tensor([2]))
    """

    def __init__(self) -> None:
        self.is_known = True
        self.makes_parts = False
        self._has_objects = False
        self._undecided = 0  # batches that could not be cut, and may be one later
        self._axes: dict[str, set[int]] = {}  # by path: dimensions that were as long as each batch had samples
        self._lists: dict[str, bool] = {}  # by path: whether a list has one entry per sample, once it is sure

    def learn(self, batch: Any, count: int) -> None:
        """Examine a whole batch of `count` samples."""
        if not self.is_known:
            return
        try:
            found = dict(self._look(batch, "batch", count))
        except CannotSplit:
            self.is_known = False
            return
        if self._has_objects:
            self.is_known, self.makes_parts = False, True
        if not found:
            self.is_known = False
        for path, axes in found.items():
            self._axes[path] = axes

    def samples(self, batch: Any, count: int) -> Samples:
        """Return the samples of a whole batch that was learnt; unknown where two dimensions were always equally long.

        Raises:
            CannotSplit: It is not clear where the samples are.
        """
        if any(len(axes) > 1 for axes in self._axes.values()):
            self._undecided += 1
            self.is_known = self.is_known and self._undecided < _MOST_UNDECIDED
            raise CannotSplit("two of its dimensions are always equally long")
        if not self.is_known:
            raise CannotSplit("it is not known what of them belongs to which sample")
        return Samples(batch, count, lambda whole, start, stop: self._cut(whole, "batch", start, stop, count))

    def _look(self, value: Any, path: str, count: int) -> Iterator[tuple[str, set[int]]]:
        """Yield the dimensions of each tensor that may count samples.

        Raises:
            CannotSplit: A value has no such dimension.
        """
        if is_array(value):
            axes = {axis for axis, length in enumerate(value.shape) if length == count}
            axes &= self._axes.get(path, axes)
            if not axes:
                raise CannotSplit(f"{path} has no dimension that counts samples")
            yield path, axes
            return
        if is_shared(value):
            return
        below = list(named_children(value, path))
        if not below and (_is_of_graphs(value) or _attributes(value)):
            self._has_objects = True
            if not _is_of_graphs(value):
                for name, child in _attributes(value).items():
                    yield from self._look(child, f"{path}.{name}", count)
            return
        has_entries = type(value) in (list, tuple) and len(value) == count
        if not has_entries and not below:
            raise CannotSplit(f"it is not known what of {path} ({type(value).__name__}) belongs to which sample")
        try:
            inside = [found for name, child in below for found in self._look(child, name, count)]
        except CannotSplit:
            if not has_entries:
                raise
            inside = []
        lists = self._lists.get(path, has_entries and (not inside or _are_alike(value)))
        if lists and not has_entries:
            raise CannotSplit(f"{path} has no entry for each sample any more")
        if lists or not has_entries:
            self._lists[path] = lists  # otherwise both are possible
        if lists:
            yield path, {0}
        else:
            yield from inside

    def _cut(self, value: Any, path: str, start: int, stop: int, count: int) -> Any:
        if is_array(value):
            # As dense as the whole one: programs call view() on it.
            part = value[(slice(None),) * min(self._axes[path]) + (slice(start, stop),)]
            return part.clone() if isinstance(part, Tensor) and _is_dense(value) and not _is_dense(part) else part
        if self._lists.get(path):
            return value[start:stop]
        names = iter([name for name, _ in named_children(value, path)])
        return map_children(lambda child: self._cut(child, next(names), start, stop, count), value)


def _is_of_graphs(value: Any) -> bool:
    """Return whether `value` is a batch of graphs of PyG or DGL, which numbers their nodes one after the other."""
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return not names.isdisjoint({("torch_geometric", "Batch"), ("dgl", "DGLGraph")})


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the program's own class."""
    is_plain = type(value).__module__.partition(".")[0] in ("builtins", "torch", "numpy", "torch_geometric")
    return {} if is_plain else dict(getattr(value, "__dict__", {}))


def _are_alike(entries: Sequence[Any]) -> bool:
    """Return whether the entries look like samples, as three images of three channels do, and not like columns."""
    kinds = {(entry.dtype, entry.ndim) if isinstance(entry, Tensor) else None for entry in entries}
    return len(entries) > _COLUMNS and len(kinds) == 1 and all(kind and kind[0].is_floating_point for kind in kinds)


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


# --- Where a batch is cut, into a part for each rank and into turns: all ranks find the same without communication ---

_UNEVEN = 2
"""Number of batches of each loop that are cut unevenly where they could be cut evenly: a divisor of the loss that
depends on the samples then differs between the ranks. Later ones are even: a program may take batches of two
loaders together, and their parts must be equally long where one of them begins again. No part of one sample results
from it, which batch norm could not use, and where a batch comes in several parts none that is longer than the later
ones, for which memory may not suffice."""


class Cutter:
    """Finds the borders of this rank's parts of a task's batches.

    Args:
        turns: The number of parts that a rank is given of each batch, one after the other, where there are enough
            samples.

    Attributes:
        cuts: Batches that were cut, by the key of their pass; the first parts of a pass are uneven.
    """

    def __init__(self, rank: int, world_size: int, turns: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._turns = turns
        self.cuts: Counter[Hashable] = Counter()

    def parts(self, key: Hashable, count: int) -> list[tuple[int, int, Label]]:
        """Return this rank's parts of a batch of `count` samples, each with its begin and end.

        Args:
            key: The key of the pass that the batch comes from.
        """
        size = self._world_size
        turns = max(1, min(self._turns, count // size))
        self.cuts[key] += 1
        is_early = self.cuts[key] <= _UNEVEN
        is_uneven = is_early and turns == 1 and not count % size and count >= 3 * size
        borders = [0, *(rank * count // size + is_uneven for rank in range(1, size)), count]
        if is_early and turns > 1 and count >= 4 * size * turns:
            edges = _uneven_turns(borders, turns)
        else:
            edges = [_evenly(begin, end, turns) for begin, end in itertools.pairwise(borders)]
        mine = edges[self._rank]
        turns = len(mine) - 1
        parts = []
        for at, (start, stop) in enumerate(itertools.pairwise(mine)):
            sizes = [each[at + 1] - each[at] for each in edges]
            turn = Turn(sum(sizes) / count, not at, at == turns - 1)
            parts.append((start, stop, Label(True, stop - start, count, turn, frozenset(sizes))))
        return parts


def _evenly(begin: int, end: int, parts: int) -> list[int]:
    """Return the borders of `parts` parts of a range, as equal as possible."""
    return [begin + (end - begin) * at // parts for at in range(parts + 1)]


def _uneven_turns(borders: Sequence[int], turns: int) -> list[list[int]]:
    """Return for each rank the borders of its parts: the first is longer in rank 0, none longer than an even one.

    Args:
        borders: The borders of the ranks' samples.
    """
    ranks = list(itertools.pairwise(borders))
    longest = max(math.ceil((end - begin) / turns) for begin, end in ranks)
    firsts = [begin + longest - bool(rank) for rank, (begin, _) in enumerate(ranks)]
    rest = max(math.ceil((end - first) / longest) for first, (_, end) in zip(firsts, ranks, strict=True))
    return [[begin, *_evenly(first, end, rest)] for first, (begin, end) in zip(firsts, ranks, strict=True)]
