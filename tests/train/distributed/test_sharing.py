"""Inputs cut into one part per rank: every sample is in exactly one part, and what cannot be cut is refused."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import Dataset, IterableDataset

from nbaccel import Accelerator, PartialState
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.nested import share


class Table:
    """What Hugging Face's `datasets.Dataset` shows of itself: a slice is a dict of columns, a `select` is a table."""

    column_names = ("text",)

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return {"text": self.rows[index]}

    def select(self, numbers: Any) -> Table:
        return Table([self.rows[number] for number in numbers])


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index * index


class Frame:
    """A pandas frame by its `iloc`; plain slices of it would go by the index."""

    def __init__(self, rows: list[Any]) -> None:
        self.iloc = self
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbers: Any) -> list[Any]:
        return [self.rows[number] for number in numbers]


FIVE = ["a", "b", "c", "d", "e"]
INPUTS = {
    "list": (FIVE, list),
    "tuple": (tuple(FIVE), list),
    "range": (range(5), list),
    "deque": (deque(FIVE), list),
    "user list": (UserList(FIVE), list),
    "dict view": (dict.fromkeys(FIVE).keys(), list),
    "tensor": (torch.arange(5), lambda part: part.tolist()),
    "rows": (torch.arange(10).view(5, 2), lambda part: part.tolist()),
    "array": (np.arange(5), lambda part: part.tolist()),
    "table": (Table(FIVE), lambda part: part.rows),
    "frame": (Frame(FIVE), list),
    "dataset": (Squares(), lambda part: [part[i] for i in range(len(part))]),
    "dict": ({"x": FIVE, "y": torch.arange(5)}, lambda part: list(zip(part["x"], part["y"].tolist(), strict=True))),
    "encoding": (UserDict(x=FIVE), lambda part: part["x"]),
    "nested": ({"x": {"y": FIVE}}, lambda part: part["x"]["y"]),
}
every_input = pytest.mark.parametrize("name", INPUTS)


@every_input
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_sample_is_in_exactly_one_part_in_order(name: str, world_size: int) -> None:
    inputs, read = INPUTS[name]
    parts = [read(share(inputs, rank, world_size, False)) for rank in range(world_size)]
    assert [sample for part in parts for sample in part] == read(share(inputs, 0, 1, False))
    assert {len(part) for part in parts} <= {5 // world_size, 5 // world_size + 1}
    assert sorted((len(part) for part in parts), reverse=True) == [len(part) for part in parts]


@every_input
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_padding_repeats_the_last_sample_until_all_have_equally_many(name: str, world_size: int) -> None:
    inputs, read = INPUTS[name]
    whole = read(share(inputs, 0, 1, False))
    for rank in range(world_size):
        plain = read(share(inputs, rank, world_size, False))
        padded = read(share(inputs, rank, world_size, True))
        assert padded == plain + [whole[-1]] * (-(-5 // world_size) - len(plain))


@given(total=st.integers(0, 40), world_size=st.integers(1, 9), apply_padding=st.booleans())
def test_any_number_of_samples_among_any_number_of_ranks(total: int, world_size: int, apply_padding: bool) -> None:
    parts = [share(list(range(total)), rank, world_size, apply_padding) for rank in range(world_size)]
    assert sorted({sample for part in parts for sample in part}) == list(range(total))
    if apply_padding and total:
        assert {len(part) for part in parts} == {-(-total // world_size)}
    else:
        assert [sample for part in parts for sample in part] == list(range(total))


def test_parts_are_of_the_kind_of_the_inputs() -> None:
    for inputs in (FIVE, tuple(FIVE), range(5), torch.arange(5), np.arange(5), Table(FIVE), UserDict(x=FIVE)):
        assert type(share(inputs, 1, 2, False)) is type(inputs)


def test_a_dict_is_not_changed_and_neither_are_its_values() -> None:
    inputs = {"x": [1, 2, 3], "y": (1, 2, 3)}
    assert share(inputs, 0, 2, True) == {"x": [1, 2], "y": (1, 2)}
    assert inputs == {"x": [1, 2, 3], "y": (1, 2, 3)}
    assert share(MappingProxyType({"x": [1, 2, 3]}), 1, 2, False) == {"x": [3]}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("a prompt", r"does not cut a str into pieces: give it a list, \[str\]"),
        (b"bytes", "does not cut a bytes"),
        ({3, 1, 2}, r"cannot split a set: its order differs between processes. Give it sorted\(...\)"),
        (frozenset({1}), "cannot split a frozenset"),
        (Stream(), r"would read all of Stream in every process. Prepare a DataLoader over it"),
        (7, "cannot cut a int into parts"),
        (torch.tensor(1), "cannot cut a Tensor into parts"),
        (np.array(1), "cannot cut a ndarray into parts"),
        ({"x": "text"}, "does not cut a str"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(inputs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        share(inputs, 0, 2, False)


def test_values_of_different_lengths_are_named_with_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"equal length, got \{'a': 3, 'b': 2\}"):
        share({"a": [1, 2, 3], "b": ["x", "z"]}, 0, 2, False)


def test_a_generator_is_read_by_every_rank_and_split() -> None:
    def mine() -> list[int]:
        with PartialState().split_between_processes(n * n for n in range(5)) as part:
            return part

    assert run_ranks(2, mine) == [[0, 1, 4], [9, 16]]


def test_an_accelerator_splits_as_a_state_does() -> None:
    def mine() -> list[int]:
        with Accelerator().split_between_processes(torch.arange(3), apply_padding=True) as part:
            return part.tolist()

    assert run_ranks(2, mine) == [[0, 1], [2, 2]]


def test_one_process_gets_the_inputs_themselves() -> None:
    inputs = object()
    with PartialState().split_between_processes(inputs) as mine:
        assert mine is inputs


def test_the_seeds_sample_of_distributed_inference_gives_every_rank_all_texts_in_order() -> None:
    def generate() -> list[str]:
        state = PartialState()
        prompts = [f"Generate a story about {n}" for n in range(5)]
        with state.split_between_processes(prompts, apply_padding=True) as mine:
            generated = [prompt.upper() for prompt in mine]
        return state.gather(generated)

    whole = [f"GENERATE A STORY ABOUT {n}" for n in (0, 1, 2, 3, 4, 4)]
    assert run_ranks(2, generate) == [whole, whole]
