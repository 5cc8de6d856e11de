"""Data that the program has dealt to the ranks are not dealt again, and ranks that draw different orders say so."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from nbaccel import Accelerator
from nbaccel.errors import CollectiveMismatch
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.data.shares import asked_by, order_of, repeats

IDS: Any = range(16)


class _Own(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, order: list[Any], **said: int) -> None:
        self.order = order
        self.__dict__.update(said)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class _Endless(Sampler[int]):
    """As the sampler of detectron2: an order without an end, of which each rank takes every n-th index."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._mine = rank, ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1)
        orders = (torch.randperm(16, generator=generator).tolist() for _ in itertools.count())
        yield from itertools.islice(itertools.chain.from_iterable(orders), self._mine[0], None, self._mine[1])


class _Wrapped(Sampler[int]):
    """Passes on what another sampler yields."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


class _OwnStream(IterableDataset[int]):
    """Reads the part of its rank, and says which one that is."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 16, self.world_size))


class _OfFiles(IterableDataset[int]):
    """Reads the files that it was given."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        return map(int, self.files)


class _Around(IterableDataset[int]):
    """Passes on what another stream yields."""

    def __init__(self, inner: IterableDataset[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


def _asking(numbers: range) -> Iterator[int]:
    return itertools.islice(numbers, dist.get_rank(), None, dist.get_world_size())


class _Asking(IterableDataset[int]):
    """Asks for its rank when it is read, in a function that it calls."""

    def __iter__(self) -> Iterator[int]:
        return _asking(IDS)


class _Noting(IterableDataset[int]):
    """Asks whether it is in rank 0, and yields everything."""

    def __iter__(self) -> Iterator[int]:
        self.is_first = dist.get_rank() == 0
        return iter(IDS)


Make = Callable[[int, int], DataLoader[Any]]


def _distributed(rank: int, ranks: int) -> DistributedSampler[Any]:
    return DistributedSampler(IDS, num_replicas=ranks, rank=rank, seed=3)


DEALT: dict[str, Make] = {
    "in a batch sampler": lambda r, n: DataLoader(IDS, batch_sampler=BatchSampler(_distributed(r, n), 2, False)),
    "in an own sampler": lambda r, n: DataLoader(IDS, 2, sampler=_Wrapped(_distributed(r, n))),
    "an own sampler": lambda r, n: DataLoader(IDS, 2, sampler=_Own(list(IDS)[r::n])),
    "one that says so": lambda r, n: DataLoader(IDS, 2, sampler=_Own(list(IDS)[r::n], rank=r, num_replicas=n)),
    "own batches": lambda r, n: DataLoader(IDS, batch_sampler=_Own([[k, k + n] for k in IDS if k % (2 * n) == r])),
    "of indices": lambda r, n: DataLoader(IDS, 2, sampler=SubsetRandomSampler(IDS[r::n])),
    "a subset": lambda r, n: DataLoader(Subset(IDS, IDS[r::n]), 2, shuffle=True),
    "a stream": lambda r, n: DataLoader(_OwnStream(r, n), 2),
    "a stream of its files": lambda r, n: DataLoader(_OfFiles([str(k) for k in IDS[r::n]]), 2),
    "such a stream inside": lambda r, n: DataLoader(_Around(_OfFiles([str(k) for k in IDS[r::n]])), 2),
}


def _seen(dispatch: bool | None = None) -> dict[str, list[list[int]]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    seen: dict[str, list[list[int]]] = {}
    for name, make in DEALT.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = accelerator.prepare(make(accelerator.process_index, accelerator.num_processes))
        assert len(said) == name.endswith(("of its files", "stream inside")), [str(each.message) for each in said]
        assert all("each rank reads its own share of a stream: the names in" in str(each.message) for each in said)
        seen[name] = [[index for batch in loader for index in batch.tolist()] for _ in range(2)]
    return seen


@pytest.mark.parametrize("dispatch", [None, pytest.param(True, marks=pytest.mark.full)])
def test_what_the_program_has_dealt_is_seen_once_and_as_it_dealt_it(dispatch: bool | None) -> None:
    first, second = run_ranks(2, _seen, dispatch)
    for name in DEALT:
        for mine, theirs in zip(first[name], second[name], strict=True):
            assert sorted(mine + theirs) == list(IDS), name
    order = list(_distributed(1, 2))
    assert second["in a batch sampler"][0] == second["in an own sampler"][0] == order
    assert second["an own sampler"] == [list(IDS[1::2])] * 2


def _endless() -> list[int]:
    accelerator = Accelerator()
    sampler = _Endless(accelerator.process_index, accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(IDS, 2, sampler=sampler))
    return [index for batch in itertools.islice(loader, 4) for index in batch.tolist()]


def test_a_sampler_without_an_end_is_asked_for_one_epoch_of_all_ranks() -> None:
    first, second = run_ranks(2, _endless)
    assert sorted(first + second) == list(IDS)


def _of_own_seed(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


APART: dict[str, Make] = {
    "drawn early": lambda r, n: DataLoader(IDS, 2, sampler=_Own(random.Random(r).sample(IDS, 16))),
    "weights": lambda r, n: DataLoader(IDS, 2, sampler=WeightedRandomSampler([1.0] * 8 + [r + 1.0] * 8, 16)),
    "split": lambda r, n: DataLoader(random_split(IDS, [8, 8], _of_own_seed(r))[0], 2, shuffle=True),
    "of four ranks": lambda r, n: DataLoader(IDS, 2, sampler=_distributed(r, 4)),
    "of rank 0": lambda r, n: DataLoader(IDS, 2, sampler=_distributed(0, n)),
}


def _refusals() -> dict[str, str]:
    accelerator = Accelerator()
    said = {}
    for name, make in APART.items():
        with pytest.raises(ValueError, match="ranks") as caught:
            accelerator.prepare(make(accelerator.process_index, accelerator.num_processes))
        said[name] = str(caught.value)
    return said


def test_ranks_that_would_see_some_samples_twice_are_an_error_with_their_numbers() -> None:
    said, also = run_ranks(2, _refusals)
    assert said == also
    early = said["drawn early"]
    assert "the ranks draw different indices from _Own, and 16 of them are those of several ranks" in early
    for rank in range(2):
        begin = ", ".join(map(str, random.Random(rank).sample(IDS, 16)[:6]))
        assert f"\n  rank {rank}: 16 ({begin}, ...)" in early
    assert "without `device_specific`" in early
    assert "attributes `rank` and `num_replicas`" in early
    assert "different indices from WeightedRandomSampler" in said["weights"]
    assert "have different rows in their Subset" in said["split"]
    assert "(share of each rank: rank 0: 0 of 4, rank 1: 1 of 4)" in said["of four ranks"]
    assert "(share of each rank: rank 0: 0 of 2, rank 1: 0 of 2)" in said["of rank 0"]
    assert "`num_replicas=accelerator.num_processes`" in said["of rank 0"]


def _of_asking_streams(dispatch: bool | None) -> tuple[list[str], list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    said = []
    for stream in (_Asking(), _Around(_Asking())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                accelerator.prepare(DataLoader(stream, 2))
                said += [str(each.message) for each in caught]
            except ValueError as error:
                said.append(str(error))
    whole = [_Noting(), _OfFiles(random.Random(accelerator.process_index).sample([str(k) for k in IDS], 16))]
    seen = [
        [accelerator.gather(batch).tolist() for batch in accelerator.prepare(DataLoader(each, 2))] for each in whole
    ]
    return said, sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(seen)))


@pytest.mark.parametrize("dispatch", [None, True])
def test_a_stream_that_asks_for_the_number_of_ranks_is_an_error_or_a_warning(dispatch: bool | None) -> None:
    for said, seen in run_ranks(2, _of_asking_streams, dispatch):
        assert len(said) == 2
        assert "the stream _Asking deals itself: _Asking.__iter__ asks for the number of ranks. Rank 0 reads" in said[0]
        assert "the stream _Around deals itself: _Asking.__iter__ asks" in said[1]
        for each in said:
            assert "give it the attributes `rank` and `world_size`" in each
            assert ("say DataLoaderConfiguration(dispatch_batches=True)" in each) == (dispatch is None)
        assert seen == sorted([*IDS, *IDS]), "what rank 0 reads is dealt"


class _Unlike(_Own):
    """Draws other indices in each rank from the second epoch on, so that preparing it shows nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__(list(IDS))
        self.draws = random.Random(rank)
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return iter(self.order if self.epochs == 1 else self.draws.sample(self.order, 16))


