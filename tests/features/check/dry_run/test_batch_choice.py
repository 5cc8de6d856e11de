"""Which batches of a pass a dry run gives, and what the scan of lengths reads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nbaccel.features.check.dry_run.batch_choice import (
    BETWEEN,
    LAST,
    LONGEST,
    ChosenBatches,
    ItemLengths,
    choose,
    count_rows,
    size_of_item,
)


def batches_of(samples: int, size: int) -> list[list[list[int]]]:
    """Return rounds of one batch each."""
    return [[list(range(start, min(start + size, samples)))] for start in range(0, samples, size)]


def test_the_longest_one_in_between_and_the_last_are_chosen() -> None:
    chosen = choose(5, {0: 8.0, 1: 2.0, 2: 20.0, 3: 4.0, 4: 1.0})
    assert chosen.given == 3
    assert chosen.positions == (2, 3, 4, 0, 1)
    assert chosen.kinds == (LONGEST, BETWEEN, LAST, BETWEEN, BETWEEN)
    assert chosen.sizes == (20.0, 4.0, 1.0, 8.0, 2.0)
    assert chosen.mean_size == 7.0


def test_where_batches_are_alike_the_first_the_middle_and_the_last_are_chosen() -> None:
    chosen = choose(9, {})
    assert chosen.positions[: chosen.given] == (0, 4, 8)
    assert set(chosen.sizes) == {None}
    assert chosen.mean_size is None


@pytest.mark.parametrize(("rounds", "kinds"), [(1, (LAST,)), (2, (LONGEST, LAST)), (3, (LONGEST, BETWEEN, LAST))])
def test_a_pass_with_fewer_batches_gives_all(rounds: int, kinds: tuple[str, ...]) -> None:
    chosen = choose(rounds, {})
    assert (chosen.positions, chosen.kinds) == (tuple(range(rounds)), kinds)
    assert chosen.are_all


def test_a_loop_whose_first_batch_is_whole_begins_with_the_one_in_between() -> None:
    assert choose(5, {0: 8.0, 1: 2.0, 2: 20.0}, is_between_first=True).kinds[:3] == (BETWEEN, LONGEST, LAST)


def test_a_pass_of_which_the_last_batch_is_unknown_gives_another_one() -> None:
    chosen = choose(100, {}, has_last=False)
    assert chosen.kinds[: chosen.given] == (LONGEST, BETWEEN, BETWEEN)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 60), st.integers(0, 50), st.booleans(), st.booleans(), st.sets(st.integers(0, 59), max_size=20))
def test_no_round_is_given_twice_and_as_many_as_are_wanted(
    rounds: int, more: int, is_between_first: bool, has_last: bool, scanned: set[int]
) -> None:
    sizes = {position: float(position * 7 % 5) for position in scanned if position < rounds}
    chosen = choose(rounds, sizes, more, is_between_first=is_between_first, has_last=has_last)
    assert chosen.given == min(rounds, 3 + more)
    assert len(set(chosen.positions)) == len(chosen.positions) == min(rounds, 3 + more + 40)
    assert set(chosen.positions) <= set(range(rounds))
    assert len(chosen.positions) == len(chosen.kinds) == len(chosen.sizes)
    assert ChosenBatches.from_record(chosen.record()) == chosen


class Counted:
    """Items of which it is known how often each was read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.items[index]


def test_sizes_are_those_of_padded_batches() -> None:
    items = ["a" * length for length in (1, 5, 2, 2, 3)]
    assert ItemLengths().sizes(Counted(items), batches_of(5, 2)) == {0: 10.0, 1: 4.0, 2: 3.0}


def test_a_round_is_as_large_as_its_largest_batch() -> None:
    items = ["a" * length for length in (1, 5, 2, 2)]
    assert ItemLengths().sizes(Counted(items), [[[0], [1]], [[2], [3]]]) == {0: 5.0, 1: 2.0}


def test_items_of_one_shape_end_the_scan_after_a_few() -> None:
    images = Counted([torch.zeros(3, 8, 8)] * 5000)
    assert ItemLengths().sizes(images, batches_of(5000, 10)) == {}
    assert len(images.reads) <= 32


def test_each_item_is_read_once_also_in_a_second_scan() -> None:
    words = Counted(["a" * (1 + number % 7) for number in range(500)])
    lengths = ItemLengths()
    first = lengths.sizes(words, batches_of(500, 8))
    assert lengths.sizes(words, batches_of(500, 8)) == first
    assert sorted(words.reads) == list(range(500))


def test_a_scan_ends_in_time_with_what_it_has() -> None:
    now = iter(range(10_000))
    words = Counted(["a" * (1 + number % 7) for number in range(500)])
    sizes = ItemLengths(lambda: next(now) * 0.01).sizes(words, batches_of(500, 8))
    assert 1 < len(sizes) < 40
    assert 62 in sizes, "the last batch is scanned first, since it is always given"


def test_looks_at_items_that_take_long_end_in_time_too() -> None:
    now = iter(range(10_000))
    words = Counted(["a" * 7] * 500)
    assert ItemLengths(lambda: float(next(now))).sizes(words, batches_of(500, 8)) == {}
    assert len(words.reads) == 4


def test_a_scan_is_bounded_in_items() -> None:
    words = Counted(["a" * (1 + number // 1000) for number in range(30_000)])
    sizes = ItemLengths(lambda: 0.0).sizes(words, batches_of(30_000, 100))
    assert 190 <= len(sizes) < 210


def test_an_item_that_cannot_be_read_ends_the_scan_quietly() -> None:
    class Broken(Counted):
        def __getitem__(self, index: int) -> Any:
            if index == 13:
                raise ValueError("no such file")
            return super().__getitem__(index)

    items = ["a" * (1 + number % 7) for number in range(500)]
    assert set(ItemLengths().sizes(Broken(items), batches_of(500, 8))) < set(range(63))


def test_random_states_are_those_of_before() -> None:
    class Random(Counted):
        def __getitem__(self, index: int) -> Any:
            return "a" * (1 + random.randrange(9) + int(np.random.randint(9)) + int(torch.randint(9, ())))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert ItemLengths().sizes(Random([]), batches_of(50, 5))
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, before) for now, before in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(
    ("item", "size"),
    [
        ({"input_ids": torch.ones(5), "pixels": torch.ones(900)}, 5),
        ({"path": "pictures/12.png", "image": torch.ones(3, 4)}, 12),
        (([1, 2, 3], "label"), 3),
        (("a text", 1), 6),
        ([[1, 2], [3, 4, 5]], 5),
        (7, 0),
        (np.ones((2, 5)), 10),
        (torch.tensor(1.0), 0),
    ],
)
def test_the_size_of_an_item(item: Any, size: int) -> None:
    assert size_of_item(item) == size


def test_rows_are_those_of_the_first_tensor_that_has_any() -> None:
    assert count_rows({"x": (torch.ones(()), [torch.ones(3, 2)]), "y": torch.ones(4)}) == 3
    assert count_rows({"names": ["a"]}) is None
    assert count_rows(torch.ones(())) is None
