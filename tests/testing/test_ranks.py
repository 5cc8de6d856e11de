"""`run_ranks`, the tool that the tests of training stand on."""

from __future__ import annotations

import gc
import multiprocessing.context
import os
import time
import weakref
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from nbaccel import RankDied, RanksFailed, World
from nbaccel.testing import run_ranks


def test_values_come_back_in_the_order_of_ranks() -> None:
    def last_first() -> int:
        rank = World.from_env().rank
        time.sleep(0.1 * (2 - rank))
        return rank

    assert run_ranks(3, last_first) == [0, 1, 2]


def test_an_exception_names_the_rank_and_its_text() -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("of rank one")
        time.sleep(30)

    with pytest.raises(RanksFailed, match=r"rank 1 of 2 failed:[^!]*KeyError: 'of rank one'") as caught:
        run_ranks(2, fail)
    assert (caught.value.rank, caught.value.world_size) == (1, 2)


def test_a_rank_that_dies_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankDied, match="rank 0 of 1 ended without a value, exit code 3"):
        run_ranks(1, os._exit, 3)


def test_a_rank_that_is_not_done_in_time_is_killed_and_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 were not done after 0.5 s"):
        run_ranks(2, lambda: time.sleep(30) if os.environ["RANK"] == "0" else None, timeout_s=0.5)


def test_a_collection_in_a_rank_leaves_out_what_the_tests_hold() -> None:
    """The heap of thousands of tests takes a second each time, and is copied: `free_memory` collects twice."""

    class Ring:
        def __init__(self) -> None:
            self.ring = self

    def collected() -> tuple[int, int, bool]:
        own = weakref.ref(Ring())
        gc.collect()
        return len(gc.get_objects()), gc.get_freeze_count(), own() is None

    held = [[] for _ in range(100_000)]
    for tracked, frozen, is_collected in run_ranks(2, collected):
        assert tracked < len(held)
        assert frozen > len(held)
        assert is_collected


def test_a_value_that_cannot_be_pickled_is_an_error_of_that_rank() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(1, lambda: lambda: None)


@pytest.mark.slow
def test_a_loader_in_a_rank_forks_its_workers_where_python_would_use_a_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from Python 3.14 on, where a worker could not import a class that the test defines."""
    context: Any = multiprocessing.context
    monkeypatch.setattr(context._default_context, "_default_context", context._concrete_contexts["forkserver"])
    monkeypatch.setattr(context._default_context, "_actual_context", None)

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    def total() -> int:
        return sum(int(batch.sum()) for batch in DataLoader(Numbers(), 2, num_workers=1))

    assert run_ranks(2, total) == [6, 6]
