"""Make this rank's loader of the user's: choose its source, and refuse what cannot work. Runs in ranks.

The choices are those of a `DataLoaderConfiguration`, under Accelerate's names; a program may build it anywhere. Each
rank sends a `LoaderFacts` with what the ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.data.order import SharedOrder, data_seed
from nbaccel.train.data.shard import counted
from nbaccel.train.data.shares import (
    OF_NAMES,
    are_dealt,
    asked_by,
    digest_of,
    held_by,
    order_of,
    repeats,
    rows_of,
    share_of,
)
from nbaccel.train.data.sources import DealtSource, IndexSource, Source, StreamSource, length_of, rebuilt
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.step.accumulation import Accumulation

if TYPE_CHECKING:
    from nbaccel.train.data.dispatch import SliceFunction

__all__ = [
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "LoaderFacts",
    "prepare_loader",
    "skip_first_batches",
]

_SHOWN = 6
"""Numbers of each rank in a message."""


class DataLoaderShard(PreparedLoader):
    """A prepared loader whose ranks read for themselves; made directly, one process's loader over `dataset`.

    Args:
        dataset: The dataset.
        device: Where batches go; None leaves them.
        rng_types, synchronized_generator, use_stateful_dataloader, torch_device_mesh: Accepted as by Accelerate,
            without effect.
        skip_batches: The number of batches that every iteration leaves out.
        iteration: The number of the first epoch.
        **options: Options of `DataLoader`.

    Example:
        >>> loader = DataLoaderShard(range(4), batch_size=2)
        >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        [([0, 1], False), ([2, 3], True)]
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        torch_device_mesh: None = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, **options)
        super().__init__(loader, Source(loader), World(), Accumulation(), device)
        self._skip = skip_batches
        self.iteration = iteration
        self.is_bound = False


