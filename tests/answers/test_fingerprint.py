"""Fingerprints: equal values and functions have equal ones, others do not."""

from __future__ import annotations

import functools
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.answers.fingerprint import checksum_of, checksum_of_sample, source_of

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


def from_source(text: str, name: str, folder: Path) -> FunctionType:
    """A function of a file, as `inspect` finds it."""
    path = folder / f"{abs(hash(text))}.py"
    path.write_text(text)
    scope: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), scope)
    found: FunctionType = scope[name]
    return found


def test_comments_and_layout_do_not_count(tmp_path: Path) -> None:
    one = from_source("def f(x):\n    return x + 1\n", "f", tmp_path)
    two = from_source("def f( x ):\n    # reason\n\n    return (x + 1)\n", "f", tmp_path)
    three = from_source("def f(x):\n    return x + 2\n", "f", tmp_path)
    assert source_of(one) == source_of(two) != source_of(three)


def test_a_lambda_counts_without_the_call_around_it(tmp_path: Path) -> None:
    one = from_source("f = (lambda x: x + 1)\n", "f", tmp_path)
    two = from_source("f = max(lambda x: x + 1, key=len) if 0 else (\n    lambda x: x + 1)\n", "f", tmp_path)
    three = from_source("other = 1\nf, b = (lambda x: x + 1), 7\n", "f", tmp_path)
    assert source_of(one) == source_of(three)
    assert source_of(two)


@pytest.mark.parametrize("function", [len, str.upper, functools.partial(sorted, reverse=True), torch.relu, dict])
def test_what_has_no_source_has_its_name(function: Any) -> None:
    assert source_of(function) == source_of(function) != source_of(max)


def test_an_object_that_is_called_counts_by_its_class() -> None:
    model = torch.nn.Linear(2, 2, device="cpu")
    assert source_of(model) == source_of(torch.nn.Linear(3, 3, device="cpu"))
    assert source_of(model) != source_of(torch.nn.ReLU())
