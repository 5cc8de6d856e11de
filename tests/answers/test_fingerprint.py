"""Fingerprints: equal values have equal ones, others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.answers.fingerprint import checksum_of, checksum_of_sample

DIFFERENT = [
    "a",
    b"a",
    1,
    1.0,
    True,
    None,
    ["a"],
    ["a", "b"],
    [["a"], "b"],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {1, 2},
    np.arange(3),
    np.arange(3.0),
    np.arange(3).reshape(3, 1),
    torch.arange(3, device="cpu"),
    torch.arange(3, dtype=torch.bfloat16, device="cpu"),
    torch.tensor(True, device="cpu"),
    Path("a"),
]


def test_different_values_have_different_checksums() -> None:
    assert len({checksum_of([value]) for value in DIFFERENT}) == len(DIFFERENT)


def test_equal_values_have_equal_checksums_whoever_made_them() -> None:
    name = "key" + str(len(DIFFERENT))
    one: list[Any] = [{name: [name, name], "s": {1, 2, 3}}]
    two: list[Any] = [{str(name): ["key" + str(len(DIFFERENT)), str(name)], "s": {3, 2, 1}}]
    assert checksum_of(one) == checksum_of(two)


def test_a_list_is_not_its_concatenation() -> None:
    assert checksum_of(["ab", "c"]) != checksum_of(["a", "bc"])


def test_an_item_that_contains_itself_is_said() -> None:
    item: list[Any] = []
    item.append(item)
    with pytest.raises(ValueError, match="contains itself"):
        checksum_of([item])


def test_of_a_data_set_some_items_are_read() -> None:
    class Slow(torch.utils.data.Dataset[int]):
        read = 0

        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, number: int) -> int:
            Slow.read += 1
            return number

    checksum_of_sample(Slow())  # type: ignore[arg-type]
    assert Slow.read < 50
