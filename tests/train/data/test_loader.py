"""Which rank sees which sample."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from nbaccel import Accelerator, World
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration, LoaderFacts, PreparedLoader, prepare_loader, to_device
from nbaccel.train.step.accumulation import Accumulation


def _dealt(
    samples: int,
    batch_size: int,
    world_size: int = 2,
    *,
    even: bool = True,
    split: bool = False,
    drop_last: bool = False,
    shuffle: bool = False,
) -> list[list[list[int]]]:
    """The ids that each rank sees, batch by batch, without processes: a shard needs none."""
    ranks = []
    for rank in range(world_size):
        loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size, shuffle=shuffle, drop_last=drop_last)
        prepared = _prepare(loader, rank, world_size, even=even, split=split)
        batches = list(_inner(prepared))
        assert len(batches) == len(prepared)
        ranks.append([batch[0].tolist() for batch in batches])
    return ranks


def _prepare(
    loader: DataLoader[Any], rank: int, world_size: int, *, even: bool = True, split: bool = False
) -> PreparedLoader:
    world = World(rank, world_size, rank, world_size)
    configuration = DataLoaderConfiguration(split, dispatch_batches=False, even_batches=even, data_seed=7)
    facts = [LoaderFacts.of(loader)] * world_size
    with warnings.catch_warnings(category=UserWarning, action="ignore"):
        return prepare_loader(loader, world, Accumulation(), configuration, facts, torch.device("cpu"))


def _inner(prepared: PreparedLoader, epoch: int = 0) -> Any:
    """Its batches, without asking whether this process is in that world."""
    prepared.set_epoch(epoch)
    return prepared._iterate()


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        (1, {}, [[[0, 0]], [[0, 0]]]),
        (7, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (5, {}, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]),
        (7, {"even": False}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        (5, {"even": False}, [[[0, 1], [4]], [[2, 3]]]),
        (7, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (1, {"drop_last": True}, [[], []]),
        (7, {"split": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
        (7, {"split": True, "even": False}, [[[0], [2], [4], [6]], [[1], [3], [5]]]),
        (7, {"split": True, "drop_last": True}, [[[0], [2], [4]], [[1], [3], [5]]]),
    ],
)
def test_the_table_of_ids(samples: int, options: dict[str, bool], expected: list[list[list[int]]]) -> None:
    assert _dealt(samples, 2, **options) == expected


@pytest.mark.parametrize(
    ("samples", "batch_size", "even", "split", "drop_last"),
    list(itertools.product([1, 7, 64], [2, 4], [True, False], [True, False], [True, False])),
)
def test_64_samples_are_dealt_without_loss(
    samples: int, batch_size: int, even: bool, split: bool, drop_last: bool
) -> None:
    ranks = _dealt(samples, batch_size, even=even, split=split, drop_last=drop_last)
    seen = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks)))
    whole_round = batch_size if split else batch_size * 2
    if drop_last:
        assert seen == Counter(range(samples // whole_round * whole_round))
    elif even:
        assert set(seen) == set(range(samples))
        assert sum(seen.values()) == -(-samples // whole_round) * whole_round
        assert len({len(batch) for rank in ranks for batch in rank}) == 1
    else:
        assert seen == Counter(range(samples))


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 50),
    batch_size=st.integers(1, 6),
    world_size=st.integers(2, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_is_seen_by_exactly_one_rank(
    samples: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    ranks = _dealt(samples, batch_size, world_size, even=False, drop_last=drop_last, shuffle=shuffle)
    seen = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks)))
    assert set(seen.values()) <= {1}
    if not drop_last:
        assert len(seen) == samples


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(1, 50), batch_size=st.integers(1, 6), world_size=st.integers(2, 5), shuffle=st.booleans())
def test_even_ranks_have_equally_many_full_batches(
    samples: int, batch_size: int, world_size: int, shuffle: bool
) -> None:
    ranks = _dealt(samples, batch_size, world_size, shuffle=shuffle)
    assert {tuple(len(batch) for batch in rank) for rank in ranks} == {(batch_size,) * len(ranks[0])}
    seen = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks)))
    assert set(seen) == set(range(samples))


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(range(self.samples))


@pytest.mark.parametrize("samples", [1, 2, 5, 7, 8, 64])
@pytest.mark.parametrize("split", [False, True])
def test_a_stream_is_dealt_like_a_dataset_with_a_length(samples: int, split: bool) -> None:
    streamed = []
    for rank in range(2):
        prepared = _prepare(DataLoader(_Stream(samples), batch_size=4), rank, 2, split=split)
        streamed.append([batch.tolist() for batch in _inner(prepared)])
        assert prepared.end_of_dataloader
    assert streamed == _dealt(samples, 4, split=split)


class _Refilled(IterableDataset[Any]):
    """Batches of ids in one piece of memory, which the next batch fills again."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        ids, masks = torch.empty(4, dtype=torch.long), torch.ones(4)
        for number in range(self.batches):
            yield {"ids": ids.copy_(torch.arange(4 * number, 4 * number + 4)), "mask": masks, "number": number}


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_that_fills_the_same_memory_again_loses_no_batch(world_size: int, dispatch: bool) -> None:
    ranks = [_seen(dispatch)] if world_size == 1 else run_ranks(world_size, _seen, dispatch)
    for rank, seen in enumerate(ranks):
        mine = range(rank, 6, world_size)
        assert seen == [([4 * number + each for each in range(4)], number) for number in mine]


