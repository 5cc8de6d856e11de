"""G3: what out of memory leaves on a card, and how its errors read when the card is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G3"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]

MIB = 2**20
ALLOCATORS = {"segments": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


@pytest.mark.takes(16)
def test_twenty_times_out_of_memory_leave_nothing_on_the_card(program: Callable[..., Any]) -> None:
    left = program("memory.py", "cycles")
    assert max(left["allocated"]) <= MIB, left
    assert max(left["reserved"]) <= 64 * MIB, left
    assert left["allocated"][-1] == left["allocated"][0], left
    assert left["counted"] >= len(left["allocated"]), left
    assert left["works"]


@pytest.mark.takes(22)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_errors_of_a_full_card_are_out_of_memory(program: Callable[..., Any], allocator: str) -> None:
    found = program("memory.py", "errors", **ALLOCATORS[allocator])
    refused = {error["need"] for error in found["refused"]}
    assert len(refused) >= 2, f"no library was refused anything: {found}"
    wrong = [error for error in found["refused"] if not error["is_retry"]]
    assert not wrong, wrong
    never = [need for need, at in found["worked"].items() if at is None and not need.startswith("a block")]
    assert not never, f"these did not work with 512 MiB either: {never}"
    assert found["after"] == 4.0


@pytest.mark.takes(25)
def test_a_function_compiled_on_a_full_card_is_out_of_memory_or_runs(program: Callable[..., Any]) -> None:
    pytest.importorskip("triton")
    found = program("memory.py", "compiled", TORCHINDUCTOR_COMPILE_THREADS="1")
    assert all(error["is_retry"] for error in found["refused"]), found
    assert found["after"]


@pytest.mark.takes(10)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_step_recovers_under_either_allocator_or_asks_for_a_restart(
    program: Callable[..., Any], allocator: str
) -> None:
    found = program("memory.py", "segments", **ALLOCATORS[allocator])
    if "restart" in found:
        assert found["restart"], found
        assert allocator == "expandable", found
        return
    assert found["failed"], "the batch fitted"
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-4)
