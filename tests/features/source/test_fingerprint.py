"""Fingerprints: equal values have equal ones, others do not."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from nbaccel.features.source.fingerprint import checksum_of, checksum_of_sample

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


def test_numbers_of_numpy_count_as_those_of_python() -> None:
    """NumPy 2 prints the first one as np.float64(1.5)."""
    assert checksum_of([np.float64(1.5), np.complex128(1j)]) == checksum_of([1.5, 1j])
    assert checksum_of([np.float64(1.5)]) != checksum_of([np.float64(2.5)])
    assert len({checksum_of([each]) for each in (True, 1, Color.RED)}) == 3


class Color(IntEnum):
    RED = 1


@dataclass
class Tagged:
    tags: set[str]


class Plain:
    """An object like most: with texts that are the same object or not, a set, and a way back to itself."""

    def __init__(self, name: str = "name", tags: str = "abcdefgh") -> None:
        self.names = [name, "".join(name)]
        self.tags = set(tags)
        self.me = self


def objects() -> list[Any]:
    texts = ["".join(["text ", str(number)]) for number in range(3)]
    rows = pandas.DataFrame({"text": texts, "number": range(3)}).to_numpy()
    return [rows, rows[1], Tagged(set("abcdefgh")), Plain(), pandas.Series(texts), datetime.date(2020, 1, 2), {Plain}]


@pytest.mark.slow
def test_objects_have_the_same_checksum_in_another_process() -> None:
    words = "from features.source.test_fingerprint import *; print([checksum_of([each]) for each in objects()])"
    found = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        found.add(
            subprocess.run([sys.executable, "-c", words], capture_output=True, env=environment, check=True).stdout
        )
    assert len(found) == 1


def test_equal_objects_have_equal_checksums_and_others_do_not() -> None:
    assert checksum_of([Plain("".join(["na", "me"]))]) == checksum_of([Plain()]) != checksum_of([Plain("other")])
    assert checksum_of([Plain(tags="a")]) != checksum_of([Plain()])
    assert checksum_of([Tagged({"a"})]) != checksum_of([Tagged({"b"})])
    assert checksum_of([numpy_row("a", 1)]) == checksum_of([numpy_row("a", 1)]) != checksum_of([numpy_row("a", 2)])


def numpy_row(*values: Any) -> Any:
    return np.array(["".join(value) if isinstance(value, str) else value for value in values], dtype=object)


def test_of_an_object_that_cannot_be_taken_apart_the_class_counts() -> None:
    assert checksum_of([threading.Lock()]) == checksum_of([threading.Lock()]) != checksum_of([sys.stdout])


def test_a_graph_of_objects_takes_no_time() -> None:
    class Node:
        pass

    nodes: list[Any] = [Node() for _ in range(20)]
    for node in nodes:
        node.others = nodes
    first: Any = Node()
    last = first
    for _ in range(1000):
        last.next = Node()
        last = last.next
    assert checksum_of([nodes[0]]) != checksum_of([first])
