"""G9: items that are answered on cards: memory, an item that breaks the device, a notebook that has used it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G9"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]

CASES = "broken", "short", "used"


def _tell(program: Callable[..., Any], case: str) -> dict[str, Any]:
    found: dict[str, Any] = program("maps.py", case, among=CASES)  # the last one uses the device itself
    assert found["count"] == 64
    assert found["off"] < 2e-2, found
    return found


@pytest.mark.takes(27)
def test_an_item_that_breaks_the_device_is_given_up_and_the_others_are_answered(program: Callable[..., Any]) -> None:
    failed = _tell(program, "broken")["failed"]
    assert list(failed) == ["13"]
    assert "the process ended 3 times" in failed["13"]


@pytest.mark.takes(0.5)
def test_calls_that_run_out_of_memory_are_halved(program: Callable[..., Any]) -> None:
    assert _tell(program, "short")["failed"] == {}


@pytest.mark.takes(0.5)
def test_a_notebook_that_has_used_the_device_maps_in_clean_processes(program: Callable[..., Any]) -> None:
    assert _tell(program, "used")["failed"] == {}
