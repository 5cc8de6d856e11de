"""Deal an iterable of batches to ranks, and refuse to train with different numbers of them. Runs in ranks.

Dealing is pure, without communication. A `BatchShard` deals batches of indices before anything is read; a `StreamShard`
deals collated batches. In `dispatch` rank 0 reads and sends the shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

from nbaccel.base.world import World
from nbaccel.errors import CannotSplit
from nbaccel.train.data.counting import as_counted
from nbaccel.train.data.position import DatasetStates
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.counted_batch import CountedBatch, joined
from nbaccel.train.distributed.nested import leaves, map_children

__all__ = [
    "NOTHING",
    "BatchShard",
    "Shard",
    "StreamShard",
    "counted",
    "look_ahead",
    "refuse_uneven",
    "unshared",
    "until_backward",
]

_T = TypeVar("_T")

NOTHING: Any = object()
"""The share of a rank for which an uneven last round has no batch."""


class Shard(Iterable[Any]):
    """One rank's share of an iterable of batches.

    In rounds of one batch per rank, rank r takes batches r, r + n, r + 2n, ...; with `split` every batch is cut into n
    equal parts instead, and a short one before the end into parts that differ by one sample. In the last, incomplete
    round
      - `drop_last` drops it;
      - `even` fills it up with the epoch's first samples, so that every rank has equally many full batches;
        `remainder` then says how many samples of that round were real (they come first);
      - otherwise the ranks get what is left, the last ones nothing.
    Batches without a known size are repeated whole where the round is filled.

    Attributes:
        skip: How many of the batches (not of this rank's alone) the next iteration leaves out.
        tell_first: Called with the first round of an iteration before it is dealt; None: nobody wants to know.
    """

    def __init__(
        self, batches: Iterable[Any], world: World, batch_size: int | None, *, even: bool, split: bool, drop_last: bool
    ) -> None:
        self.batches = batches
        self.world_size = world.world_size
        self.rank = world.rank
        self.batch_size = batch_size
        self.even = even
        self.split = split
        self.drop_last = drop_last
        self.skip = 0
        self.remainder = -1
        self.tell_first: Callable[[list[Any]], None] | None = None
        if split and (batch_size is None or batch_size % world.world_size):
            raise ValueError(
                f"split_batches needs a batch_size that divides by the {world.world_size} ranks, got {batch_size}"
            )

    @property
    def stride(self) -> int:
        """Batches in a round."""
        return 1 if self.split else self.world_size

    @property
    def may_be_uneven(self) -> bool:
        """True if ranks may hold batches of different sizes at the same time."""
        return self.batch_size is None or not (self.even or self.drop_last) or (self.split and self._may_be_short())

    def _may_be_short(self) -> bool:
        """Return whether a batch may be short, or long, with others after it."""
        return type(getattr(self.batches, "given", self.batches)) is not BatchSampler

    def __len__(self) -> int:
        """Return how many batches this rank gets; TypeError where the batches themselves have no length."""
        return self.lengths(self.skip)[self.rank]

    def lengths(self, skip: int = 0) -> list[int]:
        """Return the number of batches that each rank gets.

        Args:
            skip: The number of batches that are left out before.

        Raises:
            TypeError: The batches have no length.
        """
        return self.lengths_of(len(self.batches) - skip)  # type: ignore[arg-type]

    def lengths_of(self, batches: int) -> list[int]:
        """Return the number of batches that each rank gets.

        Args:
            batches: The number of batches that are dealt.
        """
        rounds, extra = divmod(max(0, batches), self.stride)
        if self.split:
            return [rounds - (rounds > 0 and self._is_left_out(rank)) for rank in range(self.world_size)]
        if self.drop_last:
            return [rounds] * self.world_size
        return [rounds + (bool(extra) if self.even else rank < extra) for rank in range(self.world_size)]

    def __iter__(self) -> Iterator[Any]:
        rank, is_whole = self.rank, not self.split
        for members, first, is_last in self.rounds():
            if is_whole and not is_last:
                yield members[rank]  # nearly always, and saves a call
            else:
                batch = self.part(members, first, is_last, rank)
                if batch is not NOTHING:
                    yield batch

    def deal(self) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches, each with a bool that says whether it is the last one."""
        if self.even or self.drop_last:
            return ((self.part(*round_, self.rank), round_[2]) for round_ in self.rounds())
        return look_ahead(self)  # a rank that gets nothing in the last round must know in the one before

    def rounds(self) -> Iterator[tuple[list[Any], list[Any], bool]]:
        """Yield for each round its batches, the batches that complete it, and whether it is the last one.

        A round is one batch for every rank. The last one may have fewer.
        """
        self.remainder = -1
        batches = self._begin()
        # The fill is the epoch's first round, also when the epoch is resumed after it.
        first = list(itertools.islice(batches, min(self.skip, self.stride)))
        for _ in itertools.islice(batches, self.skip - len(first)):
            pass
        return self._rounds_from(batches, first)

    def _rounds_from(self, batches: Iterator[Any], first: list[Any]) -> Iterator[tuple[list[Any], list[Any], bool]]:
        rounds = self._read(batches)
        following = next(rounds, None)
        if self.tell_first is not None and following is not None:
            self.tell_first(following)
        while following is not None:
            members, following = following, next(rounds, None)
            first = first or members
            if following is None and not self._is_complete(members):
                self.remainder = self._count(members)
            yield members, first, following is None

    def part(self, members: list[Any], first: list[Any], is_last: bool, rank: int) -> Any:
        """Return the share of one rank of a round; NOTHING where it gets none.

        Args:
            members: The batches of the round.
            first: The batches that complete it.
            is_last: Whether it is the last round.
            rank: The rank.
        """
        if is_last and not self._is_complete(members):
            return self._last_parts(members, first)[rank]
        return self._portion(members[0], first, rank) if self.split else self._whole(members[rank])

    def _last_parts(self, members: list[Any], first: list[Any]) -> list[Any]:
        """Return the share of each rank of an incomplete round."""
        if self.even:
            return self._fill(members, first)
        if self.split:
            return [self._piece(members[0], rank) for rank in range(self.world_size)]
        return [self._whole(batch) for batch in members] + [NOTHING] * (self.world_size - len(members))

    def _is_complete(self, members: list[Any]) -> bool:
        if len(members) < self.stride:
            return False
        return self.batch_size is None or self._size(members[-1]) == self.batch_size

    def _count(self, members: list[Any]) -> int:
        """Return the number of samples in `members`; -1 where they cannot be counted, or nothing is filled up."""
        sizes = [self._size(batch) for batch in members]
        return -1 if not self.even or None in sizes else sum(size for size in sizes if size is not None)

    def _fill(self, members: list[Any], first: list[Any]) -> list[Any]:
        """Return a batch of the last round for each rank, completed from the `first` round."""
        have = self._count(members)
        length = self._share_of(have)
        if have < 0 or length is None:
            return self._repeated(members, first)
        return self._dealt(self._filled_up(members, first, have, length * self.world_size), length)

    def _share_of(self, samples: int) -> int | None:
        """Return how many samples each rank gets in a last round of so many; None where batches have no known size."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.world_size if self.split else self.batch_size

    def _dealt(self, parts: list[Any], length: int) -> list[Any]:
        """Return `length` samples of `parts` for each rank, one rank after the other."""
        return [self._cut(parts, length * rank, length * (rank + 1)) for rank in range(self.world_size)]

    def _repeated(self, members: list[Any], first: list[Any]) -> list[Any]:
        """Return a whole batch for each rank."""
        batches = [*members, *itertools.islice(itertools.cycle(first), self.world_size)]
        return [self._whole(batch) for batch in batches[: self.world_size]]

    def _filled_up(self, members: list[Any], first: list[Any], have: int, wanted: int) -> list[Any]:
        """Return `members`, and as many batches of the first round after them as give `wanted` samples.

        At least one of them: batches that give nothing show what of a batch belongs to its samples.
        """
        parts = list(members)
        for batch in itertools.cycle(first):
            if have >= wanted and len(parts) > len(members):
                break
            parts.append(batch)
            have += self._size(batch) or 1
        return parts

    def _piece(self, batch: Any, rank: int) -> Any:
        assert self.batch_size is not None
        length, size = self.batch_size // self.world_size, self._size(batch)
        if size is not None and size <= length * rank:
            return NOTHING
        return self._cut([batch], length * rank, length * (rank + 1))

    def _portion(self, batch: Any, first: list[Any], rank: int) -> Any:
        """Return the part of a rank of a batch after which others come: every rank takes part in every round.

        Worker processes of a stream each end with a short batch, and a program's own batches may have any size.
        """
        size = self._size(batch)
        if size is None or size == self.batch_size:
            return self._piece(batch, rank)
        if size < self.world_size:
            parts = self._filled_up([batch], first, size, self.world_size)
            if self.rank == 0:
                warn_user(
                    f"split_batches: a batch of {size} sample(s) before the end of an epoch is dealt to "
                    f"{self.world_size} ranks, so the first sample(s) of the epoch fill it up, which "
                    "gather_for_metrics counts twice. With one worker process, or none, a stream has no such batches."
                )
            return self._cut(parts, rank, rank + 1)
        least, more = divmod(size, self.world_size)
        begin = least * rank + min(rank, more)
        return self._cut([batch], begin, begin + least + (rank < more))

    def _is_left_out(self, rank: int) -> bool:
        """Return whether, with `split`, the last, short batch is dropped, or ends before the rank's part of it."""
        sampler = getattr(self.batches, "sampler", None)
        if self.even or self.drop_last or self.batch_size is None or not isinstance(sampler, Sized):
            return False
        tail = len(sampler) % self.batch_size
        return 0 < tail <= self.batch_size // self.world_size * rank

    # A batch here is a list of indices, in memory already; shards of collated batches override these.

    def _begin(self) -> Iterator[Any]:
        return iter(self.batches)

    def _read(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Read in rounds, without an incomplete one if that must be dropped. Nothing here runs Python for a round."""
        if self.drop_last:
            return map(list, zip(*[batches] * self.stride, strict=False))
        rounds = map(itertools.islice, itertools.repeat(batches), itertools.repeat(self.stride))
        return itertools.takewhile(bool, map(list, rounds))

    def _size(self, batch: Any) -> int | None:
        return len(batch) if isinstance(batch, (list, tuple)) else None

    def _whole(self, batch: Any) -> Any:
        return batch

    def _cut(self, batches: Sequence[Any], start: int, stop: int) -> Any:
        """Return the samples `start` to `stop` of `batches`, which follow one another."""
        return batches[0][start:stop] if len(batches) == 1 else list(itertools.chain.from_iterable(batches))[start:stop]


class BatchShard(Shard, Sampler[Any]):
    """A share of index batches; used as a loader's batch sampler, or as its sampler."""

    def __init__(self, batches: Any, world: World, *, even: bool, split: bool) -> None:
        super().__init__(
            batches,
            world,
            getattr(batches, "batch_size", None),
            even=even,
            split=split,
            drop_last=bool(getattr(batches, "drop_last", False)),
        )

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch on to the batches that are dealt, if they take one.

        Args:
            epoch: The number of the epoch, 0-based.
        """
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)

    @property
    def batch_sampler(self) -> Any:
        """The program's own batch sampler, or sampler, as it was given; for programs that look for it here."""
        return getattr(self.batches, "given", self.batches)

    @property
    def sampler(self) -> Any:
        """The sampler that is dealt; for programs that look for it here."""
        return getattr(self.batches, "sampler", self.batches)


class StreamShard(Shard):
    """A share of collated batches: every rank reads the whole stream and keeps its share.

    The first round stays in memory while the stream is read, for filling up the last one.

    Args:
        states: The states of the dataset, noted after each round.
    """

    def __init__(
        self, loader: DataLoader[Any], states: DatasetStates, world: World, *, even: bool, split: bool
    ) -> None:
        dealer = loader if loader.batch_sampler is None else loader.batch_sampler
        super().__init__(
            loader,
            world,
            getattr(dealer, "batch_size", None),
            even=even,
            split=split,
            drop_last=bool(getattr(dealer, "drop_last", False)),
        )
        self._states = states
        self._name = type(loader.dataset).__name__

    def _may_be_short(self) -> bool:
        return True  # each worker process ends with one, and a collate_fn may leave samples out

    def __iter__(self) -> Iterator[Any]:
        parts = (self.part(*round_, self.rank) for round_ in self.rounds())
        return (part for part in parts if part is not NOTHING)

    def _read(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        return self._states.noted(super()._read(batches))

    def _size(self, batch: Any) -> int | None:
        counted = as_counted(batch, self.batch_size)
        return None if counted is None else counted.samples

    def _whole(self, batch: Any) -> Any:
        return batch.batch if isinstance(batch, CountedBatch) else batch

    def _cut(self, batches: Sequence[Any], start: int, stop: int) -> Any:
        counted = [as_counted(batch, self.batch_size) for batch in batches]
        try:
            if None in counted:
                raise CannotSplit(f"it is not known how many samples are in a {type(batches[0]).__name__}")
            return joined([batch for batch in counted if batch is not None], start, stop)
        except CannotSplit as error:
            raise CannotSplit(
                f"a batch of the loader over {self._name} cannot be cut for {self.world_size} ranks: {error}. {_REMEDY}"
            ) from error

    def _fill(self, members: list[Any], first: list[Any]) -> list[Any]:
        try:
            return super()._fill(members, first)
        except CannotSplit as error:
            with suppress(CannotSplit):
                return self._filled_by_its_own(members, first)
            if self.split:
                raise
            self.remainder = -1
            if self.rank == 0:
                warn_user(
                    f"{error} For now each rank gets a whole batch at the end of an epoch; where there are fewer than "
                    "ranks, some get one of the epoch's first, whose samples gather_for_metrics counts twice."
                )
            return self._repeated(members, first)

    def _filled_by_its_own(self, members: list[Any], first: list[Any]) -> list[Any]:
        """Return a batch for each rank, the last one completed by its own samples.

        For batches that do not fit together, as those which are each padded to their longest text (accelerate#3614).

        Raises:
            CannotSplit: It is not known what of the last batch belongs to which sample.
        """
        last, length = as_counted(members[-1], self.batch_size), self.batch_size
        if last is None or length is None or any(self._size(batch) != length for batch in members[:-1]):
            raise CannotSplit("more than one batch of the round is short, or samples are not counted")
        others = [each for batch in first if (each := as_counted(batch, length)) is not None]
        rows = [row % last.samples for row in range(length)]
        whole = last._replace(batch=last.pick(rows, others), samples=length)
        if self.split:
            return [self._piece(whole, rank) for rank in range(self.world_size)]
        return self._repeated([*members[:-1], whole], first)


_REMEDY = (
    "Let its collate_fn return tensors with the samples in the first dimension, or lists with one entry for each, in a "
    "dict; or give its samples by index, from a data set with __getitem__ and without dispatch_batches."
)


def unshared(values: Iterable[Any]) -> Iterator[Any]:
    """Yield collated batches, each in memory of its own, even if the loader fills the same memory again.

    To know that a batch is the last one, the next must have been read, which would overwrite this one in the same
    memory. The first batch is copied, for comparison; of the others, those tensors at an address of a first one.
    """
    batches = iter(values)
    first = next(batches, NOTHING)
    if first is NOTHING:
        return
    known = _addresses(first)
    yield _copied(first, known)
    second = next(batches, NOTHING)
    if second is NOTHING:
        return
    shared = known & _addresses(second)
    del first  # only now: its memory must not be given to the second one
    yield _copied(second, shared)
    yield from (_copied(batch, shared) for batch in batches) if shared else batches


def _addresses(batch: Any) -> frozenset[int]:
    """Return the addresses of its tensors that have elements."""
    return frozenset(address for leaf in leaves(batch) if (address := _address(leaf)))


def _address(value: Any) -> int:
    """Return a tensor's address; 0 for others, empty ones, and those with a gradient, which the program changes."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.requires_grad and value.numel():
        with suppress(RuntimeError):  # a class of tensors that have no memory of their own
            return value.data_ptr()
    return 0


def _copied(batch: Any, addresses: Collection[int]) -> Any:
    """Return `batch` with copies of those of its tensors that begin at one of `addresses`."""
    if not addresses:
        return batch
    if isinstance(batch, Tensor):
        return batch.clone() if _address(batch) in addresses else batch
    return map_children(lambda child: _copied(child, addresses), batch)


def look_ahead(values: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
    """Yield each value, and whether it is the last one, by reading the next in advance."""
    iterator = iter(values)
    for current in iterator:
        for following in iterator:
            yield current, False
            current = following
        yield current, True


def counted(lengths: list[int]) -> str:
    """Return how many batches each rank gets, in words."""
    return ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))


def refuse_uneven(lengths: list[int]) -> None:
    """Refuse the backward of a loop in which the ranks get `lengths` batches.

    Merely iterating such a loader is harmless: data are counted, tokenised, evaluated. In a training loop the rank with
    the most batches would wait for the others for ever, so the first backward is refused.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"the ranks would see different numbers of batches ({counted(lengths)}), and rank "
        f"{lengths.index(max(lengths))} would wait for the others for ever in its last backward. Leave "
        "even_batches=True, or loop inside `with accelerator.join_uneven_inputs([model]):`"
    )


@contextmanager
def until_backward(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse` where a backward begins, however it is called, while entered.

    Only loops over uneven ranks enter this, so other loops have no cost. An optimizer's step without a backward before
    it has no gradients of this loop, and waits for no rank.
    """
    original = torch.autograd.backward
    is_entered = True

    def guarded(*args: Any, **kwargs: Any) -> None:
        if is_entered:
            refuse()
        original(*args, **kwargs)

    torch.autograd.backward = guarded
    try:
        yield
    finally:
        is_entered = False
        if torch.autograd.backward is guarded:  # otherwise it was wrapped, and only calls the original from now on
            torch.autograd.backward = original