class DataLoaderDispatcher(PreparedLoader):
    """A prepared loader whose rank 0 reads for all; made directly, a loader over `dataset` in this run. Collective
    then.

    Args:
        dataset: The dataset, which rank 0 reads.
        split_batches: A batch is for all ranks together.
        skip_batches: The number of batches that every iteration leaves out.
        use_stateful_dataloader, torch_device_mesh, iteration: Accepted as by Accelerate, without effect.
        slice_fn: Cuts one rank's part out of the batch of a round, see `Accelerator.prepare_data_loader`.
        **options: Options of `DataLoader`.

    Example:
        >>> loader = DataLoaderDispatcher(range(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: None = None,
        iteration: int = 0,
        **options: Any,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, **options)
        state = PartialState()
        facts = [LoaderFacts.of(loader)] * state.num_processes
        chosen = DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=True)
        source = LoaderChoice(loader, state.world, chosen, facts).source(state.device, slice_fn, keeps_on_host=True)
        super().__init__(loader, source, state.world, Accumulation(), None)
        self._skip = skip_batches
        self.iteration = iteration


@frozen
class LoaderFacts:
    """Facts of one rank about its loader; -1 for what is not known.

    Args:
        seed: The seed of the data order.
        samples: In the dataset.
        batches: The batches of the user's loader.
        share, shares: Its data are dealt to ranks already, and are this share of so many; 0 and 0 where they are not.
        rows, order: Digests of the rows that the dataset takes, and of the indices of an epoch; see `shares`. Of a
            stream, `rows` is that of what it holds.
        asks: 1 for a stream that asks for the number of ranks.
    """

    seed: int
    samples: int
    batches: int
    share: int = 0
    shares: int = 0
    rows: int = -1
    order: int = -1
    asks: int = 0

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderFacts:
        """Return what is known without an exchange, nor drawing an index."""
        samples, batches = length_of(loader.dataset), length_of(loader)
        share, shares = share_of(loader) or (0, 0)
        return cls(
            data_seed(loader),
            -1 if samples is None else samples,
            -1 if batches is None else batches,
            share,
            shares,
            asks=int(isinstance(loader.dataset, IterableDataset) and not shares and bool(asked_by(loader.dataset))),
        )

    @classmethod
    def of_all_ranks(cls, loader: DataLoader[Any], collectives: Collectives, device: torch.device) -> list[LoaderFacts]:
        """Return the facts of every rank. Collective; with one more exchange where they differ in rows or order.

        Raises:
            ValueError: They differ, and are no shares either.
        """
        mine = cls.of(loader)
        held = held_by(loader.dataset) if isinstance(loader.dataset, IterableDataset) and not mine.shares else {}
        rows, order = (None, None) if mine.shares else (rows_of(loader.dataset), order_of(loader))
        if held:
            rows = [digest_of(numbers) for numbers in held.values()]
        digests = [-1 if numbers is None else digest_of(numbers) for numbers in (rows, order)]
        mine = replace(mine, rows=digests[0], order=digests[1])
        sent = torch.tensor([astuple(mine)], dtype=torch.int64, device="cpu")
        facts = [cls(*numbers) for numbers in collectives.gather(sent.to(device)).tolist()]
        if len(facts) == 1 or facts[0].shares:
            return facts
        if held:
            return _of_streams(facts, collectives, held)
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if _differ([fact.rows for fact in facts]):
            drawn, owner = rows, loader.dataset
        elif _differ([fact.order for fact in facts]):
            drawn, owner = order, getattr(batches, "sampler", batches)  # type: ignore[arg-type]
            if drawn is not None and length_of(batches) is None:  # what all ranks together draw of an epoch
                drawn = drawn[: len(loader.dataset) // len(facts)]  # type: ignore[arg-type]
        else:
            return facts
        shares = collectives.gather_objects([drawn])
        common = repeats(shares)
        if common >= len(shares):  # fewer are those that fill shares up to the same length
            raise ValueError(_overlap(owner, shares, common))
        return [replace(fact, share=rank, shares=len(facts)) for rank, fact in enumerate(facts)]


def _of_streams(facts: list[LoaderFacts], collectives: Collectives, held: dict[str, list[int]]) -> list[LoaderFacts]:
    """Return the facts, with a share for each rank if the streams hold shares. Collective where they hold others."""
    if not _differ([fact.rows for fact in facts]):
        return facts
    of_all = collectives.gather_objects([held])
    for name in held:
        shares = [each.get(name, []) for each in of_all]
        if are_dealt(name, shares):
            if name.endswith(OF_NAMES):  # of scratch files, too, each rank has its own
                warn_user(
                    f"each rank reads its own share of a stream: the names in {name.removesuffix(OF_NAMES)} differ in "
                    "all ranks. If each rank would yield every sample, leave them out of the stream before prepare."
                )
            return [replace(fact, share=rank, shares=len(facts)) for rank, fact in enumerate(facts)]
    return facts


def _differ(digests: Sequence[int]) -> bool:
    """Return whether all ranks know a digest, and they are not the same."""
    return len(set(digests)) > 1 and -1 not in digests


def _overlap(owner: Any, shares: Sequence[Sequence[int]], common: int) -> str:
    """Return the message about ranks whose numbers differ, and of which `common` are those of several ranks."""
    said = "\n".join(
        f"  rank {rank}: {len(share)} ({', '.join(map(str, share[:_SHOWN]))}{', ...' if len(share) > _SHOWN else ''})"
        for rank, share in enumerate(shares)
    )
    is_sampler = isinstance(owner, Sampler)
    name = type(owner).__name__
    what = f"draw different indices from {name}" if is_sampler else f"have different rows in their {name}"
    says_so = ", or their sampler says so by its attributes `rank` and `num_replicas`." if is_sampler else "."
    return (
        f"the ranks {what}, and {common} of them are those of several ranks: some samples would be trained on twice, "
        f"and others never.\n{said}\n  Make the same {'order' if is_sampler else 'choice'} in every rank, by a seed "
        "that they share: `set_seed(seed)` without `device_specific` before it is drawn, or a generator of its own. "
        f"Data that the program deals to the ranks itself have no sample in common{says_so}"
    )


def prepare_loader(
    loader: DataLoader[Any],
    world: World,
    accumulation: Accumulation,
    configuration: DataLoaderConfiguration,
    facts: Sequence[LoaderFacts],
    device: torch.device,
    *,
    moves: bool = True,
    slice_function: SliceFunction | None = None,
) -> PreparedLoader:
    """Return the loader as this rank of `world` sees it.

    Args:
        facts: The facts of every rank, in their order.
        device: The device of the rank, from which its process group can send.
        moves: Batches go to that device.
        slice_function: How rank 0 cuts the batches it sends, if it does.

    Raises:
        ValueError: An empty dataset, ranks with different datasets, or a batch size that cannot be split.
    """
    choice = LoaderChoice(loader, world, configuration, facts)
    source = choice.source(device, slice_function, keeps_on_host=not moves)
    kind = DataLoaderDispatcher if choice.dispatches else DataLoaderShard
    return kind.over(loader, source, world, accumulation, device if moves else None)


@frozen
class LoaderChoice:
    """The choice of how a loader is dealt.

    Args:
        facts: The facts of every rank, in their order.
    """

    loader: DataLoader[Any]
    world: World
    configuration: DataLoaderConfiguration
    facts: Sequence[LoaderFacts]

    def source(self, device: torch.device, slice_function: SliceFunction | None, keeps_on_host: bool) -> Source:
        loader, world, configuration = self.loader, self.world, self.configuration
        is_stream = isinstance(loader.dataset, IterableDataset)
        if self.is_dealt:
            return DealtSource(loader, world, self._batches_of_ranks())
        self._refuse_empty()
        self._refuse_dealt_streams()
        if not world.is_distributed:
            return self.indexed() if configuration.use_seedable_sampler and self.has_indices else Source(loader)
        even, split = configuration.even_batches, configuration.split_batches
        if self.dispatches:
            from nbaccel.train.data.dispatch import DispatchSource  # few loaders need it

            batches = self.facts[0].batches
            return DispatchSource(
                loader,
                world,
                device,
                None if batches < 0 else batches,
                slice_function,
                order=None if is_stream or _iterates_itself(loader) else self._order(),
                even=even,
                split=split,
                keeps_on_host=keeps_on_host,
            )
        self._refuse_different_datasets()
        self._warn_of_little_data()
        if is_stream or _iterates_itself(loader):
            return StreamSource(loader, self._seed(), world, even=even, split=split)
        return self.indexed()

    @property
    def has_indices(self) -> bool:
        """True if batches can be dealt by their indices, before anything is read."""
        return not (isinstance(self.loader.dataset, IterableDataset) or _iterates_itself(self.loader))

    @property
    def is_dealt(self) -> bool:
        """True if every rank has its share of the data already.

        Raises:
            ValueError: They are shares of another number of ranks.
        """
        shares, ranks = [fact.shares for fact in self.facts], self.world.world_size
        if ranks == 1 or not any(shares):
            return False
        are_of_ranks = len({fact.share for fact in self.facts}) == ranks
        is_simulated = all(fact is self.facts[0] for fact in self.facts)  # this process's facts, for every rank
        if set(shares) == {ranks} and (are_of_ranks or is_simulated):
            return True
        said = ", ".join(f"rank {rank}: {fact.share} of {fact.shares}" for rank, fact in enumerate(self.facts))
        raise ValueError(
            f"the data of this loader are dealt already, but not to these {ranks} ranks, as its sampler or its dataset "
            f"says (share of each rank: {said}). Give it `rank=accelerator.process_index` and "
            f"`num_replicas=accelerator.num_processes`, or leave it out: a prepared loader deals its data itself."
        )

    def _batches_of_ranks(self) -> list[int] | None:
        batches = [fact.batches for fact in self.facts]
        return None if -1 in batches else batches

    @property
    def dispatches(self) -> bool:
        """True if rank 0 reads for all, also where it is alone."""
        if self.is_dealt:
            return False
        chosen = self.configuration.dispatch_batches
        return isinstance(self.loader.dataset, IterableDataset) if chosen is None else chosen

    def indexed(self) -> IndexSource:
        """Return the source that deals indices, in the order that ranks share."""
        even, split = self.configuration.even_batches, self.configuration.split_batches
        return IndexSource(self.loader, self._order(), self.world, even=even, split=split)

    def _order(self) -> SharedOrder:
        batches = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        return SharedOrder(batches, self._seed(), self.configuration.use_seedable_sampler, self.world.world_size)

    def _seed(self) -> int:
        seed = self.configuration.data_seed
        return self.facts[0].seed if seed is None else seed

    def _refuse_dealt_streams(self) -> None:
        """Refuse a stream that deals itself, but does not say which share of it a rank reads.

        Where the program has chosen that rank 0 reads for all, this is a warning.
        """
        if not self.world.is_distributed or not any(fact.asks for fact in self.facts):
            return
        dataset = self.loader.dataset
        does = "Rank 0 reads it for all" if self.dispatches else "What each rank reads is dealt once more"
        found = (
            f"the stream {type(dataset).__name__} deals itself: {asked_by(dataset) or 'its code'} asks for the number "
            f"of ranks. {does}, so samples would be left out. Let it yield everything, since a prepared loader "
            "deals; or give it the attributes `rank` and `world_size`, and each rank reads its own share."
        )
        if self.configuration.dispatch_batches:
            warn_user(found)
        else:
            raise ValueError(
                f"{found} If it yields every sample in rank 0, say DataLoaderConfiguration(dispatch_batches=True)."
            )

    def _refuse_empty(self) -> None:
        if self.facts[0].samples == 0 and not isinstance(self.loader.dataset, IterableDataset):
            raise ValueError(
                f"the dataset of a prepared loader is empty ({type(self.loader.dataset).__name__} of length 0): there "
                "is nothing to loop over. Check how it was loaded or filtered."
            )

    def _refuse_different_datasets(self) -> None:
        """Refuse datasets of different lengths: each rank deals by its own count, so step counts would differ."""
        samples = [fact.samples for fact in self.facts]
        if len(set(samples)) == 1:
            self._refuse_different_lengths()
            return
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(samples))
        raise ValueError(
            f"the ranks' datasets have different lengths ({counts}). A prepared loader deals one dataset to all ranks, "
            "so each rank must load all of it. If these are parts that you made yourself, do not prepare the loader; "
            "if only rank 0 has the data, use DataLoaderConfiguration(dispatch_batches=True)."
        )

    def _refuse_different_lengths(self) -> None:
        batches = [fact.batches for fact in self.facts]
        if len(set(batches)) > 1:
            raise ValueError(
                f"the ranks' loaders have different numbers of batches ({counted(batches)}), so they would deal "
                "different ones. Make them with the same batch_size and sampler in every rank."
            )

    def _warn_of_little_data(self) -> None:
        """Warn of fewer samples than one round takes."""
        samples, size, ranks = self.facts[0].samples, self.loader.batch_size, self.world.world_size
        if size is None or samples < 0 or self.configuration.split_batches or samples >= ranks * size:
            return
        short = f"the dataset has {samples} samples, fewer than one batch of {size} for each of {ranks} ranks"
        smaller = max(1, samples // ranks)
        if self.loader.drop_last:
            warn_user(
                f"{short}, and drop_last drops what is left: every epoch is empty. Use a batch_size of at most "
                f"{smaller}, or drop_last=False.",
            )
        elif self.configuration.even_batches:
            wanted = ranks * size
            warn_user(
                f"{short}: every epoch is one step, in which {wanted - samples} of {wanted} samples are repeats "
                f"(gather_for_metrics leaves them out). A batch_size of at most {smaller} repeats less.",
            )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first batches of every iteration; its length is shorter by as many.

    Of a prepared loader, this rank's batches are left out; the order is that of the whole loader, which also counts the
    epochs. Datasets with indices do not read what is left out; streams do.

    Args:
        dataloader: A loader, prepared or not.
        num_batches: The number of batches to leave out.

    Example:
        >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(6), 2), 2)]
        [[4, 5]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader.without_first(num_batches)
    if num_batches < 0:
        raise ValueError(f"num_batches must be at least 0, got {num_batches}")
    if isinstance(dataloader.dataset, IterableDataset) or _iterates_itself(dataloader):
        return _Rest(dataloader, num_batches)
    batches = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    return rebuilt(dataloader, _RestOfBatches(batches, num_batches))


class _RestOfBatches:
    """A sampler or batch sampler without its first elements."""

    def __init__(self, batches: Any, skip: int) -> None:
        self._batches = batches
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        return _without_first(self._batches, self._skip)

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._skip)

    def __getattr__(self, name: str) -> Any:
        if name in ("_batches", "_skip"):
            raise AttributeError(name)
        return getattr(self._batches, name)


class _Rest(DataLoader[Any]):
    """A loader over a stream without its first batches, which are read."""

    def __init__(self, loader: DataLoader[Any], skip: int) -> None:
        self._loader = loader  # no super().__init__(): this is the user's loader, without its beginning
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _without_first(self._loader, self._skip)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skip)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_skip"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def _without_first(values: Iterable[Any], skip: int) -> Iterator[Any]:
    iterator = iter(values)
    for _ in zip(range(skip), iterator, strict=False):
        pass
    return iterator


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether the class of `loader` has its own iteration, which would not use dealt indices."""
    return type(loader).__iter__ is not DataLoader.__iter__


