"""Sources: provide one rank's batches of one loader. Run in ranks; a prepared loader has one.

`Source` is the default: the user's loader unchanged, for one process and for loaders that deal their own
batches. `IndexSource` deals indices before anything is read, `StreamSource` reads everything and keeps its share;
in `dispatch` rank 0 reads for all.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from nbaccel.base.world import World
from nbaccel.train.data.counting import counting
from nbaccel.train.data.order import (
    PrivateRandomness,
    SharedOrder,
    begin_workers_anew,
    drawn_seed,
    order_states,
    replayed,
    samplers_of,
    set_own_states,
    tell_epoch,
)
from nbaccel.train.data.pieces import in_pieces, iterated_in_pieces
from nbaccel.train.data.position import DatasetStates, LoaderPosition
from nbaccel.train.data.shard import BatchShard, Shard, StreamShard, look_ahead, unshared

__all__ = [
    "DealtSource",
    "IndexSource",
    "Rest",
    "Source",
    "SourceOfShard",
    "StreamSource",
    "begun",
    "drawn_again",
    "length_of",
    "rebuilt",
]

_TOO_MANY_WORKERS = "This DataLoader will create"
"""Beginning of torch's warning of more workers than cores (dataloader.py)."""


class Source:
    """The user's loader unchanged: order and random numbers are those of plain PyTorch.

    Attributes:
        stride: Batches of the user's loader per round of one batch per rank.
        is_split: A batch of the user's loader is that of all ranks together.
        seed: The seed of the data order; None where nbaccel does not determine it.
        even: The last round is filled up.
        states: The states of a dataset that knows its position.
        is_drawn_apart: Every rank draws the order itself, from how often it has begun the loader.
        read_alike: The shard of what every rank reads or draws by the program's own code, and must be the same; or
            None.
    """

    is_drawn_apart = False
    read_alike: BatchShard | StreamShard | None = None
    stride = 1
    is_split = False
    seed: int | None = None
    even = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.states = DatasetStates(loader)

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    @property
    def is_stream(self) -> bool:
        """True if the end is known by reading one batch ahead; otherwise the length gives it."""
        return isinstance(self.loader.dataset, IterableDataset) or self._length() is None

    @property
    def remainder(self) -> int:
        """Real samples in the last round of all ranks, once it was dealt; -1 where nothing was repeated."""
        return -1

    @property
    def may_be_uneven(self) -> bool:
        """True if ranks may hold batches of different sizes at the same time."""
        return False

    def last_samples(self, batch_size: int | None) -> int | None:
        """Return the samples of this rank's last batch, where its others have `batch_size`; None if not known."""
        total = None if self.is_stream else length_of(self.loader.sampler)
        return None if total is None or batch_size is None else total % batch_size or batch_size

    def lengths(self, skip: int = 0) -> list[int] | None:
        """Return how many batches each rank gets of an iteration that leaves `skip` out; None where that is unknown.

        A single number where all ranks get equally many, or only this rank's is known.
        """
        length = self._length()
        return None if length is None else [max(0, length - skip)]

    def order(self) -> dict[str, Any]:
        """Return the states of the generators that determine the next epoch's order."""
        return order_states(self.loader)

    def draw_from(self, states: dict[str, Any]) -> None:
        """Draw the next epoch's order with `states` of the loader's own generators."""
        set_own_states(states, self.loader)

    def apart(self) -> Source:
        """Return a source for a look during an iteration; the iteration's order and generators do not change."""
        return self

    def open(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches from `position` on, and whether each is its last one."""
        loader = self.loader
        tell_epoch(position.epoch, loader.dataset, *samplers_of(loader))
        begin_workers_anew(loader)
        if not (position.batches or position.goes_on):
            return self._ended(iterated_in_pieces(loader), position)
        if self.is_stream or type(loader).__iter__ is not DataLoader.__iter__:
            return self._ended(self._resumed_stream(position), position)
        with drawn_again(position, loader):
            drawn = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            batches = Rest(in_pieces(drawn), position.batches)
            iterator = iter(rebuilt(loader, batches))
            batches.start()
        return self._ended(iterator, position)

    def _ended(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        noted = self.states.noted_singly(batches)
        lengths = self.lengths(position.batches)
        if self.is_stream or lengths is None:
            return look_ahead(unshared(noted))
        return count_down(noted, lengths[0])

    def _resumed_stream(self, position: LoaderPosition) -> Iterator[Any]:
        """Resume by the dataset's state where there is one that leads there; else read again what comes before."""
        loader = self.loader
        with drawn_again(position, loader):
            resumed = self.states.resumed(position, lambda: iter(loader))
        if resumed is not None:
            return resumed
        with drawn_again(position, loader):
            iterator = iter(loader)
            for _ in itertools.islice(iterator, position.batches):
                pass
            return iterator if position.batches else begun(iterator)

    def _length(self) -> int | None:
        return length_of(self.loader)


class DealtSource(Source):
    """The user's loader unchanged, which reads this rank's share of the data already.

    Args:
        batches: The batches of each rank; None where that is unknown.
    """

    is_drawn_apart = True

    def __init__(self, loader: DataLoader[Any], world: World, batches: list[int] | None) -> None:
        super().__init__(loader)
        self._rank = world.rank
        self._batches = batches

    @property
    def may_be_uneven(self) -> bool:
        return not isinstance(getattr(self.loader.batch_sampler, "sampler", self.loader.sampler), DistributedSampler)

    def lengths(self, skip: int = 0) -> list[int] | None:
        if self._batches is None or len(set(self._batches)) == 1:
            return super().lengths(skip)
        return [max(0, batches - skip) for batches in self._batches]

    def _ended(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        lengths = self.lengths(position.batches)
        if self.is_stream or lengths is None or len(lengths) == 1:
            return super()._ended(batches, position)
        return count_down(self.states.noted_singly(batches), lengths[self._rank])


class SourceOfShard(Source):
    """A source that deals the batches of the user's loader by a shard.

    Attributes:
        shard: It deals them.
    """

    shard: Shard

    @property
    def stride(self) -> int:  # type: ignore[override]
        return self.shard.stride

    @property
    def is_split(self) -> bool:  # type: ignore[override]
        return self.shard.split

    @property
    def remainder(self) -> int:
        return self.shard.remainder


class IndexSource(SourceOfShard):
    """Batches of indices, dealt before anything is read: each rank reads only its own samples."""

    def __init__(self, loader: DataLoader[Any], order: SharedOrder, world: World, *, even: bool, split: bool) -> None:
        super().__init__(loader)
        self.states = DatasetStates(None)
        self._order = order
        self._world = world
        self._rank = world.rank
        hears = any(hasattr(each, "set_epoch") for each in (loader.dataset, *samplers_of(loader)))
        self.is_drawn_apart = world.is_distributed and (order.is_drawn or hears)
        self.shard = BatchShard(order, world, even=even and world.is_distributed, split=split)
        self._rebuilt = rebuilt(loader, self.shard)
        self.read_alike = self.shard if world.is_distributed and order.is_own else None

    @property
    def batch_sampler(self) -> Any:
        return self.shard

    @property
    def seed(self) -> int | None:
        return self._order.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._order.seed = seed or 0

    @property
    def even(self) -> bool:
        return self.shard.even

    @even.setter
    def even(self, even: bool) -> None:
        self.shard.even = even and self.shard.world_size > 1

    @property
    def is_stream(self) -> bool:
        return self._length() is None

    @property
    def may_be_uneven(self) -> bool:
        return self.shard.may_be_uneven

    def last_samples(self, batch_size: int | None) -> int | None:
        if not self._world.is_distributed:
            return super().last_samples(batch_size)
        return batch_size if self.even or self.shard.drop_last else None

    def lengths(self, skip: int = 0) -> list[int] | None:
        try:
            return self.shard.lengths(skip)
        except (TypeError, NotImplementedError):
            return None

    def apart(self) -> Source:
        return IndexSource(self.loader, self._order.apart(), self._world, even=self.even, split=self.is_split)

    def open(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        self._order.draw = position.draw
        tell_epoch(position.epoch, self.loader.dataset, self.shard)
        begin_workers_anew(self._rebuilt)
        self.shard.skip = position.batches
        lengths = self.lengths(position.batches)
        with drawn_again(position, self.loader):
            iterator = iter(self._rebuilt)
        return look_ahead(unshared(iterator)) if lengths is None else count_down(iterator, lengths[self._rank])

    def _length(self) -> int | None:
        return length_of(self.shard)


class StreamSource(SourceOfShard):
    """Collated batches that every rank reads completely, keeping its share.

    Args:
        seed: Determines the stream's random numbers, so all ranks read the same stream; with worker processes too.
    """

    is_drawn_apart = True

    def __init__(self, loader: DataLoader[Any], seed: int, world: World, *, even: bool, split: bool) -> None:
        super().__init__(loader)
        self.seed: int = seed
        self.even = even
        self._world = world
        self._private = PrivateRandomness()
        self._counting = counting(loader)
        self.shard = self.read_alike = StreamShard(loader, self.states, world, even=even, split=split)

    @property
    def is_stream(self) -> bool:
        return True

    @property
    def may_be_uneven(self) -> bool:
        return self.shard.may_be_uneven or self.loader.num_workers > 1  # each worker ends with a short batch

    def last_samples(self, batch_size: int | None) -> int | None:
        return batch_size if self.even or self.shard.drop_last else None

    def lengths(self, skip: int = 0) -> list[int] | None:
        length = self._length()
        return None if length is None else self.shard.lengths_of(length - skip)

    def order(self) -> dict[str, Any]:
        return {}

    def apart(self) -> Source:
        return StreamSource(self.loader, self.seed, self._world, even=self.even, split=self.is_split)

    def open(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        tell_epoch(position.epoch, self.loader.dataset)
        begin_workers_anew(self._counting)

        def begin() -> Iterator[Any]:
            self._private.seed(drawn_seed(self.seed + position.epoch, position.draw))
            return self._private.over(unshared(self._counting), self.stride)

        resumed = self.states.resumed(position, begin)
        self.shard.skip = position.batches if resumed is None else 0
        self.shard.batches = begin() if resumed is None else resumed
        return self.shard.deal()


class Rest(Sampler[Any]):
    """Batches of indices of which some are left out; the iteration can be started before its first use.

    Args:
        skip: How many batches come before the rest.
        keep: How many of those are not left out, the first ones.
    """

    def __init__(self, batches: Iterable[Any], skip: int = 0, keep: int = 0) -> None:
        self._batches = batches
        self._running: _Started | None = None
        self.skip = skip
        self.keep = keep

    def __iter__(self) -> Iterator[Any]:
        self._running = _Started(self._batches, self.skip, min(self.keep, self.skip))
        return self._running

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._batches, name)

    def start(self) -> None:
        """Draw the random numbers that are drawn before the first batch."""
        if self._running is not None:
            self._running.start()


class _Started(Iterator[Any]):
    def __init__(self, batches: Iterable[Any], skip: int, keep: int) -> None:
        self._batches = batches
        self._skip = skip
        self._keep = keep
        self._rest: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        if self._rest is None:
            batches = iter(self._batches)
            kept = list(itertools.islice(batches, self._keep if self._skip else 1))  # a sampler draws with its first
            for _ in itertools.islice(batches, max(0, self._skip - len(kept))):
                pass
            self._rest = itertools.chain(kept, batches)
        return self._rest

    def __next__(self) -> Any:
        return next(self._rest or self.start())


def drawn_again(position: LoaderPosition, loader: DataLoader[Any]) -> AbstractContextManager[None]:
    """Repeat the random draws of a continued epoch while entered.

    Afterwards the random numbers of the program continue where they were.
    """
    return replayed(position.order, loader) if position.goes_on else nullcontext()


def begun(values: Iterator[Any]) -> Iterator[Any]:
    """Return `values` with the first of them read now: a stream that draws an order draws it then."""
    return itertools.chain(list(itertools.islice(values, 1)), values)


def count_down(values: Iterable[Any], length: int) -> Iterator[tuple[Any, bool]]:
    """Yield each value, and whether it is the last one of `length`.

    No Python runs in between: this is the step path.
    """
    is_last = [itertools.repeat(False, length - 1), (True,)] if length > 0 else []
    return zip(values, itertools.chain(*is_last, itertools.repeat(False)), strict=False)


def length_of(thing: Any) -> int | None:
    """Return the length of `thing`, if it has one."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def rebuilt(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Return the user's loader again, drawing from `batches` instead of its batch sampler, or of its sampler."""
    draws: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        draws = {"sampler": batches, "batch_size": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _TOO_MANY_WORKERS)
        loader_of_ours: DataLoader[Any] = DataLoader(
            loader.dataset,
            **draws,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )
    loader_of_ours.check_worker_number_rationality = _say_nothing  # type: ignore[method-assign]  # called at each begin
    return loader_of_ours


def _say_nothing() -> None:
    """Stand in for a check whose warning torch has given for the user's own loader."""
