"""How many samples a batch has is the loader's own knowledge: streams and loaders that rank 0 reads deal samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbaccel import Accelerator, CannotSplit, RanksFailed, World
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.data.counting import as_counted, counting
from nbaccel.train.data.dispatch import _RoundShard
from nbaccel.train.data.position import DatasetStates
from nbaccel.train.data.shard import NOTHING, StreamShard

Collate = Callable[[list[Any]], Any]


def _row(number: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture of three channels, and one to three boxes."""
    count = 1 + number % 3
    return torch.full((3, 4, 4), float(number)), {
        "boxes": torch.full((count, 4), float(number)),
        "labels": torch.full((count,), number),
    }


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return _row(number)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def _transposed(rows: list[Any]) -> Any:
    return tuple(zip(*rows, strict=True))


def _numbers(pictures: Any, targets: Any) -> list[int]:
    """Return the numbers of the samples, each of which must be whole and have its own boxes."""
    numbers = [int(picture[0, 0, 0]) for picture in pictures]
    assert [target["labels"].tolist() for target in targets] == [[one] * (1 + one % 3) for one in numbers]
    assert {tuple(picture.shape) for picture in pictures} <= {(3, 4, 4)}
    return numbers


def _seen(samples: int, way: str) -> list[list[int]]:
    dispatches = {"rank 0 reads": True, "all ranks read": False}.get(way)
    split = way == "split"
    configuration = DataLoaderConfiguration(dispatch_batches=dispatches, split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    data: Any = Rows(samples) if way == "rank 0 reads" else Stream([_row(number) for number in range(samples)])
    loader = accelerator.prepare(DataLoader(data, 4 if split else 2, collate_fn=_transposed))
    return [_numbers(*batch) for batch in loader]


SEEN = {
    "rank 0 reads": [[[0, 1], [4, 5], [8, 9], [12]], [[2, 3], [6, 7], [10, 11], [0]]],
    "all ranks read": [[[0, 1], [4, 5], [8, 9], [12, 0]], [[2, 3], [6, 7], [10, 11], [1, 2]]],
    "split": [[[0, 1], [4, 5], [8, 9], [12]], [[2, 3], [6, 7], [10, 11], [0]]],
}


@pytest.mark.parametrize("way", SEEN)
def test_batches_of_pictures_and_their_boxes_are_dealt_as_samples(way: str) -> None:
    assert run_ranks(2, _seen, 13, way) == SEEN[way]


def _shares(loader: DataLoader[Any], ranks: int, kind: str, **options: Any) -> list[list[Any]]:
    """Return the batches of each rank, without communication."""
    shares = []
    for rank in range(ranks):
        world, states = World(rank, ranks, rank, ranks), DatasetStates(None)
        options = {"even": True, "split": False, **options}
        shard = (
            StreamShard(counting(loader), states, world, **options)
            if kind == "stream"
            else _RoundShard(counting(loader), states, world, None, **options)
        )
        shares.append([part for round_ in shard.rounds() if (part := shard.part(*round_, rank)) is not NOTHING])
    return shares


COLLATES: dict[str, tuple[Collate, Callable[[Any], tuple[Any, Any]]]] = {
    "transposed": (_transposed, lambda batch: batch),
    "lists": (lambda rows: [list(column) for column in zip(*rows, strict=True)], lambda batch: batch),
    "the rows": (list, _transposed),
    "stacked": (
        lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": [y for _, y in rows]},
        lambda batch: (batch["x"], batch["y"]),
    ),
}


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("kind", ["stream", "dispatch"])
def test_every_sample_comes_whole_whatever_the_batch_size_and_its_last_batch(kind: str, collate: str) -> None:
    function, columns = COLLATES[collate]
    for batch_size, samples in ((1, 3), (2, 12), (2, 13), (3, 10), (3, 9), (4, 5)):
        loader = DataLoader(Stream([_row(number) for number in range(samples)]), batch_size, collate_fn=function)
        for ranks in (2, 3):
            shares = _shares(loader, ranks, kind)
            assert len({len(share) for share in shares}) == 1
            numbers = [_numbers(*columns(batch)) for share in shares for batch in share]
            assert {number for batch in numbers for number in batch} == set(range(samples))


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_count_too(workers: int) -> None:
    class Shared(Stream):
        def __iter__(self) -> Iterator[Any]:
            worker = torch.utils.data.get_worker_info()
            assert worker is not None
            return iter(self.rows[worker.id :: worker.num_workers])

    rows = Shared([_row(number) for number in range(13)])
    loader = DataLoader(rows, 2, collate_fn=_transposed, num_workers=workers)
    numbers = [_numbers(*batch) for share in _shares(loader, 2, "dispatch") for batch in share]
    assert {number for batch in numbers for number in batch} == set(range(13))


def test_two_tensors_of_two_rows_are_told_from_two_samples_by_a_batch_with_one_sample_more() -> None:
    calls = []

    def columns(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(len(rows))
        return torch.stack(rows), torch.stack(rows) + 0.5

    rows = [torch.full((3,), float(number)) for number in range(6)]
    (first, last), (second, end) = _shares(DataLoader(Stream(rows), 2, collate_fn=columns), 2, "dispatch")
    assert [batch[0][:, 0].tolist() for batch in (first, second, last, end)] == [[0, 1], [2, 3], [4], [5]]
    assert (last[1] - last[0]).unique().tolist() == [0.5]
    assert calls == [2, 3, 2, 2] * 2  # one more in the first batch of a loader

    pairs = [torch.full((2, 3), float(number)) for number in range(6)]
    (_, last), (_, end) = _shares(DataLoader(Stream(pairs), 2, collate_fn=list), 2, "dispatch")
    assert [[tuple(sample.shape) for sample in batch] for batch in (last, end)] == [[(2, 3)], [(2, 3)]]


def test_what_a_collate_fn_draws_or_fills_is_as_without_the_call_that_compares() -> None:
    memory = torch.empty(3, 2)

    def columns(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        torch.stack(rows, out=memory[: len(rows)])
        return memory[: len(rows)], torch.rand(len(rows), 2)

    loader = DataLoader(Stream([torch.full((2,), float(number)) for number in range(4)]), 2, collate_fn=columns)
    torch.manual_seed(0)
    drawn = [as_counted(batch, 2).batch for batch in counting(loader)]  # type: ignore[union-attr]
    torch.manual_seed(0)
    expected = [noise.tolist() for _, noise in loader]
    assert [noise.tolist() for _, noise in drawn] == expected
    assert drawn[0][0].tolist() == [[0, 0], [1, 1]]


class Graphs:
    """An object that only its own library can cut."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


def test_batches_that_cannot_be_cut_are_dealt_whole_at_the_end_and_that_is_said() -> None:
    loader = DataLoader(Stream(list(range(5))), 2, collate_fn=Graphs)
    with pytest.warns(
        UserWarning, match=r"loader over Stream cannot be cut for 2 ranks: .*Graphs.*whole batch"
    ) as said:
        shares = _shares(loader, 2, "stream")
    assert [[batch.rows for batch in share] for share in shares] == [[[0, 1], [4]], [[2, 3], [0, 1]]]
    assert len(said) == 1


def _split_objects() -> None:
    configuration = DataLoaderConfiguration(split_batches=True, dispatch_batches=False)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(
        DataLoader(Stream(list(range(4))), 2, collate_fn=Graphs)
    )
    next(iter(loader))


def test_batches_that_cannot_be_cut_are_not_given_whole_to_ranks_that_split_them() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _split_objects)
    assert "cannot be cut for 2 ranks: it is not known what of batch (Graphs)" in str(failed.value)
    assert "Let its collate_fn return" in str(failed.value)


def _padded(rows: list[int]) -> Tensor:
    return torch.tensor([[number] * (1 + max(rows)) for number in rows])


@pytest.mark.parametrize("split", [False, True])
def test_a_last_batch_that_fits_no_other_one_is_filled_up_by_its_own_samples(split: bool) -> None:
    """Batches that are padded to their longest text (accelerate#3614)."""

    def of_rank(rank: int) -> list[Any]:
        loader = DataLoader(Stream(list(range(5))), 4 if split else 2, collate_fn=_padded)
        shard = StreamShard(loader, DatasetStates(None), World(rank, 2, rank, 2), even=True, split=split)
        shares = [batch[:, 0].tolist() for batch in shard]
        assert shard.remainder == 1
        return shares

    assert of_rank(0) == [[0, 1], [4, 4]]
    assert of_rank(1) == [[2, 3], [4, 4] if split else [0, 1]]


def test_batches_whose_samples_are_in_the_second_dimension_are_dealt_whole() -> None:
    def time_first(rows: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor([rows] * 7), torch.tensor(rows)

    with pytest.warns(UserWarning, match=r"batch\[0\] has its samples in another dimension"):
        shares = _shares(DataLoader(Stream(list(range(5))), 2, collate_fn=time_first), 2, "stream")
    for steps, numbers in [batch for share in shares for batch in share]:
        assert steps[0].tolist() == numbers.tolist()


def _texts_by_rank_0() -> tuple[list[int], list[int], list[int | None]]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(list(range(7))), 2, collate_fn=_padded))
    seen: list[int] = []
    sizes: list[int] = []
    told: list[int | None] = []
    for batch in loader:
        sizes.append(len(batch))
        told.append(loader.rank_samples)
        seen += accelerator.gather_for_metrics(batch[:, 0]).tolist()
    return seen, sizes, told


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_of_texts_that_rank_0_reads_are_those_of_each_sample(ranks: int) -> None:
    for seen, sizes, told in run_ranks(ranks, _texts_by_rank_0):
        assert seen == [0, 1, 2, 3, 4, 5, 6]
        assert sizes == told == [2, 2 if ranks == 2 else 1]


def test_a_loader_that_iterates_itself_is_asked_for_its_batch_size() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return iter(list(super().__iter__()))

    loader = Own(Stream([_row(number) for number in range(5)]), 2, collate_fn=_transposed)
    assert counting(loader) is loader
    batches = list(loader)
    sizes = [None if (counted := as_counted(batch, 2)) is None else counted.samples for batch in batches]
    assert sizes == [2, 2, 1]
    with pytest.raises(CannotSplit):
        StreamShard(loader, DatasetStates(None), World(0, 2, 0, 2), even=True, split=False)._cut([Graphs([1])], 0, 1)
