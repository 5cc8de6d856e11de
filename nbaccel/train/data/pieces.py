"""Torch's samplers with their order drawn and read in pieces. Runs in ranks; the order is torch's, bit for bit.

Torch draws the permutation of an epoch and makes a list of Python integers of it before the first index: 40 bytes a
sample, and seconds for millions of samples. Here the order is a tensor of 4 bytes a sample, a few thousand integers
exist at a time, and a long permutation is drawn while it is read. Samplers of the user's own classes do not change.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["in_pieces", "iterated_in_pieces", "iterates_as_torch", "permutation"]

_PIECE = 8192
"""Integers at a time, an even number. With more of them `_swap` has more conflicts, fewer cost more calls."""

_SHORT = 1 << 22
"""So many numbers torch permutes in a tenth of a second: drawing them while they are read saves nothing."""

_LONG = (2**32 - 1) // 20
"""Length above which torch takes 64 random bits for a number in place of 32 (`randperm_cpu`, TensorFactories)."""

_SKIPPED_AT_ONCE = 1 << 20


def in_pieces(batches: Any) -> Any:
    """Return a sampler or batch sampler that yields what `batches` yields, in the same order, with less memory.

    A copy shares the generator of the original, and leaves it in the state in which the original would. A sampler for
    which there is no smaller form is returned itself.
    """
    own = _IN_PIECES.get(type(batches))
    if own is not None:
        lean = copy.copy(batches)
        lean.__class__ = own
        return lean
    if type(batches) is BatchSampler:
        inner = in_pieces(batches.sampler)
        if inner is not batches.sampler:
            batches = copy.copy(batches)
            batches.sampler = inner
    return batches


def iterated_in_pieces(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate `loader` with its sampler read in pieces; persistent workers remain the loader's own."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    lean = in_pieces(batches)
    if lean is batches or not iterates_as_torch(loader):
        return iter(loader)
    again = copy.copy(loader)  # a loader refuses assignment of another sampler
    again.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = lean
    iterator = iter(again)
    if loader.persistent_workers:
        loader._iterator = again._iterator
    return iterator


def permutation(count: int, generator: torch.Generator | None) -> Iterator[int]:
    """Iterate ``torch.randperm(count, generator=generator)``, in 4 bytes a number.

    With the first number the generator is in the state in which torch leaves it; a long permutation is then drawn
    from a copy of it, while it is read.

    Example:
        >>> list(permutation(5, torch.Generator().manual_seed(0)))
        [4, 0, 1, 3, 2]
    """
    if _SHORT < count < _LONG and _is_on_cpu(generator) and _draws_as_torch():
        return itertools.chain.from_iterable(_drawn_while_read(count, generator, _SHORT))
    return itertools.chain.from_iterable(_drawn_at_once(count, generator))


class _RandomInPieces(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return super().__iter__() if self.replacement else self._permuted()  # torch replaces 32 at a time

    def _permuted(self) -> Iterator[int]:
        count, wanted = len(self.data_source), self.num_samples
        generator = _seeded_by_the_process() if self.generator is None else self.generator
        rounds, rest = divmod(wanted, count)
        # Torch begins another permutation also where none of it is wanted; the generator's next draws follow from it.
        orders = (permutation(count, generator) for _ in range(rounds + 1))
        for order in itertools.islice(orders, rounds):
            yield from order
        if rest or self.generator is not None:
            yield from _first(rest, next(orders))


class _SubsetInPieces(SubsetRandomSampler):
    def __iter__(self) -> Iterator[int]:
        return map(self.indices.__getitem__, permutation(len(self.indices), self.generator))


class _WeightedInPieces(WeightedRandomSampler):
    def __iter__(self) -> Iterator[int]:
        # A sampler made under a default device has its weights there; what all ranks seed alike is on the CPU.
        weights = self.weights if self.generator is None else self.weights.to(self.generator.device)
        yield from itertools.chain.from_iterable(
            _pieces(torch.multinomial(weights, self.num_samples, self.replacement, generator=self.generator))
        )


class _DistributedInPieces(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        count, total = len(self.dataset), self.total_size  # type: ignore[arg-type]
        order: Iterator[int] = iter(range(count))
        if self.shuffle:
            order = permutation(count, torch.Generator().manual_seed(self.seed + self.epoch))
        first = list(itertools.islice(order, max(0, total - count)))  # they fill the replicas up at the end
        return itertools.islice(
            itertools.chain(first, order, itertools.cycle(first)), self.rank, total, self.num_replicas
        )


_IN_PIECES: dict[type[Sampler[Any]], type[Sampler[Any]]] = {
    RandomSampler: _RandomInPieces,
    SubsetRandomSampler: _SubsetInPieces,
    WeightedRandomSampler: _WeightedInPieces,
    DistributedSampler: _DistributedInPieces,
}


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def _is_on_cpu(generator: torch.Generator | None) -> bool:
    return generator is None or generator.device.type == "cpu"


def _first(count: int, order: Iterator[int]) -> Iterator[int]:
    """Yield the first `count` of `order`, which is begun even if `count` is 0."""
    begun = list(itertools.islice(order, 1))
    return itertools.islice(itertools.chain(begun, order), count)


def _seeded_by_the_process() -> torch.Generator:
    """Return a generator for one epoch, with the draw that torch's sampler makes from the process's own."""
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))


def _pieces(order: torch.Tensor) -> Iterator[list[int]]:
    for start in range(0, len(order), _PIECE):
        yield order[start : start + _PIECE].tolist()


# -- permutations. Torch's is that of Fisher and Yates: step i swaps place i with one of the places from i on.


def _drawn_at_once(count: int, generator: torch.Generator | None) -> Iterator[list[int]]:
    """Yield a permutation in pieces. Its dtype changes neither the order nor the draws."""
    dtype = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
    device = "cpu" if generator is None else generator.device
    yield from _pieces(torch.randperm(count, generator=generator, dtype=dtype, device=device))


def _drawn_while_read(count: int, generator: torch.Generator | None, rest: int) -> Iterator[list[int]]:
    """Yield the first i places after i steps, when they are final.

    Args:
        rest: How many numbers are drawn at once.
    """
    visible = torch.default_generator if generator is None else generator
    generator = torch.Generator().set_state(visible.get_state())
    _skip_draws(visible, count - 1)
    order = torch.arange(count, dtype=torch.int32, device="cpu")
    start = 0
    while count - start > rest:
        stop = min(start + _PIECE, count)
        places = torch.arange(start, stop, device="cpu")
        _swap(order, start, _draws(stop - start, generator).remainder_(count - places).add_(places))
        yield order[start:stop].tolist()
        start = stop
    # The remaining steps are those of a permutation of the remaining numbers.
    yield from _pieces(
        order[start:][torch.randperm(count - start, generator=generator, dtype=torch.int32, device="cpu")]
    )


def _swap(order: torch.Tensor, start: int, partners: torch.Tensor) -> None:
    """Swap the places from `start` on with their `partners`, as if one after the other.

    All are swapped at once, except the few that conflict: a partner that is one of these places, or that of two.
    """
    mine = order[start : start + len(partners)]
    ascending, by_partner = partners.sort()
    twice = (ascending[1:] == ascending[:-1]).nonzero().flatten()
    inside = int(torch.searchsorted(ascending, start + len(partners)))
    steps = torch.cat((by_partner[twice], by_partner[twice + 1], by_partner[:inside], ascending[:inside] - start))
    steps = steps.unique()
    touched = torch.cat((steps + start, partners[steps]))
    values = dict(zip(touched.tolist(), order[touched].tolist(), strict=True))
    for place, partner in zip((steps + start).tolist(), partners[steps].tolist(), strict=True):
        values[place], values[partner] = values[partner], values[place]
    taken = order.index_select(0, partners)
    order.index_copy_(0, partners, mine.clone())
    mine.copy_(taken)
    order[torch.tensor(list(values), dtype=torch.int64, device="cpu")] = torch.tensor(
        list(values.values()), dtype=order.dtype, device="cpu"
    )


def _draws(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return the next `count` draws of 32 bits; for an odd number, one more draw is lost."""
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    return torch.stack((pairs >> 32, pairs), 1).flatten()[:count].bitwise_and_(2**32 - 1)


def _skip_draws(generator: torch.Generator, count: int) -> None:
    """Leave `generator` in the state after `count` draws of 32 bits, at 2 ns each."""
    pairs = torch.empty(min(count // 2, _SKIPPED_AT_ONCE), dtype=torch.int64, device="cpu")
    for done in range(0, count // 2, _SKIPPED_AT_ONCE):
        pairs[: count // 2 - done].random_(-(2**63), None, generator=generator)
    torch.empty(count % 2, dtype=torch.int32, device="cpu").random_(generator=generator)


@functools.cache
def _draws_as_torch() -> bool:
    """Return whether this torch permutes in the way that `_drawn_while_read` implements."""
    count = 2 * _PIECE + 4
    ours, torchs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    order = list(itertools.chain.from_iterable(_drawn_while_read(count, ours, rest=_PIECE)))
    is_alike = order == torch.randperm(count, generator=torchs, device="cpu").tolist()
    return is_alike and torch.equal(ours.get_state(), torchs.get_state())
