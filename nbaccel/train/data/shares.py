"""Shares: whether data are dealt to ranks already, or ranks would draw different orders. Runs in ranks.

Data that a program has shared out itself must not be dealt again: every rank would leave out what it passes to nobody.
Known forms say so themselves (`share_of`): a `DistributedSampler`, the samplers of other libraries, and streams of
`datasets.distributed.split_dataset_by_node`. For anything else the numbers decide that ranks draw, compared when the
loader is prepared: those of the dataset's rows (`rows_of`), and the order of a whole epoch (`order_of`), which is drawn
from a copy of the sampler. Equal numbers are dealt, numbers without common ones are shares; `repeats` counts.

A stream is not read in advance, since that may use it up. What it holds is compared (`held_by`), such as its files; and
one whose code asks for the number of ranks deals itself (`asked_by`).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from nbaccel.train.data.order import SharedOrder, samplers_of
from nbaccel.train.data.sources import length_of

__all__ = [
    "MOST_NUMBERS",
    "OF_NAMES",
    "are_dealt",
    "asked_by",
    "digest_of",
    "held_by",
    "order_of",
    "repeats",
    "rows_of",
    "share_of",
]

MOST_NUMBERS = 1_000_000
"""Numbers that are compared. A longer order is not drawn in advance: it takes seconds, and 8 bytes a number."""

_AT_ONCE = 4096
"""Indices that are drawn between two exchanges of the process's random numbers, which take 100 us."""

_FROM_THE_LENGTH = (SequentialSampler, RandomSampler)

_RANK = ("rank", "_rank", "process_index", "_process_index")
_RANKS = ("num_replicas", "_num_replicas", "world_size", "_world_size", "num_processes", "_num_processes")


_ASKS = {"get_world_size", "num_processes", "WORLD_SIZE"}
"""How a program asks for the number of ranks. One that deals needs it; one that only prints in rank 0 does not."""

_ASKS_RANK = {"RANK", "LOCAL_RANK", "get_rank", "local_process_index", "process_index", "rank"}
"""How it asks for its rank, which one that deals needs too; one that has ``num_processes`` to decode with does not."""

OF_NAMES = " (names)"
"""End of the key of a list of names, in `held_by`."""

_LIBRARIES = ("torch.", "datasets.", "torchdata.")
"""Packages whose streams ask for ranks only where they are told to, and say so."""

_MOST_CALLS = 3
"""Functions that call each other, from a method of the stream on."""


def share_of(loader: DataLoader[Any]) -> tuple[int, int] | None:
    """Return which share of how many the data of `loader` are, as its samplers or its dataset say; None if not said."""
    for owner in (*samplers_of(loader), getattr(loader.dataset, "_distributed", None), loader.dataset):
        rank, ranks = _number(owner, _RANK), _number(owner, _RANKS)
        if rank is not None and ranks is not None and ranks > 1:
            return rank, ranks
    return None


def order_of(loader: DataLoader[Any]) -> list[int] | None:
    """Return the indices of an epoch, drawn from a copy of the loader's samplers with random numbers of their own.

    An empty list for torch's own samplers, whose order follows from the length of the dataset and a seed that ranks
    share. As many as there are samples where the sampler has no end. None where they cannot be known: there are no
    indices, no copy, too many of them, or drawing fails.
    """
    if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(getattr(batches, "sampler", batches) if type(batches) is BatchSampler else batches) in _FROM_THE_LENGTH:
        return []
    with suppress(Exception):  # of the program's own classes: what they draw is compared while it is read
        length = length_of(batches)
        if length is not None and length * (loader.batch_size or 1) > 2 * MOST_NUMBERS:
            return None
        most = MOST_NUMBERS if length is not None else min(MOST_NUMBERS, len(loader.dataset))  # type: ignore[arg-type]
        order = SharedOrder(_copied(batches, loader.dataset), 0, at_once=_AT_ONCE)
        drawn = list(itertools.islice(_flat(order), most + (length is not None)))
        return drawn if len(drawn) <= most else None
    return None


def rows_of(dataset: Any) -> Sequence[int] | None:
    """Return the numbers of the rows that `dataset` takes from a larger one; None if it does not tell them.

    torch's `Subset` tells them, and so do datasets of Hugging Face that lie in one piece of memory.
    """
    if type(dataset) is Subset:
        inside = rows_of(dataset.dataset)
        with suppress(Exception):
            if len(dataset.indices) <= MOST_NUMBERS:
                rows = [operator.index(row) for row in dataset.indices]
                return rows if inside is None else [inside[row] for row in rows]
        return None
    if not isinstance(getattr(dataset, "_fingerprint", None), str):
        return None
    with suppress(Exception):
        if dataset._indices is None:
            (chunk,) = dataset._data.column(0).chunks
            return range(chunk.offset, chunk.offset + len(dataset))
        if len(dataset) <= MOST_NUMBERS:
            return [int(row) for row in dataset._indices.column(0).to_pylist()]
    return None


