"""Names that hold parts of a cell's last batch: which of them are joined."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from nbaccel.train.raw_loop.batch_parts import GivenBatches
from nbaccel.train.raw_loop.last_batch import LastBatch

PART = GivenBatches(is_part=True, rows=4, whole=8, sizes=frozenset({4}), batches=1)


def beside_another_rank(entries: list[Any]) -> list[Any]:
    """Gathers the entries of two ranks, of which the second one has the same rows and other numbers."""
    (entry,) = entries
    if isinstance(entry, dict):
        return [entry, entry]
    mine, sizes = entry
    return [entry, ({name: [kinds, "other numbers", rows] for name, (kinds, _, rows) in mine.items()}, sizes)]


def part(is_in_a_list: bool) -> Any:
    rows = torch.ones(4, 2, device="cpu")
    return [rows] if is_in_a_list else rows


@pytest.mark.parametrize("is_in_a_list", [False, True])
def test_a_part_that_lies_where_the_last_run_left_its_batch_is_joined(is_in_a_list: bool) -> None:
    """A cell that is run again: the memory of the old object is free when the new one is made."""
    for _ in range(100):
        namespace = {"out": part(is_in_a_list)}
        place, last = id(namespace["out"]), LastBatch(namespace)
        del namespace["out"]
        namespace["out"] = part(is_in_a_list)
        if id(namespace["out"]) == place:
            break
    else:
        pytest.skip("no object was made where another one had been")
    last.note(PART)
    last.join(beside_another_rank)
    left = namespace["out"][0] if is_in_a_list else namespace["out"]
    assert left.shape == (8, 2)


def test_what_was_there_before_stays() -> None:
    namespace: dict[str, Any] = {"kept": part(False), "texts": ["a"]}
    namespace["itself"] = [namespace["texts"]]
    namespace["itself"].insert(0, namespace["itself"])
    last = LastBatch(namespace)
    last.note(PART)
    last.join(beside_another_rank)
    assert namespace["kept"].shape == (4, 2)


@pytest.mark.parametrize("is_in_a_list", [False, True])
def test_a_proxy_that_has_lost_its_object_is_no_part_and_hides_none(is_in_a_list: bool) -> None:
    """`isinstance` asks the proxy for its class, and it raises a ReferenceError."""
    proxy = weakref.proxy(set())
    namespace: dict[str, Any] = {"proxy": [proxy] if is_in_a_list else proxy}
    last = LastBatch(namespace)
    namespace["later"] = namespace["proxy"]
    namespace["out"] = part(False)
    last.note(PART)
    last.join(beside_another_rank)
    assert namespace["out"].shape == (8, 2)
