"""Batches of other sizes before the end of an epoch, with split_batches: every rank takes part in every round."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration


class Stream(IterableDataset[Any]):
    """Is shared out among the worker processes, so each of them ends with a short batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        begin, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(begin, self.samples, step):
            yield torch.tensor([float(index)])


class OfTheirSizes:
    """A program's own batch sampler, whose batches have the sizes that it says."""

    batch_size, drop_last = 4, False

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for size in self.sizes:
            yield list(range(begin, begin + size))
            begin += size


def _trained(kind: str, dispatch: bool | None, sizes: Any) -> tuple[list[list[float]], list[float], list[str]]:
    """Train on an epoch, and look at another one; return its batches, what is gathered of the look, and warnings."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=dispatch))
    loader: Any
    if kind == "stream":
        loader = DataLoader(Stream(sizes), 4, num_workers=2)
    else:
        data = TensorDataset(torch.arange(float(sum(sizes)))[:, None])
        loader = DataLoader(data, batch_sampler=OfTheirSizes(sizes), collate_fn=_rows)  # type: ignore[arg-type]
    model = torch.nn.Linear(1, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-4), loader)
        batches, gathered = list[list[float]](), list[float]()
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch.flatten().tolist())
        with torch.no_grad():
            for batch in loader:
                gathered += accelerator.gather_for_metrics(batch).flatten().tolist()
    return batches, gathered, [str(each.message) for each in said if "split_batches" in str(each.message)]


def _rows(samples: Any) -> Any:
    return torch.stack([row for (row,) in samples])


@pytest.mark.parametrize("dispatch", [None, False], ids=["dispatched", "read by all"])
def test_a_stream_whose_workers_end_with_short_batches(dispatch: bool | None) -> None:
    first, second = run_ranks(2, _trained, "stream", dispatch, 11)
    assert first[0][:3] == [[0.0, 2.0], [1.0, 3.0], [8.0]]
    assert second[0][:3] == [[4.0, 6.0], [5.0, 7.0], [10.0]]
    assert (len(first[0]), len(second[0])) == (4, 4)
    for _, gathered, said in (first, second):
        assert sorted(gathered) == [float(index) for index in range(11)]
        assert not said


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", [[4, 3, 4, 2], [2, 4, 4], [3, 3, 3]], ids=str)
def test_batches_of_the_programs_own_sizes(ranks: int, sizes: list[int]) -> None:
    results = run_ranks(ranks, _trained, "own", None, sizes)
    samples = [float(index) for index in range(sum(sizes))]
    assert [len(batches) for batches, *_ in results] == [len(sizes)] * ranks
    assert {value for batches, *_ in results for batch in batches for value in batch} == set(samples)
    for rank, (_, gathered, said) in enumerate(results):
        assert set(gathered) == set(samples)
        if min(sizes[:-1]) < ranks:
            assert len(gathered) > len(samples)
            assert bool(said) == (rank == 0)
        else:
            assert gathered == samples


def test_a_single_sample_before_the_end_is_said_to_be_counted_twice() -> None:
    first, second = run_ranks(2, _trained, "own", None, [4, 1, 4])
    assert (first[0], second[0]) == ([[0.0, 1.0], [4.0], [5.0, 6.0]], [[2.0, 3.0], [0.0], [7.0, 8.0]])
    assert "a batch of 1 sample(s) before the end of an epoch is dealt to 2 ranks" in first[2][0]
    assert "gather_for_metrics counts twice" in first[2][0]
    assert not second[2]
