"""An unmodified loop in two ranks on one card, or on two, is that of one process; and what lies on a card travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("loop", ["scaled", "made_inside"])
def test_a_loop_ends_with_the_weights_of_one_process(program: Callable[..., Any], loop: str) -> None:
    ended = program("one_line.py", "cuda", loop)
    alone, *ranks = ended["printed"]
    assert ended["off"] <= 1e-6, ended
    assert ended["apart"] == 0, ended
    assert ended["is_split"] == [True, True]
    assert all(printed == pytest.approx(alone, rel=1e-5) for printed in ranks), ended


def test_a_scaler_steps_back_in_both_ranks_where_one_overflows(program: Callable[..., Any]) -> None:
    scales = program("one_line.py", "cuda", "scaled")["printed"]
    assert scales[0] == scales[1] == scales[2]
    assert scales[0][2] == scales[0][1] / 2


def test_in_half_precision_ranks_are_equal_and_near_to_one_process(program: Callable[..., Any]) -> None:
    ended = program("one_line.py", "cuda", "mixed")
    assert ended["apart"] == 0, ended
    assert ended["off"] <= 1e-2, ended
    assert ended["printed"][1] == ended["printed"][2]


def test_what_the_notebook_has_on_its_card_arrives_on_the_ranks_own_and_comes_back(
    program: Callable[..., Any],
) -> None:
    came = program("one_line.py", "cuda", "carried")
    assert came["there"] == [[f"cuda:{rank}"] for rank in range(came["ranks"])]
    assert came["here"] == ["cuda:0"]
    assert came["is_one"], came
    assert came["off"] <= 1e-6, came
