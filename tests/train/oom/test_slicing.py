"""A batch is cut into its samples, in whatever containers it comes, or refused."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from nbaccel.errors import CannotSplit
from nbaccel.train.distributed.nested import leaves
from nbaccel.train.oom.microbatch.slicing import Samples, sample_shapes

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    scale: float = 2.0


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping that is no dict, with attributes for its keys."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * 2).reshape(count, 2)


BATCHES = {
    "tensor": rows(5),
    "tuple": (rows(5), torch.arange(5)),
    "list": [rows(5), torch.arange(5)],
    "named tuple": Pair(rows(5), torch.arange(5)),
    "dict": {"x": rows(5), "train": True, "scale": torch.tensor(3.0), "name": "a"},
    "user dict": Encoding(ids=rows(5), mask=rows(5)),
    "dataclass": Batch(rows(5)),
    "nested": {"a": (rows(5), {"b": [torch.arange(5)]}), "n": 7},
    "names": [rows(5), ["a", "b", "c", "d", "e"], {"path": ("p",) * 5}],
    "objects": {"x": rows(5), "boxes": [[1], [2, 3], [], [4], [5]]},
    "numpy": (np.arange(5), rows(5)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_c16_a_batch_is_cut_in_the_containers_it_comes_in(name: str) -> None:
    batch = BATCHES[name]
    samples = Samples.of(batch)
    assert samples.count == 5
    assert samples.take(0, 5) is batch
    part = samples.take(1, 3)
    assert type(part) is type(batch)
    whole, cut = list(leaves(batch)), list(leaves(part))
    tensors = [leaf for leaf in whole if isinstance(leaf, torch.Tensor) and leaf.ndim]
    cut_tensors = [leaf for leaf in cut if isinstance(leaf, torch.Tensor) and leaf.ndim]
    assert all(torch.equal(one, other[1:3]) for one, other in zip(cut_tensors, tensors, strict=True))


def test_c16_what_stands_for_the_whole_batch_goes_into_every_part() -> None:
    part = Samples.of(BATCHES["dict"]).take(4, 5)
    assert part["train"] is True
    assert part["name"] == "a"
    assert part["scale"] == 3.0
    assert Samples.of(BATCHES["dataclass"]).take(0, 1).scale == 2.0
    assert Samples.of(BATCHES["user dict"]).take(0, 1).ids.shape == (1, 2)


def test_c16_lists_with_one_entry_per_sample_are_cut() -> None:
    assert Samples.of(BATCHES["names"]).take(3, 5)[1:] == [["d", "e"], {"path": ("p", "p")}]
    assert Samples.of(BATCHES["objects"]).take(0, 2)["boxes"] == [[1], [2, 3]]


def test_parts_are_views() -> None:
    batch = rows(4)
    assert Samples.of(batch).take(1, 2).data_ptr() == batch[1].data_ptr()


@given(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4))
def test_parts_put_together_are_the_batch(count: int, cuts: list[int]) -> None:
    batch = {"x": rows(count), "y": [torch.arange(count)]}
    samples = Samples.of(batch)
    bounds = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [samples.take(start, stop) for start, stop in pairwise(bounds)]
    joined = map(torch.cat, zip(*map(leaves, parts), strict=True))
    assert all(map(torch.equal, joined, leaves(batch)))


REFUSED = {
    "lengths": ({"x": rows(4), "y": torch.ones(3)}, r"disagree.*batch\['x'\] 4, batch\['y'\] 3"),
    "no tensor": ({"train": True}, "this dict holds no tensor"),
    "stranger": ((rows(2), object()), r"what of batch\[1\] \(object\)"),
    "stranger in a dataclass": (Batch(rows(2), scale=object()), r"what of batch\.scale \(object\)"),
    "packed": (
        {"x": torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), "y": rows(2)},
        r"what of batch\['x'\] \(PackedSequence\)",
    ),
    "sparse": (rows(2).float().to_sparse(), r"what of batch \(Tensor\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_c16_what_cannot_be_cut_without_guessing_is_refused_with_the_remedy(name: str) -> None:
    batch, message = REFUSED[name]
    with pytest.raises(CannotSplit, match=message) as caught:
        Samples.of(batch)
    assert "split_fn=" in str(caught.value)
    assert "find_executable_batch_size" in str(caught.value)


def test_a_split_function_cuts_what_we_cannot() -> None:
    samples = Samples.of(["graph a", "graph b"], lambda batch, start, stop: batch[start:stop], 2)
    assert samples.take(1, 2) == ["graph b"]
    assert samples.take(0, 2) == ["graph a", "graph b"]


def test_a_split_function_without_a_count_is_refused() -> None:
    with pytest.raises(CannotSplit, match=r"nobody says how many.*samples="):
        Samples.of(object(), lambda batch, start, stop: batch)


def test_a_count_that_contradicts_the_tensors_is_refused() -> None:
    with pytest.raises(CannotSplit, match="samples=3, and the tensors of this batch have 4"):
        Samples.of(rows(4), count=3)


def test_the_shapes_of_a_sample_leave_its_number_out() -> None:
    assert sample_shapes({"x": torch.ones(4, 7, 3), "y": torch.ones(4), "s": torch.tensor(1)}) == ((7, 3), ())
