"""Cutting one batch: every sample in one part, parts that are as equal as can be, shares that add up."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nbaccel.errors import CannotCut
from nbaccel.train.oom.microbatch.slicing import BatchCut, BatchPart


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 40), st.integers(2, 9), st.integers(1, 40), st.booleans())
def test_every_sample_is_in_one_part_and_the_shares_add_up(rows: int, parts: int, size: int, is_level: bool) -> None:
    cut = BatchCut(parts, max(size, rows), is_level)
    pieces = cut.of(torch.arange(rows))
    counted = [piece for piece in pieces if not piece.is_repeated]
    assert torch.cat([piece.batch for piece in counted]).tolist() == list(range(rows))
    assert sum(piece.share for piece in pieces) == pytest.approx(1)
    sizes = [len(piece.batch) for piece in counted]
    assert max(sizes) <= (cut.part_size or rows)
    assert max(sizes) - min(sizes) <= 1
    assert [piece.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_short_batch_gives_fewer_parts_where_ranks_are_level() -> None:
    assert [len(part.batch) for part in BatchCut(2, 8).of(torch.arange(3))] == [3]
    assert [len(part.batch) for part in BatchCut(4, 8).of(torch.arange(3))] == [2, 1]


def test_where_ranks_are_not_level_every_batch_gives_as_many_parts() -> None:
    parts = BatchCut(3, None, is_level=False).of(torch.tensor([5, 6]))
    assert [part.batch.tolist() for part in parts] == [[5], [6], [6]]
    assert [part.share for part in parts] == [0.5, 0.5, 0]


@dataclass
class Sentences:
    ids: torch.Tensor
    texts: list[str]
    is_train: bool = True


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(4),
        (torch.arange(4), {"y": [torch.ones(4), "whole"]}),
        UserDict(ids=torch.arange(4), scale=torch.tensor(2.0)),
        Sentences(torch.arange(4), ["a", "b", "c", "d"]),
        ["a", "b", "c", "d"],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_parts_are_of_the_batchs_own_kind(batch: Any) -> None:
    first, second = BatchCut(2, 4).of(batch)
    assert type(first.batch) is type(second.batch) is type(batch)
    assert (first.start, first.stop, second.start, second.stop) == (0, 2, 2, 4)


def test_a_batch_that_cannot_be_cut_is_refused_with_the_reason() -> None:
    with pytest.raises(CannotCut, match="this one cannot be cut: the first dimensions of this batch disagree"):
        BatchCut(2).of((torch.ones(4), torch.ones(3)))


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.data())
def test_real_samples_of_a_round_that_was_filled_up_are_counted_once(
    rows: int, parts: int, ranks: int, data: st.DataObject
) -> None:
    real = data.draw(st.integers(1, rows * ranks))
    pieces = BatchCut(parts, rows).of(torch.arange(rows))
    assert sum(piece.real(real, ranks) for piece in pieces) == real


def test_a_whole_batch_weighs_whole() -> None:
    assert BatchPart(None).share == 1
