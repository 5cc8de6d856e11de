"""G5: two ranks on one card, by gloo; and an unmodified loop in two ranks is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G5"

RANKS = ("step", "function", "plain")
LOOPS = ("scaled", "made_inside", "mixed")

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.takes(20)
def test_two_ranks_stay_equal_when_one_runs_out_of_memory_in_a_step(program: Callable[..., Any]) -> None:
    roomy, tight = program("ranks.py", "step", among=RANKS)
    assert roomy["weights"] == tight["weights"]
    assert tight["failed"], "the second rank had enough memory"
    assert not roomy["failed"], roomy


@pytest.mark.takes(0.5)
def test_two_ranks_begin_anew_together_when_one_runs_out_of_memory(program: Callable[..., Any]) -> None:
    roomy, tight = program("ranks.py", "function", among=RANKS)
    assert roomy == tight
    assert len(tight["tried"]) > 1, "the second rank had enough memory"
    assert tight["sum"] == 2


@pytest.mark.takes(0.5)
def test_plain_ddp_on_one_card_is_one_process(program: Callable[..., Any]) -> None:
    ranks = program("ranks.py", "plain", among=RANKS)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert max(rank["off"] for rank in ranks) <= 1e-5, ranks


@pytest.mark.takes(13)
@pytest.mark.parametrize("loop", ["scaled", "made_inside"])
def test_a_loop_ends_with_the_weights_of_one_process(program: Callable[..., Any], loop: str) -> None:
    ended = program("one_line.py", loop, among=LOOPS)
    alone, *ranks = ended["printed"]
    assert ended["off"] <= 1e-6, ended
    assert ended["apart"] == 0, ended
    assert ended["is_split"] == [True, True]
    assert all(printed == pytest.approx(alone, rel=1e-5) for printed in ranks), ended
    if loop == "scaled":  # a scaler steps back in both ranks where one overflows
        assert alone[2] == alone[1] / 2, ended


@pytest.mark.takes(0.5)
def test_in_half_precision_ranks_are_equal_and_near_to_one_process(program: Callable[..., Any]) -> None:
    ended = program("one_line.py", "mixed", among=LOOPS)
    assert ended["apart"] == 0, ended
    assert ended["off"] <= 1e-2, ended
    assert ended["printed"][1] == ended["printed"][2]


@pytest.mark.takes(12)
def test_what_the_notebook_has_on_its_card_arrives_on_the_ranks_own_and_comes_back(
    program: Callable[..., Any],
) -> None:
    came = program("one_line.py", "carried")
    assert came["there"] == [[f"cuda:{rank}"] for rank in range(came["ranks"])]
    assert came["here"] == ["cuda:0"]
    assert came["is_one"], came
    assert came["off"] <= 1e-6, came