def _seen(dispatch: bool) -> list[tuple[list[int], int]]:
    configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(_Refilled(6), batch_size=None))
    return [(batch["ids"].tolist(), batch["number"]) for batch in loader]


def test_batches_of_own_sizes_are_dealt_whole() -> None:
    batches = [[0], [1, 2], [3, 4, 5]]
    seen = []
    for rank in range(2):
        loader = DataLoader(TensorDataset(torch.arange(6)), batch_sampler=batches)
        seen.append([batch[0].tolist() for batch in _inner(_prepare(loader, rank, 2))])
    assert seen == [[[0], [3, 4, 5]], [[1, 2], [0]]]


def test_a_loader_without_batches_deals_its_samples() -> None:
    seen = []
    for rank in range(2):
        loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=None)
        seen.append([sample[0].item() for sample in _inner(_prepare(loader, rank, 2))])
    assert seen == [[0, 2, 4], [1, 3, 0]]


def test_shuffling_is_equal_on_all_ranks_new_in_each_epoch_and_repeatable() -> None:
    def order(rank: int, epoch: int) -> list[int]:
        loader = DataLoader(TensorDataset(torch.arange(32)), 4, shuffle=True)
        prepared = _prepare(loader, rank, 2)
        torch.manual_seed(rank)
        return [index for batch in _inner(prepared, epoch) for index in batch[0].tolist()]

    epochs = [order(0, epoch) + order(1, epoch) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(32))] * 2
    assert epochs[0] != epochs[1]
    assert order(0, 1) + order(1, 1) == epochs[1]


def test_the_users_sampler_and_its_generator_stay_as_they_are() -> None:
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True, generator=generator)
    before = generator.get_state()
    _inner(_prepare(loader, 0, 2)).__next__()
    assert loader.sampler.generator is generator
    # DataLoader itself draws one number per iteration for its workers.
    assert not torch.equal(before, torch.Generator().manual_seed(5).get_state())


def _orders(seed: int) -> list[list[int]]:
    accelerator = Accelerator()
    torch.manual_seed(seed + accelerator.process_index)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(16)), 4, shuffle=True))
    epochs = []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch[0].tolist()
            accelerator.wait_for_everyone()
    return epochs


def test_ranks_share_rank_0s_seed_for_the_order_of_data() -> None:
    first, second = run_ranks(2, _orders, 1)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(16))
    assert first[0] != first[1]
    assert run_ranks(2, _orders, 1) == [first, second]


def _with_workers() -> list[list[int]]:
    loader = DataLoader(range(14), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type, var-annotated]
    prepared = Accelerator().prepare(loader)
    return [[index for batch in prepared for index in batch.tolist()] for _ in range(2)]


def test_worker_processes_of_a_loader_are_kept() -> None:
    first, second = run_ranks(2, _with_workers)
    assert first == [[0, 1, 4, 5, 8, 9, 12, 13]] * 2
    assert second == [[2, 3, 6, 7, 10, 11, 0, 1]] * 2


def test_an_empty_dataset_in_two_ranks_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"dataset of a prepared loader is empty \(TensorDataset of length 0\)"):
        _prepare(DataLoader(TensorDataset(torch.arange(0)), 2), 0, 2)


def test_a_batch_that_cannot_be_split_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="divides by the 2 ranks, got 3"):
        _prepare(DataLoader(TensorDataset(torch.arange(4)), 3), 0, 2, split=True)


def test_a_distributed_sampler_of_ones_own_is_not_dealt_twice() -> None:
    dataset = TensorDataset(torch.arange(8))
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False))
    assert [batch[0].tolist() for batch in _inner(_prepare(loader, 1, 2))] == [[1, 3], [5, 7]]


def test_a_loader_that_is_dealt_already_says_what_all_ranks_take() -> None:
    dataset = TensorDataset(torch.arange(8))
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False))
    assert _prepare(loader, 1, 2).total_batch_size == 4
    assert _prepare(DataLoader(dataset, 2), 1, 2, split=True).total_batch_size == 2


def test_a_prepared_loader_is_a_loader_and_shows_the_users_attributes() -> None:
    dataset = TensorDataset(torch.arange(6))

    def collate(samples: list[Any]) -> Any:
        return torch.stack([sample[0] for sample in samples])

    loader = DataLoader(dataset, 2, collate_fn=collate)
    prepared = Accelerator().prepare(loader)
    assert isinstance(prepared, DataLoader)
    assert len(prepared) == 3
    assert prepared.dataset is dataset
    assert prepared.sampler is loader.sampler
    assert prepared.batch_sampler is loader.batch_sampler
    assert prepared.collate_fn is collate
    assert (prepared.batch_size, prepared.num_workers, prepared.total_batch_size) == (2, 0, 2)
    assert prepared.total_dataset_length == 6
    dealt = _prepare(loader, 0, 2)
    assert isinstance(dealt.batch_sampler, BatchSampler) or len(dealt.batch_sampler) == 2
    assert dealt.batch_size == 2
    assert dealt.total_batch_size == 4


