"""Loaders without an Accelerator, under the names of ``accelerate.data_loader``. Runs in ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from nbaccel.base.world import World
from nbaccel.train.data import (
    BatchShard,
    DataLoaderConfiguration,
    DataLoaderShard,
    LoaderFacts,
    PreparedLoader,
    prepare_loader,
)
from nbaccel.train.data.dispatch import SliceFunction
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.distributed.rng import warn_of_rng_types
from nbaccel.train.step.accumulation import Accumulation

__all__ = [
    "BatchSamplerShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: None = None,
) -> PreparedLoader:
    """Return a loader for one of several ranks, as `Accelerator.prepare_data_loader` makes it.

    The loader belongs to no Accelerator: accumulation windows do not end with it.

    Args:
        dataloader: The program's loader.
        device: The device of batches; by default this process's.
        num_processes: The number of ranks; by default that of this run, and then the call is collective. If it is
            given, no rank is asked, and the order of the ranks follows from `data_seed`, or from a torch seed that all
            of them have set alike.
        process_index: The rank; by default this process's.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed: As for
            `DataLoaderConfiguration`.
        put_on_device: Move batches to the device.
        rng_types: Accepted with a warning. The order of samples is the same on all ranks, and no other generator is
            changed.
        slice_fn_for_dispatch: As for `Accelerator.prepare_data_loader`.
        non_blocking, use_stateful_dataloader, torch_device_mesh: Accepted as by Accelerate, without effect.

    Example:
        >>> loader = prepare_data_loader(DataLoader(range(8), 2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7]]
    """
    if rng_types is not None:
        warn_of_rng_types(rng_types)
    state = PartialState()
    is_this_run = num_processes is None and process_index is None
    ranks = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if is_this_run and ranks > 1:
        facts = LoaderFacts.of_all_ranks(dataloader, state.collectives, state.device)
    else:
        facts = [LoaderFacts.of(dataloader)] * ranks
    prepared = prepare_loader(
        dataloader,
        state.world if is_this_run else World(rank, ranks, rank, ranks),
        Accumulation(),
        DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches if put_on_device else bool(dispatch_batches),
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
        ),
        facts,
        state.device if device is None else torch.device(device),
        moves=put_on_device,
        slice_function=slice_fn_for_dispatch,
    )
    prepared.is_bound = is_this_run
    return prepared


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order follows from a seed and the epoch, which counts up with every whole iteration.

    Args:
        data_seed: The seed; None is torch's initial seed.
        *args: Arguments of `RandomSampler`.
        **kwargs: More of them.

    Example:
        >>> sampler = SeedableRandomSampler(range(4), data_seed=0)
        >>> first = list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first
        True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`.

        Args:
            epoch: The number of the epoch, 0-based.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device="cpu")
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class BatchSamplerShard(BatchShard):
    """One rank's share of a batch sampler: whole batches in turn, or with `split_batches` a part of each.

    Args:
        batch_sampler: The sampler of all ranks' batches, in the same order on every rank.
        num_processes: The number of ranks.
        process_index: The rank.
        split_batches: Give each rank an equal part of every batch.
        even_batches: Fill the last round up, so that all ranks get equally many full batches.

    Example:
        >>> sampler = BatchSampler(range(5), batch_size=2, drop_last=False)
        >>> [list(BatchSamplerShard(sampler, num_processes=2, process_index=rank)) for rank in range(2)]
        [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        world = World(process_index, num_processes, process_index, num_processes)
        super().__init__(batch_sampler, world, even=even_batches, split=split_batches)


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's samples of a stream, in rounds of one batch for each rank.

    Args:
        dataset: The stream, in the same order on every rank.
        batch_size: The batch size of one rank; with `split_batches` that of all ranks together.
        drop_last: Drop an incomplete last round. Otherwise it is filled up with the samples of the first one.
        num_processes: The number of ranks.
        process_index: The rank.
        split_batches: A batch is for all ranks together.

    Raises:
        ValueError: With `split_batches`, the batch size does not divide by the number of ranks.

    Example:
        >>> list(IterableDatasetShard(range(5), batch_size=2, num_processes=2, process_index=1))
        [2, 3, 1, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches needs a batch_size that divides by the {num_processes} ranks, got {batch_size}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`.

        Args:
            epoch: The number of the epoch, 0-based.
        """
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.dataset), self.batch_size * self.num_processes)
        return (rounds + bool(left and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        mine = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        size = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        start = mine * self.process_index
        samples = iter(self.dataset)
        first: list[Any] = []
        while members := list(itertools.islice(samples, size)):
            first = first or members.copy()
            if len(members) < size:
                if self.drop_last:
                    return
                members += itertools.islice(itertools.cycle(first), size - len(members))
            yield from members[start : start + mine]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, in every iteration.

    Args:
        batch_sampler: The whole batch sampler.
        skip_batches: The number of batches to leave out.

    Example:
        >>> list(SkipBatchSampler([[0, 1], [2, 3], [4]], skip_batches=1))
        [[2, 3], [4]]
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


class SkipDataLoader(DataLoaderShard):
    """A loader over `dataset` without its first batches, in every iteration; `skip_first_batches` makes one of any
    loader.

    Args:
        dataset: The dataset.
        skip_batches: The number of batches to leave out.
        use_stateful_dataloader: Accepted as by Accelerate, without effect.
        **kwargs: Options of `DataLoaderShard`.

    Example:
        >>> [batch.tolist() for batch in SkipDataLoader(range(4), skip_batches=1, batch_size=2)]
        [[2, 3]]
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that determines the order of a loader; None if there is none.

    Args:
        dataloader: Any loader of torch.

    Example:
        >>> type(get_sampler(DataLoader(range(4)))).__name__
        'SequentialSampler'
    """
    if isinstance(dataloader.sampler, BatchSampler):
        return getattr(dataloader.sampler, "sampler", None)
    return getattr(dataloader.batch_sampler, "sampler", None)