class _SilentStream(IterableDataset[int]):
    """Reads the part of its rank without a sign of it."""

    def __init__(self, mine: Any) -> None:
        self.mine = mine

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)


def _unlike_later() -> tuple[str, list[str], list[str]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rank = accelerator.process_index
    said = []
    for stream in (_SilentStream(dict.fromkeys(IDS[rank::2])), _SilentStream(IDS)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in accelerator.prepare(DataLoader(stream, 2)):
                accelerator.wait_for_everyone()
        said.append([str(each.message) for each in caught])
    loader = accelerator.prepare(DataLoader(IDS, 2, sampler=_Unlike(rank)))
    for _ in loader:
        accelerator.wait_for_everyone()
    with pytest.raises(CollectiveMismatch) as error:
        for _ in loader:
            accelerator.wait_for_everyone()
    return str(error.value), said[0], said[1]


def test_what_ranks_draw_or_read_is_compared_where_they_meet_in_the_loop() -> None:
    for rank, (error, warned, silent) in enumerate(run_ranks(2, _unlike_later)):
        begin = f"the first ones of rank {rank} are not those of rank {1 - rank}"
        assert "the ranks draw different indices from the loader over range (batches of 2): " + begin in error
        assert len(warned) == 1
        assert (
            "the ranks read different samples from the loader over _SilentStream (batches of 2): " + begin in warned[0]
        )
        assert "attributes `rank` and `world_size`" in warned[0]
        assert not silent


class _Shuffling(Sampler[int]):
    """Shuffles its own list, by its own generator, and counts its epochs."""

    def __init__(self) -> None:
        self.indices = list(IDS)
        self.draws = random.Random(5)
        self.generator_of_torch = torch.Generator().manual_seed(5)
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        self.draws.shuffle(self.indices)
        torch.randperm(4, generator=self.generator_of_torch)
        return iter(self.indices)

    def __len__(self) -> int:
        return 16


def test_looking_at_an_order_changes_neither_the_sampler_nor_random_numbers() -> None:
    sampler, states = _Shuffling(), (random.getstate(), torch.get_rng_state())
    assert sorted(order_of(DataLoader(IDS, 2, sampler=sampler)) or []) == list(IDS)
    assert (sampler.indices, sampler.epochs) == (list(IDS), 0)
    assert sampler.draws.random() == random.Random(5).random()
    assert torch.equal(sampler.generator_of_torch.get_state(), torch.Generator().manual_seed(5).get_state())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_an_order_that_follows_from_the_length_is_not_drawn() -> None:
    for loader in (DataLoader(IDS, 2), DataLoader(IDS, 2, shuffle=True), DataLoader(IDS, None)):
        assert order_of(loader) == []
    assert order_of(DataLoader(IDS, 2, sampler=RandomSampler(IDS, num_samples=4))) == []


def test_an_order_that_cannot_be_drawn_is_not_known() -> None:
    unfinished = _Own([])
    del unfinished.order
    once = _Own([])
    once.order = (index for index in range(4))  # type: ignore[assignment]
    for sampler in (unfinished, once, _Own([0] * 1_000_001)):
        assert order_of(DataLoader(IDS, 2, sampler=sampler)) is None


def test_numbers_that_several_ranks_have_are_counted_once() -> None:
    assert repeats([[1, 1, 2], [3, 4, 2], [2, 5]]) == 1
    assert repeats([range(4), range(4, 9), range(9, 12)]) == 0
    assert repeats([range(0, 10**12), range(10**12 - 3, 2 * 10**12)]) == 3


TOKENS = {"a": [1], "b": [2]}


class ReadsATable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([number for numbers in TOKENS.values() for number in numbers])


class Asks(ReadsATable):
    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), share_of_this_rank(), None)


