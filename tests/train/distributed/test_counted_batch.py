"""A batch whose number of samples is known: what belongs to samples is cut and joined, nothing is guessed."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nbaccel.errors import CannotSplit
from nbaccel.train.distributed.counted_batch import CountedBatch, ListLayout, joined


def picture(number: int, channels: int = 3) -> Tensor:
    return torch.full((channels, 4, 4), float(number))


def boxes(number: int, count: int) -> dict[str, Tensor]:
    return {"boxes": torch.full((count, 4), float(number)), "labels": torch.full((count,), number)}


@dataclass
class Pictures:
    pixels: list[Tensor]
    names: list[str]
    is_train: bool = True


SAMPLES_IN_LISTS = {
    "as torchvision collates": lambda numbers: tuple(
        zip(*[(picture(number), boxes(number, 1 + number % 3)) for number in numbers], strict=True)
    ),
    "a list of samples": lambda numbers: [(picture(number), boxes(number, 2)) for number in numbers],
    "a list of dicts": lambda numbers: [{"x": picture(number, 5)} for number in numbers],
    "lists in a dict": lambda numbers: {"x": [picture(number, 7) for number in numbers], "size": (8, 8, 8, 8, 8)},
    "a dataclass": lambda numbers: Pictures([picture(number, 7) for number in numbers], list(map(str, numbers))),
    "missing values": lambda numbers: UserDict(x=[None if number == 1 else picture(number, 7) for number in numbers]),
    "arrays": lambda numbers: (np.array(numbers), ["a"] * len(numbers), {"y": torch.tensor(numbers)}),
}


def _plain(value: Any) -> Any:
    """Return a value as something that can be compared."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, (dict, UserDict)):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_plain(child) for child in value]
    return {name: _plain(child) for name, child in vars(value).items()} if isinstance(value, Pictures) else value


@pytest.mark.parametrize("name", SAMPLES_IN_LISTS)
def test_samples_of_several_batches_are_the_batch_that_was_made_of_them(name: str) -> None:
    made = SAMPLES_IN_LISTS[name]
    parts = [CountedBatch(made([0, 1]), 2), CountedBatch(made([2, 3]), 2), CountedBatch(made([4]), 1)]
    assert _plain(joined(parts, 1, 5)) == _plain(made([1, 2, 3, 4]))
    assert joined(parts, 2, 4) is parts[1].batch
    assert _plain(CountedBatch(made([5, 6]), 2).take(1, 2)) == _plain(made([6]))


def test_what_is_as_long_as_a_batch_by_chance_is_not_cut_where_another_batch_shows_it() -> None:
    weights = torch.tensor([0.1, 0.9])
    whole, short = (CountedBatch({"x": torch.arange(count), "of_classes": weights}, count) for count in (2, 1))
    batch = joined([short, whole], 0, 2)
    assert batch["x"].tolist() == [0, 0]
    assert batch["of_classes"] is weights


PAIR = (torch.ones(2, 3), torch.zeros(2, 3))


def test_two_tensors_of_two_rows_in_a_batch_of_two_are_samples_or_columns_by_what_is_known() -> None:
    with pytest.raises(CannotSplit, match="tuple of 2 values of one kind with 2 rows each, in a batch of 2 samples"):
        CountedBatch(PAIR, 2).take(0, 1)
    columns = CountedBatch(PAIR, 2, ListLayout(are_columns=True)).take(0, 1)
    assert [tuple(column.shape) for column in columns] == [(1, 3), (1, 3)]
    (sample,) = CountedBatch(PAIR, 2, ListLayout({"batch": True})).take(0, 1)
    assert sample is PAIR[0]
    shown_by_another = joined([CountedBatch(PAIR, 2), CountedBatch((torch.ones(1, 3), torch.zeros(1, 3)), 1)], 1, 3)
    assert [tuple(column.shape) for column in shown_by_another] == [(2, 3), (2, 3)]


def test_a_table_with_as_many_columns_as_samples_belongs_to_all_of_them() -> None:
    batches = [CountedBatch({"x": torch.ones(2), "table": torch.ones(7, 2)}, 2) for _ in range(2)]
    assert joined(batches, 1, 3)["table"].shape == (7, 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([({"x": torch.ones(2), "lr": 0.1}, 2), ({"x": torch.ones(1), "lr": 0.2}, 1)], r"batch\['lr'\].* 0.1 and 0.2"),
        ([(torch.ones(2, 5), 2), (torch.ones(1, 4), 1)], "the rows of batch do not fit together: "),
        ([({"x": torch.ones(2)}, 2), ({"y": torch.ones(1)}, 1)], "batch holds other things in each of the batches"),
        ([((torch.ones(2), object()), 2)], r"what of batch\[1\] \(object\) belongs to which sample"),
        ([({"x": torch.ones(7)}, 2)], "nothing in this dict has 2 rows or entries"),
        ([(torch.ones(0), 0)], "no samples 0 to 3 among 0"),
        (
            [({"x": torch.ones(7, 2), "y": torch.ones(2)}, 2), ({"x": torch.ones(7, 1), "y": torch.ones(1)}, 1)],
            r"batch\['x'\] has its samples in another dimension than the first",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused(parts: list[tuple[Any, int]], message: str) -> None:
    counted = [CountedBatch(batch, count) for batch, count in parts]
    with pytest.raises(CannotSplit, match=message):
        joined(counted, 0, max(1, sum(part.samples for part in counted) - (len(parts) == 1)) if parts[0][1] else 3)
