"""Criteria 30 and 31 of recovery: what out of memory leaves on a card, and how its errors read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 2**20


def test_c30_twenty_times_out_of_memory_leave_nothing_on_the_card(program: Callable[..., Any]) -> None:
    left = program("memory.py", "cycles")
    assert max(left["allocated"]) <= MIB, left
    assert max(left["reserved"]) <= 64 * MIB, left
    assert left["allocated"][-1] == left["allocated"][0], left
    assert left["counted"] >= len(left["allocated"]), left
    assert left["works"]


def test_c31_errors_of_a_full_card_are_out_of_memory(program: Callable[..., Any]) -> None:
    errors = program("memory.py", "errors")
    assert errors, "a card filled to the brim refused nothing"
    assert all(error["retry"] for error in errors), errors
