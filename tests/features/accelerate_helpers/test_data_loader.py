"""``nbaccel.data_loader``: loaders without an Accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from nbaccel import Accelerator
from nbaccel.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from nbaccel.testing import run_ranks


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def _loader() -> DataLoader[Any]:
    return DataLoader(range(8), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ({"split_batches": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
    ],
)
def test_the_batches_of_any_rank_can_be_asked_for(options: dict[str, Any], expected: list[list[list[int]]]) -> None:
    ranks = [prepare_data_loader(_loader(), num_processes=2, process_index=rank, **options) for rank in range(2)]
    assert [[batch.tolist() for batch in loader] for loader in ranks] == expected


def test_a_stream_is_read_by_each_rank_that_does_not_put_it_on_a_device() -> None:
    loader = prepare_data_loader(DataLoader(_Stream(), 2), num_processes=2, process_index=1)
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]


def test_orders_of_made_up_ranks_agree_by_their_seed() -> None:
    seen = []
    for rank in range(2):
        torch.manual_seed(3)
        loader: DataLoader[Any] = DataLoader(range(8), 2, shuffle=True)  # type: ignore[arg-type]
        prepared = prepare_data_loader(loader, num_processes=2, process_index=rank)
        seen += [index for batch in prepared for index in batch.tolist()]
    assert sorted(seen) == list(range(8))


def _in_a_run() -> list[list[int]]:
    return [batch.tolist() for batch in prepare_data_loader(_loader(), put_on_device=True)]


def test_without_numbers_it_is_this_run() -> None:
    assert run_ranks(2, _in_a_run) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert len(_in_a_run()) == 4


def test_skipping_is_the_same_function() -> None:
    assert [batch.tolist() for batch in skip_first_batches(_loader(), 3)] == [[6, 7]]


@pytest.mark.parametrize("samples", [1, 7, 8, 11])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
def test_shares_are_dealt_as_by_accelerates_shards(samples: int, drop_last: bool, split_batches: bool) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    sampler = BatchSampler(range(samples), 4, drop_last)
    for rank in range(2):
        place = {"num_processes": 2, "process_index": rank, "split_batches": split_batches}
        for even in (True, False):
            expected = theirs.BatchSamplerShard(sampler, **place, even_batches=even)
            ours = BatchSamplerShard(sampler, **place, even_batches=even)  # type: ignore[arg-type]
            assert list(ours) == list(expected)
            if even:  # of an uneven round theirs counts what it does not yield
                assert len(ours) == len(expected)
        streams = [
            kind(range(samples), batch_size=4, drop_last=drop_last, **place)
            for kind in (theirs.IterableDatasetShard, IterableDatasetShard)
        ]
        assert list(streams[0]) == list(streams[1])


def test_a_stream_that_draws_gets_the_epoch() -> None:
    class Drawn(IterableDataset[int]):
        generator = torch.Generator()

        def __iter__(self) -> Any:
            yield from torch.randperm(8, generator=self.generator).tolist()

        def __len__(self) -> int:
            return 8

    shard = IterableDatasetShard(Drawn(), batch_size=3, num_processes=2)
    first = list(shard)
    assert (list(shard), len(shard)) == (first, 6)
    shard.set_epoch(1)
    assert list(shard) != first
    with pytest.raises(ValueError, match="split_batches needs a batch_size that divides by the 2 ranks, got 3"):
        IterableDatasetShard(Drawn(), batch_size=3, num_processes=2, split_batches=True)


def test_loaders_that_are_made_by_hand_know_their_end_and_what_they_leave_out() -> None:
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        loader = kind(range(8), batch_size=2, skip_batches=1)
        ends = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        assert ends == [([2, 3], False), ([4, 5], False), ([6, 7], True)]
    assert [batch.tolist() for batch in SkipDataLoader(range(6), batch_size=2, skip_batches=2)] == [[4, 5]]
    rest = SkipBatchSampler(BatchSampler(range(6), 2, False), 2)
    assert (list(rest), len(rest), rest.total_length) == ([[4, 5]], 1, 3)


def test_the_sampler_of_a_loader_is_found_where_batches_are_drawn() -> None:
    data: Any = range(4)
    sampler = RandomSampler(data)
    assert get_sampler(DataLoader(data, sampler=sampler)) is sampler
    assert get_sampler(DataLoader(data, sampler=BatchSampler(sampler, 2, False), batch_size=None)) is sampler


def test_a_sampler_inside_of_a_batch_sampler_hears_of_the_epoch() -> None:
    data: Any = range(8)
    sampler = SeedableRandomSampler(data, data_seed=0)
    loader = Accelerator().prepare(DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False)))
    loader.set_epoch(3)
    assert sampler.epoch == 3
    order = [index for batch in loader for index in batch.tolist()]
    sampler.set_epoch(3)
    assert order == list(sampler)
