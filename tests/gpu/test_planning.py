"""Criterion 6 of recovery: the planner on real models, in fp16, on a T4's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
def test_c06_a_real_model_takes_seven_trials_and_a_third_of_accelerates_time(
    program: Callable[..., Any], model: str
) -> None:
    found = program("planning.py", model)
    assert len(found["tried"]) <= 7, found
    assert found["failed"] <= 2, found
    assert found["size"] in found["tried"]
    assert found["fits"], found
    assert not found["more_fits"], found
    assert found["took_s"] <= found["their_s"] / 3, found
