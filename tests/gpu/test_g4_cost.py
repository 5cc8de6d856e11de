"""G4: what the planner takes on a T4's memory, what the exchange of gradients costs, and how a group ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G4"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.takes(20)
def test_the_planner_lands_within_three_percent_in_eight_trials(program: Callable[..., Any]) -> None:
    found = program("cost.py", "planner")
    assert len(found["tried"]) <= 8, found
    assert found["failed"] <= 2, found
    assert found["size"] in found["tried"]
    assert found["fits"], found
    assert not found["more_fits"], found


@pytest.mark.takes(25)
def test_our_buckets_cost_two_percent_over_plain_ddp_at_most_and_wait_once(program: Callable[..., Any]) -> None:
    found = program("cost.py", "buckets")
    assert found["off"] <= 2e-2, found
    assert found["waits"]["buckets"] <= found["waits"]["plain DDP"] + 1, found
    assert found["ratio"] <= 1.02, found


@pytest.mark.takes(7)
def test_a_group_is_formed_again_after_an_abort_and_after_a_leave(program: Callable[..., Any]) -> None:
    found = program("cost.py", "group")
    assert found["totals"] == [1000, 1000, 1000]
    assert max(found["took"].values()) < 20, found