def held_by(dataset: Any) -> dict[str, list[int]]:
    """Return numbers for the elements of each list of numbers or names that the stream `dataset` holds, by attribute.

    Files that a program has shared out, as ``files[rank::ranks]``, differ between ranks, and have none in common.
    """
    held: dict[str, list[int]] = {}
    for place, part in _parts(dataset):
        for name, value in getattr(part, "__dict__", {}).items():
            with suppress(Exception):  # a tensor without data, or an object of the program's own classes
                if issubclass(type(value), torch.Tensor) or type(value).__module__ == "numpy":
                    value = value.tolist() if getattr(value, "ndim", 0) == 1 and len(value) <= MOST_NUMBERS else ()
                is_list = issubclass(type(value), (list, tuple, range)) and 0 < len(value) <= MOST_NUMBERS
                if is_list and all(isinstance(each, (int, str, os.PathLike)) for each in value):
                    are_names = not isinstance(value[0], int)
                    held[place + name + OF_NAMES * are_names] = list(map(_as_number, value))
    return held


def are_dealt(name: str, shares: Sequence[Sequence[int]]) -> bool:
    """Return whether lists that all ranks hold as `name` can be shares of one: they have no common elements.

    Of numbers they have, together, half of a range or more: seeds and ids of processes are no samples.
    """
    if not all(shares) or repeats(shares):
        return False
    every = set(itertools.chain.from_iterable(shares))
    return name.endswith(OF_NAMES) or 2 * len(every) > max(every) - min(every)


def asked_by(dataset: Any) -> str:
    """Return the method of the stream `dataset` that asks for the number of ranks; "" for none. Nothing is called."""
    for _, part in _parts(dataset):
        asked, method = set[str](), ""
        for kind in type(part).__mro__:
            if kind is object or f"{kind.__module__}.".startswith(_LIBRARIES):
                continue
            for name, function in vars(kind).items():
                if type(function) is FunctionType:
                    found = _asked(function, _MOST_CALLS)
                    asked |= found
                    method = method or (f"{kind.__name__}.{name}" if found & _ASKS else "")
        if method and asked & _ASKS_RANK:
            return method
    return ""


def _parts(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield `dataset` and the datasets inside of it, each with the path of attributes that leads to it."""
    waiting, seen = [("", dataset)], {id(dataset)}
    while waiting:
        place, part = waiting.pop()
        yield place, part
        for name, value in getattr(part, "__dict__", {}).items():
            if issubclass(type(value), Dataset) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{place}{name}.", value))


def _asked(function: FunctionType, calls: int) -> set[str]:
    """Return how the code of `function`, and of those that it calls by name, asks for ranks."""
    codes: list[CodeType] = [function.__code__]
    words: set[str] = set()
    for code in codes:  # with those of functions inside, which are added meanwhile
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        words.update(code.co_names, (each for each in code.co_consts if type(each) is str))
    found = words & (_ASKS | _ASKS_RANK)
    names = {name for code in codes for name in code.co_names} if calls else set[str]()
    for each in map(function.__globals__.get, names):
        if type(each) is FunctionType and each is not function:  # ``__class__`` of a proxy runs the program's code
            found |= _asked(each, calls - 1)
    return found


def digest_of(numbers: Sequence[int]) -> int:
    """Return a number of 63 bits that is equal for equal `numbers`, in the same order; 0 for none."""
    if not numbers:
        return 0
    text = repr(numbers).encode() if isinstance(numbers, range) else array("q", numbers).tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1 or 1


def repeats(shares: Sequence[Sequence[int]]) -> int:
    """Return how many of the numbers in `shares` are in a share of another rank, too; each one counts once.

    Example:
        >>> repeats([[0, 2, 4], [1, 3, 0]])
        1
        >>> repeats([range(0, 10**9), range(10**9 - 1, 2 * 10**9)])
        1
    """
    if all(isinstance(share, range) for share in shares):
        inner = sorted((share.start, share.stop) for share in shares if share)  # type: ignore[attr-defined]
        ends = itertools.accumulate((stop for _, stop in inner), max)
        return sum(max(0, min(end, stop) - start) for end, (start, stop) in zip(ends, inner[1:], strict=False))
    ranks = Counter(itertools.chain.from_iterable(set(share) for share in shares))
    return sum(count > 1 for count in ranks.values())


def _number(owner: Any, names: Iterable[str]) -> int | None:
    for name in names:
        with suppress(Exception):
            value = getattr(owner, name, None)
            if type(value) is int:
                return value
    return None


def _flat(order: Iterable[Any]) -> Iterator[int]:
    for each in order:
        if isinstance(each, (list, tuple)) and not isinstance(each, str):
            yield from map(_as_number, each)
        elif isinstance(each, torch.Tensor) and each.ndim:
            yield from each.tolist()
        else:
            yield _as_number(each)


def _as_number(index: Any) -> int:
    if type(index) is int or not isinstance(index, str):
        try:
            number = operator.index(index)
            if -(1 << 63) <= number < 1 << 63:  # what an exchange takes
                return number
        except TypeError:
            pass
    return zlib.crc32(repr(index).encode())


def _copied(batches: Any, dataset: Any) -> Any:
    """Return a copy of a sampler that draws without changing it. What the copy only reads, data and models, it shares.

    Raises:
        Exception: It cannot be copied.
    """
    shared: dict[int, Any] = {id(dataset): dataset}
    for sampler in samplers_of(batches):
        for value in getattr(sampler, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                shared[id(value)] = torch.Generator(value.device).set_state(value.get_state())
            elif isinstance(value, (Dataset, torch.nn.Module, DataLoader)) or _is_large(value):
                shared[id(value)] = value
    return copy.deepcopy(batches, shared)


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > MOST_NUMBERS