@dataclass
class DataLoaderConfiguration:
    """Rules by which the loaders that an Accelerator prepares are dealt to the ranks.

    Args:
        split_batches: A batch of a loader is for all ranks together and is cut into equal parts; its size must divide
            by the number of ranks. Otherwise each rank takes whole batches.
        dispatch_batches: Rank 0 alone reads, and sends the others their batches; every batch is then a collective. None
            is True for an `IterableDataset`, whose ranks need not read the same stream, and False for others.
        even_batches: Fill the last round up with the first samples of the epoch, so that all ranks get equally many
            batches. Otherwise the last ranks may get fewer, or none.
        use_seedable_sampler: The order of epoch e is that of ``torch.randperm`` after ``manual_seed(seed + e)``, also
            in one process: the same order as Accelerate's. Otherwise one process has plain PyTorch's order, and several
            ranks have an order that follows from (seed, e).
        data_seed: The seed of this order; None is the seed of rank 0's generator when the loader was prepared.
        non_blocking: Accepted. Copies to CUDA never wait for the host; they overlap if the loader pins memory.
        use_stateful_dataloader: Accepted. Every prepared loader has `state_dict`; torchdata is not needed.

    Example:
        >>> DataLoaderConfiguration(split_batches=True).even_batches
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    @classmethod
    def chosen(
        cls, configuration: DataLoaderConfiguration | None, split_batches: bool, even_batches: bool
    ) -> DataLoaderConfiguration:
        """Return `configuration`, or one made of the two choices that an Accelerator also takes by themselves.

        Args:
            configuration: What the program gave, or None.
            split_batches, even_batches: The choices beside it.

        Raises:
            ValueError: The program gave both.
        """
        if configuration is None:
            return cls(split_batches=split_batches, even_batches=even_batches)
        if split_batches or not even_batches:
            raise ValueError(
                f"split_batches={split_batches}, even_batches={even_batches} and a dataloader_config: choose them in "
                "the DataLoaderConfiguration"
            )
        return configuration
