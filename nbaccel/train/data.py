"""Data: which rank sees which batch, and what a training loop is told about its loader. Runs in ranks.

A `Shard` deals the batches of one loader to the ranks; a `PreparedLoader` iterates this rank's share, moves the
batches to the device, and opens a window of accumulation per iteration. With one process the user's own loader
is iterated as it is, so order and random numbers are those of plain PyTorch.

Not covered: a sampler of one's own that draws from the global generator (give it a ``generator``, or
``set_epoch``), and an `IterableDataset` whose ranks do not all read the same stream.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from nbaccel.errors import NotPrepared
from nbaccel.train.accumulation import Accumulation
from nbaccel.train.nested import concatenate, count_rows, map_children, slice_rows
from nbaccel.train.state import current_world
from nbaccel.world import World

__all__ = ["BatchShard", "PreparedLoader", "Shard", "StreamShard", "data_seed", "prepare_loader"]

_T = TypeVar("_T")

_EPOCH_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring epochs of neighbouring seeds do not meet."""


class Shard(Iterable[Any]):
    """One rank's share of an iterable of batches.

    In rounds of one batch per rank, rank r takes batches r, r + n, r + 2n, ...; with `split` every batch is cut into n
    equal parts instead. In the last, incomplete round
      - `drop_last` drops it;
      - `even` fills it up with the iteration's first samples, so that every rank has equally many full batches;
        `remainder` then says how many samples of that round were real (they come first);
      - otherwise the ranks get what there is, the last ones nothing.
    Batches without a known size are repeated whole where the round is filled.
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
        self.remainder = -1
        if split and (batch_size is None or batch_size % world.world_size):
            raise ValueError(
                f"split_batches needs a batch_size that divides by the {world.world_size} ranks, got {batch_size}"
            )

    @property
    def may_be_uneven(self) -> bool:
        """Whether ranks may hold batches of different sizes at the same time."""
        return self.batch_size is None or not (self.even or self.drop_last)

    def __len__(self) -> int:
        """How many batches this rank gets; TypeError where the batches themselves have no length."""
        batches = len(self.batches)  # type: ignore[arg-type]
        if self.split:
            return batches - self._is_left_out(batches)
        if self.drop_last:
            return batches // self.world_size
        rounds, extra = divmod(batches, self.world_size)
        return rounds + (bool(extra) if self.even else self.rank < extra)

    def __iter__(self) -> Iterator[Any]:
        self.remainder = -1
        rounds = ([batch] for batch in self.batches) if self.split else _rounds(self.batches, self.world_size)
        first: list[Any] | None = None
        for members, is_last in _look_ahead(rounds):
            if first is None:
                first = members
            if not is_last or self._is_complete(members):
                yield self._part(members[0]) if self.split else members[self.rank]
            elif self.even and not self.drop_last:
                yield self._fill(members, first)
            elif not self.drop_last:
                yield from self._leftover(members)

    def _is_complete(self, members: list[Any]) -> bool:
        if not self.split and len(members) < self.world_size:
            return False
        return self.batch_size is None or self._size(members[-1]) == self.batch_size

    def _fill(self, members: list[Any], first: list[Any]) -> Any:
        """This rank's batch of the last round, completed from the `first` round."""
        sizes = [self._size(batch) for batch in members]
        if self.batch_size is None or None in sizes:
            self.remainder = -1 if None in sizes else sum(size for size in sizes if size is not None)
            return (members + list(itertools.islice(itertools.cycle(first), self.world_size)))[self.rank]
        self.remainder = sum(size for size in sizes if size is not None)
        per_rank = self.batch_size // self.world_size if self.split else self.batch_size
        wanted, have = per_rank * self.world_size, self.remainder
        parts = list(members)
        for batch in itertools.cycle(first):
            if have >= wanted:
                break
            parts.append(batch)
            have += self._size(batch) or 1
        return self._cut(self._join(parts), per_rank * self.rank, per_rank * (self.rank + 1))

    def _leftover(self, members: list[Any]) -> Iterator[Any]:
        if self.split:
            part = self._part(members[0])
            if self._size(part):
                yield part
        elif self.rank < len(members):
            yield members[self.rank]

    def _part(self, batch: Any) -> Any:
        assert self.batch_size is not None
        length = self.batch_size // self.world_size
        return self._cut(batch, length * self.rank, length * (self.rank + 1))

    def _is_left_out(self, batches: int) -> bool:
        """With `split`: whether the last, short batch ends before this rank's part of it."""
        sampler = getattr(self.batches, "sampler", None)
        if self.even or self.drop_last or self.batch_size is None or not isinstance(sampler, Sized):
            return False
        tail = len(sampler) % self.batch_size
        return 0 < tail <= self.batch_size // self.world_size * self.rank

    # A batch here is a list of indices; StreamShard overrides these for collated batches.

    def _size(self, batch: Any) -> int | None:
        return len(batch) if isinstance(batch, list) else None

    def _join(self, batches: list[Any]) -> Any:
        return list(itertools.chain.from_iterable(batches))

    def _cut(self, batch: Any, start: int, stop: int) -> Any:
        return batch[start:stop]


