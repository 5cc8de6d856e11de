"""The batches of a pass that a dry run gives: the longest, one in between, the last. Used in ranks; pure.

A pass is a list of batches of indices. The size of a batch is that of its padded tensor: its longest item times its
number of items. Items are read from the data set for that, some thousands at most, and for two seconds at most; items
that are all alike, such as pictures of one size, end the scan after a few. A data set that counts its reads, or caches
them, sees the reads of the scan. An item that cannot be read ends the scan: the batch that has it raises the error.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, Self

from torch import Tensor

from nbaccel.base.values import frozen
from nbaccel.train.distributed.nested import leaves

__all__ = [
    "BETWEEN",
    "FIRST",
    "LAST",
    "LONGEST",
    "ChosenBatches",
    "ItemLengths",
    "choose",
    "count_rows",
    "size_of_item",
]

LONGEST, BETWEEN, LAST, FIRST = "longest", "between", "last", "first"
"""Kinds of batches; "first" are those of a pass whose batches cannot be listed."""

_SPARE = 40
_LOOKS = 16
_MOST_ITEMS = 20_000
_MOST_SECONDS = 2.0
_GOLDEN = 0.618
_TOKENS = "input_ids"
_DEEPEST = 3


@frozen
class ChosenBatches:
    """The rounds of a pass to be given, in this order. A round is as many batches as all readers take at a time.

    Args:
        positions: The positions of each round in the pass.
        kinds, sizes: Those of each; a size is None where batches do not differ.
        given: How many of them a loop gets; the others are for a program that draws by ``next`` and counts on more.
        rounds: How many the pass has.
        mean_size: The mean size of those that were scanned; None where they do not differ.
    """

    positions: tuple[int, ...]
    kinds: tuple[str, ...]
    sizes: tuple[float | None, ...]
    given: int
    rounds: int
    mean_size: float | None

    @property
    def are_all(self) -> bool:
        """True if no round of the pass is left out."""
        return self.given >= self.rounds

    def record(self) -> dict[str, Any]:
        """Return the choice as a value of JSON, for other ranks."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the choice that `record` has written.

        Example:
            >>> chosen = choose(4, {})
            >>> ChosenBatches.from_record(chosen.record()) == chosen
            True
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)


