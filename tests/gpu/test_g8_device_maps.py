"""G8: models larger than a card: what waits elsewhere is copied beside the computation, and the numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G8"

CASES = ("host", "disk", "memory", "cards", "trained")  # the last one is of test_g8_quantised.py

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.takes(12)
def test_blocks_on_the_host_compute_what_the_model_on_the_card_does(program: Callable[..., Any]) -> None:
    found = program("device_maps.py", "host", among=CASES)
    assert found["off"] == [0.0] * len(found["off"]), found
    assert found["device"] == "cpu"


@pytest.mark.takes(0.5)
def test_blocks_on_the_disk_compute_what_the_model_on_the_card_does(program: Callable[..., Any]) -> None:
    found = program("device_maps.py", "disk", among=CASES)
    assert found["off"] == [0.0] * len(found["off"]), found


@pytest.mark.takes(0.5)
def test_two_blocks_are_on_the_card_at_most(program: Callable[..., Any]) -> None:
    assert program("device_maps.py", "memory", among=CASES)["blocks"] <= 2.4


@pytest.mark.takes(0.5)
def test_one_model_is_on_two_cards(program: Callable[..., Any]) -> None:
    found = program("device_maps.py", "cards", among=CASES)
    if found["cards"] < 2:
        pytest.skip("needs two cards")
    assert found["off"] == [0.0] * len(found["off"]), found
    assert found["graded"]


@pytest.mark.takes(4)
def test_two_ranks_have_two_cards_each(program: Callable[..., Any]) -> None:
    found = program("device_maps.py", "pairs")  # alone: a process that has used a card starts no forks
    if found["cards"] < 4:
        pytest.skip("needs four cards")
    assert max(found["off"]) <= 1e-6, found