def share_of_this_rank() -> int:
    return dist.get_rank() * len(TOKENS) // dist.get_world_size()


def test_what_the_code_of_a_stream_names_is_read_whatever_it_is() -> None:
    assert (asked_by(ReadsATable()), asked_by(Asks())) == ("", "Asks.__iter__")


class Decodes(ReadsATable):
    """Has a pool for decoding, and knows how many it is read by, but not by whom."""

    def __init__(self, num_processes: int = 4) -> None:
        self.num_processes = num_processes

    def __len__(self) -> int:
        return 3 // int(os.environ["WORLD_SIZE"])


def test_a_stream_that_asks_for_the_number_of_ranks_and_not_for_its_own_deals_nothing() -> None:
    assert asked_by(Decodes()) == ""


def _whole() -> list[int]:
    """Read a stream that has numbers of its own in each rank, which are no samples."""
    accelerator, stream = Accelerator(), ReadsATable()
    rank = accelerator.process_index
    vars(stream).update(seeds=[10**6 * (rank + 1)], hashes=[2**64 - 1 - rank], nowhere=torch.empty(3, device="meta"))
    return [int(number) for batch in accelerator.prepare(DataLoader(stream, 1)) for number in batch]


def test_seeds_of_ranks_do_not_make_shares_of_a_stream() -> None:
    assert sorted(itertools.chain.from_iterable(run_ranks(2, _whole))) == [1, 2]
