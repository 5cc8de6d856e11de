"""Items of a map: which are read whole, in which order they come, and what a stream gives after it was compared."""

from __future__ import annotations

from array import array
from collections import UserList, deque
from collections.abc import Iterator
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from nbaccel.features.map.item_list import ItemMark, ItemStream, as_items, is_read_whole, longest_first

TEXTS = [f"text {number}" for number in range(1000)]
CHANGED = [*TEXTS[:7], "another", *TEXTS[8:]]


class Column(UserList[Any]):
    """As `datasets` has it: read at once it is fast, and one by one it is slow."""

    column_name = "text"

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read one by one")

    def __getitem__(self, number: Any) -> Any:
        return self.data[number]


Column.__module__ = "datasets.arrow_dataset"


def column_of_datasets(texts: list[Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"text": texts})["text"]


@pytest.mark.parametrize("make", [list, tuple, deque, UserList, numpy.array, pandas.Series, Column, column_of_datasets])
def test_items_in_memory_are_compared_one_by_one(make: Any) -> None:
    items = as_items(make(TEXTS))
    assert is_read_whole(items)
    assert ItemMark.of(items) == ItemMark.of(as_items(make(TEXTS))) != ItemMark.of(as_items(make(CHANGED)))


@pytest.mark.parametrize(
    "items",
    [range(9), array("q", [1, 2]), memoryview(b"ab"), torch.zeros(3), TensorDataset(torch.zeros(3))],
    ids=lambda items: type(items).__name__,
)
def test_numbers_are_too(items: Any) -> None:
    assert is_read_whole(as_items(items))


class Numbers(torch.utils.data.Dataset[int]):
    """A data set of one's own, whose items may take long."""

    read = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        Numbers.read += 1
        return number


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(10_000))], ids=["own", "subset"])
def test_of_a_data_set_about_32_items_are_compared(wrap: Any) -> None:
    Numbers.read = 0
    items = as_items(wrap(Numbers(10_000)))
    ItemMark.of(items)
    assert not is_read_whole(items)
    assert 30 < Numbers.read < 70


def test_of_a_column_of_lists_all_are_compared_and_of_one_of_pictures_some() -> None:
    assert is_read_whole(as_items(Column([["a"], ["b"]])))
    assert not isinstance(as_items(Column([object()] * 3)), list)


def test_a_data_set_of_the_hub_is_known_by_its_fingerprint() -> None:
    datasets = pytest.importorskip("datasets")
    one, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (TEXTS, CHANGED))
    assert not is_read_whole(as_items(one))
    assert ItemMark.of(one) == ItemMark.of(datasets.Dataset.from_dict({"text": TEXTS})) != ItemMark.of(other)


def test_long_items_of_a_deque_or_a_column_come_first() -> None:
    texts = ["a", "aaa", "aa"]
    for items in (as_items(deque(texts)), as_items(Column(texts))):
        order = longest_first(items)
        assert order is not None
        assert list(order) == [1, 2, 0]


def drawn() -> Iterator[str]:
    yield from TEXTS[:5]


class Again:
    """A stream that can be read several times."""

    def __iter__(self) -> Iterator[str]:
        return drawn()


@pytest.mark.parametrize("make", [drawn, Again])
def test_a_stream_gives_all_its_items_after_it_was_compared(make: Any) -> None:
    blocks = [(2, ItemMark.of(TEXTS[:2]).checksum), (4, "another")]
    for keeps, left in ((True, 5), (False, 1 if make is drawn else 5)):
        stream = as_items(make())
        assert isinstance(stream, ItemStream)
        assert stream.difference(blocks, keeps) == "items 2 to 3 are others"
        assert len(list(stream)) == left


class Counted(torch.utils.data.IterableDataset[str]):
    """A stream of torch that knows its length."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[str]:
        return drawn()


def test_a_stream_of_torch_may_have_a_length() -> None:
    stream = as_items(Counted())
    assert isinstance(stream, ItemStream)
    assert ItemMark.of(stream) == ItemMark(None, "")
    assert list(stream) == TEXTS[:5]


def test_streams_that_are_equal_have_no_difference() -> None:
    blocks = [(2, ItemMark.of(TEXTS[:2]).checksum), (5, ItemMark.of(TEXTS[2:5]).checksum)]
    assert ItemStream(drawn()).difference(blocks, keeps=True) == ""
    assert ItemStream(drawn()).difference([(5, "")]) == "", "the version before had no checksums there"
    assert ItemStream(drawn()).difference(blocks[:1]) == "more than 2 now"