def test_the_end_shows_at_the_last_batch() -> None:
    for loader in (DataLoader(range(5), 2), DataLoader(_Stream(5), 2)):
        prepared = Accelerator().prepare(loader)
        assert [prepared.end_of_dataloader for _ in prepared] == [False, False, True]


def test_on_the_cpu_batches_are_handed_on_untouched() -> None:
    samples = [torch.ones(2), torch.zeros(2)]
    prepared = Accelerator().prepare(DataLoader(samples, batch_size=None))
    assert all(batch is sample for batch, sample in zip(prepared, samples, strict=True))


def test_batches_are_moved_in_any_nesting() -> None:
    meta = torch.device("meta")
    moved = to_device({"x": torch.ones(2), "more": [torch.ones(1), "text"], "pair": (1, torch.ones(3))}, meta)
    assert moved["x"].device == moved["more"][0].device == moved["pair"][1].device == meta
    assert moved["more"][1] == "text"


def test_set_epoch_reaches_dataset_and_sampler() -> None:
    class Epochs(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Epochs(range(4))
    prepared = Accelerator().prepare(DataLoader(range(4), 2, sampler=sampler))
    prepared.set_epoch(5)
    assert sampler.epoch == 5
    assert prepared.iteration == 5


def _metrics(samples: int, batch_size: int, even: bool, split: bool, streamed: bool) -> tuple[list[int], list[Any]]:
    accelerator = Accelerator(even_batches=even, split_batches=split)
    dataset: Any = _Stream(samples) if streamed else list(range(samples))
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # of samples that are repeated
        loader = accelerator.prepare(DataLoader(dataset, batch_size))
    tensors, objects = [], []
    for batch in loader:
        tensors += accelerator.gather_for_metrics({"ids": batch})["ids"].tolist()
        objects += accelerator.gather_for_metrics({"ids": [f"id{index}" for index in batch.tolist()]})["ids"]
    return sorted(tensors), sorted(objects)


@pytest.mark.parametrize(
    ("samples", "even", "split", "streamed"),
    [
        (3, True, False, False),
        (9, True, False, False),
        (16, True, False, False),
        (9, True, True, False),
        (9, True, False, True),
        (14, False, False, False),
    ],
)
def test_metrics_count_every_sample_once(samples: int, even: bool, split: bool, streamed: bool) -> None:
    for tensors, objects in run_ranks(2, _metrics, samples, 4, even, split, streamed):
        assert tensors == list(range(samples))
        assert objects == sorted(f"id{index}" for index in range(samples))


def test_choices_given_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"split_batches=True, even_batches=True and a dataloader_config: choose them"):
        Accelerator(split_batches=True, dataloader_config=DataLoaderConfiguration())
    assert Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).split_batches
    assert Accelerator(split_batches=True).split_batches


def _numbers_of_ranks(samples: int, streamed: bool) -> list[Any]:
    """Return what a program gathers in each round: means, one value and one text of each rank, and its samples."""
    accelerator = Accelerator()
    dataset: Any = _Stream(samples) if streamed else list(range(samples))
    rounds = []
    for batch in accelerator.prepare(DataLoader(dataset, 4)):
        values = batch.double()
        both = accelerator.gather_for_metrics({"loss": values.mean(), "ids": batch, "none": None})
        texts = [f"{index}" for index in batch.tolist()]
        objects = accelerator.gather_for_metrics({"texts": texts, "loss": 0.5, "rank": ["one"]})
        vector = accelerator.gather_for_metrics(values.mean()[None]) if len(batch) > 1 else torch.zeros(2)
        rounds.append((len(both["loss"]), both["ids"].tolist(), objects, len(vector)))
    return rounds


@pytest.mark.parametrize("streamed", [False, True])
def test_a_number_of_each_rank_is_gathered_from_every_rank_in_the_last_round_too(streamed: bool) -> None:
    for rounds in run_ranks(2, _numbers_of_ranks, 13, streamed):
        ids = [index for _, each, _, _ in rounds for index in each]
        assert ids == list(range(13))
        for means, each, objects, vector in rounds:
            assert (means, vector, objects["loss"], objects["rank"]) == (2, 2, [0.5, 0.5], ["one", "one"])
            assert objects["texts"] == list(map(str, each))


def _of_tokens() -> tuple[list[int], list[str]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(9), 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lengths = [len(accelerator.gather_for_metrics(batch.repeat_interleave(5))) for batch in loader]
    return lengths, [str(warning.message) for warning in said]


def test_entries_that_are_neither_of_samples_nor_of_ranks_are_all_returned_and_that_is_said() -> None:
    for lengths, said in run_ranks(2, _of_tokens):
        assert lengths == [40, 40]
        (message,) = said
        assert "2 ranks gave 40 entries" in message
        assert "hold 8 samples, and the last 7 of these are repetitions" in message
        assert "one entry for each sample" in message
