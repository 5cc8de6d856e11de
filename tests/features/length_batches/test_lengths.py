"""Batches by length: nothing is lost, little is padding, shares take equally long, and results find their way back."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, strategies as st

from nbaccel import PartialState, batches_by_length
from nbaccel.features.length_batches.length_batches import LengthBatches
from nbaccel.testing import run_ranks
from nbaccel.utils import gather_object

_LENGTHS = st.lists(st.integers(0, 500), max_size=80)


def _skewed(count: int) -> list[int]:
    draw = random.Random(0)
    return [1 + int(draw.lognormvariate(3, 1)) for _ in range(count)]


def _work(batches: list[list[int]], lengths: list[int]) -> int:
    return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)


@given(_LENGTHS, st.integers(1, 9), st.none() | st.integers(1, 600))
def test_every_input_is_in_one_batch_and_its_result_comes_back_to_its_place(
    lengths: list[int], batch_size: int, max_tokens: int | None
) -> None:
    batches = batches_by_length(lengths, batch_size, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert batches.restore([[lengths[index] for index in batch] for batch in batches]) == lengths
    if max_tokens is not None:
        assert all(len(batch) == 1 or _work([batch], lengths) <= max_tokens for batch in batches)


@given(_LENGTHS, st.integers(1, 9))
def test_where_all_batches_are_full_no_order_of_the_inputs_is_padded_less(lengths: list[int], batch_size: int) -> None:
    del lengths[len(lengths) // batch_size * batch_size :]
    as_they_come = [list(range(len(lengths)))[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    batches = batches_by_length(lengths, batch_size)
    assert len(batches) == len(as_they_come)
    assert _work(batches, lengths) <= _work(as_they_come, lengths)
    assert batches.padding <= LengthBatches(as_they_come, lengths).padding + 1e-12


def test_a_limit_of_tokens_puts_more_short_inputs_into_a_batch() -> None:
    batches = batches_by_length([100, 10, 10, 10, 50, 50, 300], batch_size=8, max_tokens=100)
    assert sorted(map(sorted, batches)) == [[0], [1, 2, 3], [4, 5], [6]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_shares_of_ranks_take_equally_long(ranks: int) -> None:
    lengths = _skewed(4000)
    batches = batches_by_length(lengths, 8)
    assert _work([batches[0]], lengths) == max(_work([batch], lengths) for batch in batches)
    cuts = [len(batches) * rank // ranks for rank in range(ranks + 1)]
    work = [_work(batches[begin:end], lengths) for begin, end in itertools.pairwise(cuts)]
    assert max(work) <= 1.5 * min(work)  # a single batch of the longest is a fifth of an eighth


def test_results_that_do_not_fit_are_refused_with_their_numbers() -> None:
    batches = batches_by_length([3, 1, 2], 2)
    with pytest.raises(ValueError, match="one result for each of the 2 batches, in their order, and got 1; those of"):
        batches.restore([["a", "b"]])
    with pytest.raises(ValueError, match="batch 0 has 1 inputs, and its result 2 entries"):
        batches.restore([["a", "b"], ["c", "d"]])
    with pytest.raises(ValueError, match="batch_size and max_tokens must be at least 1, got 0 and None"):
        batches_by_length([1], 0)
    with pytest.raises(ValueError, match="at least 1, got 4 and 0"):
        batches_by_length([1], 4, 0)


def _doubled() -> tuple[list[int], int]:
    state = PartialState(cpu=True)
    lengths = _skewed(21)
    batches = batches_by_length(lengths, 4)
    with state.split_between_processes(batches) as mine:
        results = [torch.tensor([lengths[index] for index in batch]) * 2 for batch in mine]
    return [int(value) for value in batches.restore(gather_object(results))], len(results)


def test_two_ranks_share_the_batches_and_both_have_all_results_in_order() -> None:
    told = run_ranks(2, _doubled)
    assert [count for _, count in told] == [3, 3]
    assert [values for values, _ in told] == [[2 * length for length in _skewed(21)]] * 2
