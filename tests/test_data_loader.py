"""``nbaccel.data_loader``: loaders without an Accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbaccel.data_loader import prepare_data_loader, skip_first_batches
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