class BatchShard(Shard, Sampler[Any]):
    """A share of index batches: it takes the place of a loader's batch sampler, or of its sampler.

    seed: of the data order, equal on all ranks; the sampler's generator of epoch e is seeded from (seed, e).
    """

    def __init__(self, batches: Iterable[Any], world: World, seed: int, *, even: bool, split: bool) -> None:
        self._seed = seed
        self._generators: list[torch.Generator] = []
        super().__init__(
            self._with_own_generator(batches),
            world,
            getattr(batches, "batch_size", None),
            even=even,
            split=split,
            drop_last=bool(getattr(batches, "drop_last", False)),
        )

    def set_epoch(self, epoch: int) -> None:
        for generator in self._generators:
            generator.manual_seed((self._seed + epoch * _EPOCH_STRIDE) % 2**63)
        _tell_epoch(epoch, self.batches, getattr(self.batches, "sampler", None))

    def _with_own_generator(self, batches: Any) -> Any:
        """`batches` drawing from a generator that all ranks seed alike; a copy, the user's sampler stays as it is."""
        inner = getattr(batches, "sampler", None)
        if inner is not None:
            shared = self._with_own_generator(inner)
            if shared is not inner:
                batches = copy.copy(batches)
                batches.sampler = shared
        if hasattr(batches, "generator"):
            batches = copy.copy(batches)
            generator = torch.Generator()
            batches.generator = generator
            self._generators.append(generator)
        return batches


class StreamShard(Shard):
    """A share of collated batches: every rank reads the whole stream and keeps its own.

    The first round stays in memory while the stream is read, for filling up the last one.
    """

    def _size(self, batch: Any) -> int | None:
        return count_rows(batch)

    def _join(self, batches: list[Any]) -> Any:
        return concatenate(batches)

    def _cut(self, batch: Any, start: int, stop: int) -> Any:
        return slice_rows(batch, start, stop)


