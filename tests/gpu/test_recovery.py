"""Criteria 7, 19 and 32 of recovery, on a card: two ranks, the cost without a failure, expandable segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


def test_c19_forward_backward_costs_two_percent_at_most(program: Callable[..., Any]) -> None:
    taken = program("recovery.py", "overhead")
    assert taken["ratio"] <= 1.02, taken


def test_c07_two_ranks_on_one_card_stay_equal_when_one_runs_out_of_memory(program: Callable[..., Any]) -> None:
    seen = program("recovery.py", "ranks", ranks=2)
    (weights, weights_there) = (losses[-1] for losses in seen["losses"])
    assert weights == weights_there
    assert seen["failed"][1], "the second rank had enough memory"
    assert not seen["failed"][0], seen


def test_c32_expandable_segments_recover_or_ask_for_a_restart(program: Callable[..., Any]) -> None:
    seen = program("recovery.py", "segments", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    if "restart" in seen:
        assert seen["restart"], seen
        return
    assert seen["failed"], "the batch fitted"
    assert seen["losses"] == pytest.approx(seen["expected"], rel=1e-9)