def choose(
    rounds: int,
    sizes: Mapping[int, float],
    more: int = 0,
    *,
    is_between_first: bool = False,
    has_last: bool = True,
) -> ChosenBatches:
    """Choose of `rounds` rounds, at least one: the longest, one of median size, `more` others, and the last one.

    Args:
        sizes: The sizes of the rounds that were scanned, by position; empty where they do not differ.
        is_between_first: Begin with the one in between, for a loop whose first batch is not cut yet.
        has_last: The last round is the last one of the pass; otherwise the pass goes on, and it is one like the others.

    Example:
        >>> chosen = choose(100, {0: 4.0, 1: 9.0, 2: 5.0, 99: 2.0})
        >>> chosen.positions[:chosen.given]
        (1, 2, 99)
    """
    last = rounds - 1
    inner = range(last if has_last else rounds)
    more += not has_last
    scanned = sorted((position for position in sizes if position in inner), key=lambda each: (sizes[each], each))
    longest = scanned[-1] if scanned else 0
    rest = [position for position in scanned if position != longest] or [each for each in inner if each != longest]
    between = rest[len(rest) // 2] if rest else longest
    chosen = [(longest, LONGEST), (between, BETWEEN)][: len(inner)]
    if is_between_first:
        chosen.reverse()
    others = [each for each in inner if each not in (longest, between)]
    picked = _evenly(others, more)
    chosen += [(position, BETWEEN) for position in picked]
    if has_last:
        chosen.append((last, LAST))
    given = len(chosen)
    taken = set(picked)
    chosen += [(position, BETWEEN) for position in _evenly([each for each in others if each not in taken], _SPARE)]
    return ChosenBatches(
        tuple(position for position, _ in chosen),
        tuple(kind for _, kind in chosen),
        tuple(sizes.get(position) for position, _ in chosen),
        given,
        rounds,
        statistics.fmean(sizes.values()) if sizes else None,
    )


def _evenly(positions: list[int], count: int) -> list[int]:
    """Return `count` of the positions, spread over them; all where there are no more."""
    if len(positions) <= count:
        return positions
    return [positions[(number + 1) * len(positions) // (count + 1)] for number in range(count)]


class ItemLengths:
    """Lengths of the items of data sets, each read once.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[weakref.ref[Any], dict[Any, int]]] = {}

    def sizes(self, dataset: Any, rounds: Sequence[Sequence[Any]]) -> dict[int, float]:
        """Return the sizes of rounds by position: of all, or of those that the scan reached; empty if all are alike.

        Args:
            rounds: Each one batches of indices. A round is as large as its largest batch: the readers wait for each
                other.
        """
        lengths = self._lengths_of(dataset)
        sizes: dict[int, float] = {}
        with _own_randomness(), suppress(Exception):  # of the program's own data set, see above
            until, most = self._clock() + _MOST_SECONDS, len(lengths) + _MOST_ITEMS
            if self._are_alike(dataset, rounds, lengths, until):
                return {}
            for position in _spread(len(rounds)):
                if self._clock() > until or len(lengths) >= most:
                    break
                sizes[position] = max(self._size(dataset, batch, lengths, until) for batch in rounds[position])
        return sizes if len(set(sizes.values())) > 1 else {}

    def _lengths_of(self, dataset: Any) -> dict[Any, int]:
        known = self._known.get(id(dataset))
        if known is not None and known[0]() is dataset:
            return known[1]
        lengths: dict[Any, int] = {}
        with suppress(TypeError):  # a list, to which there are no weak references: it is read each time
            self._known[id(dataset)] = weakref.ref(dataset), lengths
        return lengths

    def _are_alike(self, dataset: Any, rounds: Sequence[Sequence[Any]], lengths: dict[Any, int], until: float) -> bool:
        """Return whether a few items, spread over the pass, have one length, as far as they were read in time."""
        looks = set()
        for position, _ in zip(_spread(len(rounds)), range(_LOOKS), strict=False):
            if self._clock() > until:
                break
            index = _indices(rounds[position][0])
            looks.add(self._length(dataset, index[0], lengths) if index else 0)
            looks.add(self._length(dataset, index[-1], lengths) if index else 0)
        return len(looks) < 2

    def _size(self, dataset: Any, batch: Any, lengths: dict[Any, int], until: float) -> float:
        indices = _indices(batch)
        longest = 0
        for index in indices:
            longest = max(longest, self._length(dataset, index, lengths))
            if self._clock() > until:
                raise TimeoutError
        return float(longest * len(indices))

    def _length(self, dataset: Any, index: Any, lengths: dict[Any, int]) -> int:
        if index not in lengths:
            lengths[index] = size_of_item(dataset[index])
        return lengths[index]


def _indices(batch: Any) -> list[Any]:
    """Return the indices of a batch, which may be a list of them, or a single one."""
    if isinstance(batch, list | tuple):
        return list(batch)
    if hasattr(batch, "tolist"):
        listed = batch.tolist()
        return listed if isinstance(listed, list) else [listed]
    return [batch]


def _spread(count: int) -> Iterator[int]:
    """Yield 0 to `count` - 1, the last one first, so that any beginning of them is spread evenly."""
    step = next((each for each in range(max(1, int(count * _GOLDEN)), count) if math.gcd(each, count) == 1), 1)
    return ((count - 1 + number * step) % count for number in range(count))


def count_rows(value: Any) -> int | None:
    """Return the first dimension of the first tensor in `value`; None without one. Of a batch that is a guess, to be
    shown only: a `CountedBatch` knows how many samples it has.
    """
    return next((each.shape[0] for each in leaves(value) if isinstance(each, Tensor) and each.ndim), None)


def size_of_item(item: Any) -> int:
    """Return the length of an item: of its `input_ids`, else of its tensors and arrays, its lists, or its texts.

    Example:
        >>> size_of_item({"input_ids": [1, 2, 3], "label": 0}), size_of_item(("four", 1)), size_of_item(7)
        (3, 4, 0)
    """
    found: dict[str, int] = {}
    _measure(item, found, 0)
    return next((found[kind] for kind in (_TOKENS, "tensor", "list", "text") if kind in found), 0)


def _measure(value: Any, found: dict[str, int], depth: int) -> None:
    """Add the length of `value`, or of its parts, to that of their kind in `found`."""
    if isinstance(value, str | bytes):
        found["text"] = found.get("text", 0) + len(value)
    elif hasattr(value, "shape"):  # a tensor, or an array
        if shape := tuple(value.shape):
            found["tensor"] = found.get("tensor", 0) + math.prod(shape)
    elif isinstance(getattr(value, "size", None), tuple):  # an image of PIL
        found["tensor"] = found.get("tensor", 0) + math.prod(value.size)
    elif depth > _DEEPEST:
        return
    elif isinstance(value, Mapping):
        if _TOKENS in value:
            found[_TOKENS] = found.get(_TOKENS, 0) + size_of_item(value[_TOKENS])
        for each in value.values():
            _measure(each, found, depth + 1)
    elif isinstance(value, list) and value and all(isinstance(each, int | float) for each in (value[0], value[-1])):
        found["list"] = found.get("list", 0) + len(value)
    elif isinstance(value, list | tuple):
        for each in value:
            _measure(each, found, depth + 1)
    elif vars_of := getattr(value, "__dict__", None):
        for each in list(vars_of.values()):
            _measure(each, found, depth + 1)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Put the random states of Python, NumPy and torch's CPU back when left."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    states = random.getstate(), numpy and numpy.random.get_state(), torch and torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