class PreparedLoader(DataLoader[Any]):
    """A loader whose batches are this rank's, on its device, and whose end the accumulation knows.

    Attributes it does not define are those of the user's loader, which stays reachable as `loader`.

    loader: the user's own.  end_of_dataloader: the batch in hand is the last one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        source: Iterable[Any],
        shard: Shard | None,
        world: World,
        accumulation: Accumulation,
        device: torch.device | None,
    ) -> None:
        """What is iterated (`source`), the deal behind it if there is one, and where batches go (None: nowhere)."""
        # No super().__init__(): this is the user's loader seen from one rank, not a second loader.
        self.loader = loader
        self.world = world
        self.accumulation = accumulation
        self.end_of_dataloader = False
        self.iteration = 0
        self._source = source
        self._shard = shard
        self.move_to(device)

    def __nbaccel_unwrap__(self) -> DataLoader[Any]:
        """What travels from a rank to the notebook in this object's place."""
        return self.loader

    def move_to(self, device: torch.device | None) -> None:
        """Where batches go from now on; on the CPU they are there already."""
        self._device = None if device is None or device.type == "cpu" else device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._refuse_other_world()
        if isinstance(self._shard, BatchShard):
            self._shard.set_epoch(self.iteration)
        self.iteration += 1
        self.end_of_dataloader = False
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        accumulation, clock, device = self.accumulation, self.accumulation.clock, self._device
        length = self._known_length()
        window = accumulation.open(self, length)
        try:
            # The end of a stream shows by reading one batch ahead; elsewhere the length says it.
            is_stream = length is None or isinstance(self.dataset, IterableDataset)
            for batch, is_last in _look_ahead(self._source) if is_stream else _count_down(self._source, length or 0):
                if device is not None:
                    batch = to_device(batch, device)
                if is_last:
                    window.is_last = self.end_of_dataloader = True
                if window.position == 0:
                    clock.enter()
                yield batch
                if window.batches_left is not None:
                    window.batches_left -= 1
        finally:
            accumulation.close(window)

    def __len__(self) -> int:
        length: int = len(self._source)  # type: ignore[arg-type]
        return length

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; without this they count up from 0."""
        self.iteration = epoch
        _tell_epoch(epoch, self.loader.dataset, self.loader.sampler, self.loader.batch_sampler)

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return self._shard if isinstance(self._shard, BatchShard) else self.loader.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take per batch."""
        size: int | None = getattr(self.loader.batch_sampler, "batch_size", self.loader.batch_size)
        if size is None or (self._shard is not None and self._shard.split):
            return size
        return size * self.world.world_size

    @property
    def total_dataset_length(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        """Real samples in the last round of all ranks, once it was dealt; -1 where nothing was repeated."""
        return -1 if self._shard is None else self._shard.remainder

    @property
    def may_be_uneven(self) -> bool:
        return self._shard is not None and self._shard.may_be_uneven

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _known_length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def _refuse_other_world(self) -> None:
        world = current_world()
        if world.world_size != self.world.world_size:
            raise NotPrepared(
                f"this loader was prepared for {self.world.world_size} process(es) and is iterated in rank "
                f"{world.rank} of {world.world_size}: the ranks would see the wrong batches. Prepare it here, before "
                "the loop:\n    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )


def data_seed(loader: DataLoader[Any]) -> int:
    """The seed of the loader's order on this rank, without drawing a random number. Rank 0's counts."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return seed % 2**63


def prepare_loader(
    loader: DataLoader[Any],
    world: World,
    accumulation: Accumulation,
    device: torch.device | None,
    seed: int,
    *,
    even: bool,
    split: bool,
) -> PreparedLoader:
    """The loader as this rank of `world` sees it.

    seed: of the data order, equal on all ranks.
    Raises:
        ValueError: an empty dataset in several ranks, or a batch size that cannot be split.
    """
    if not world.is_distributed or _is_dealt_already(loader, world):
        return PreparedLoader(loader, loader, None, world, accumulation, device)
    _refuse_empty(loader, world)
    if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        stream = StreamShard(loader, world, loader.batch_size, even=even, split=split, drop_last=loader.drop_last)
        return PreparedLoader(loader, stream, stream, world, accumulation, device)
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    shard = BatchShard(batches, world, seed, even=even, split=split)
    return PreparedLoader(loader, _rebuilt(loader, shard), shard, world, accumulation, device)


def to_device(value: Any, device: torch.device) -> Any:
    """Everything in `value` that has a `to`, on `device`. Copies to CUDA do not wait for the host."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if hasattr(value, "to"):
        return value.to(device)
    return map_children(lambda child: to_device(child, device), value)


def _is_dealt_already(loader: DataLoader[Any], world: World) -> bool:
    return isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == world.world_size


def _refuse_empty(loader: DataLoader[Any], world: World) -> None:
    dataset = loader.dataset
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        raise ValueError(
            f"the dataset of a prepared loader is empty ({type(dataset).__name__} of length 0), so {world.world_size} "
            "ranks have nothing to share. Check how it was loaded or filtered."
        )


def _tell_epoch(epoch: int, *owners: Any) -> None:
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def _rebuilt(loader: DataLoader[Any], shard: BatchShard) -> DataLoader[Any]:
    """The user's loader again, drawing from `shard`."""
    draws: dict[str, Any] = {"batch_sampler": shard}
    if loader.batch_sampler is None:
        draws = {"sampler": shard, "batch_size": None}
    return DataLoader(
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


def _rounds(batches: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(batches)
    while members := list(itertools.islice(iterator, size)):
        yield members


def _look_ahead(values: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
    """Each value, and whether it is the last one; known by having read the next."""
    iterator = iter(values)
    for current in iterator:
        for following in iterator:
            yield current, False
            current = following
        yield current, True


def _count_down(values: Iterable[_T], length: int) -> Iterator[tuple[_T, bool]]:
    """Each value, and whether it is the last one of `length`."""
    left = length
    for value in values:
        left -= 1
        yield value, left == 0
