"""G10: checks and trials of cells in a real kernel: memory, times of the device, gradients, what makes it faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from environments import REPOSITORY
from gpu import checks
from gpu.conftest import PROGRAMS
from kernel.harness import RealKernel

GROUP = "G10"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

ROUNDED = 0.05
"""Sizes in a report have a digit after the point."""


@pytest.mark.takes(11)
@pytest.mark.parametrize("start", checks.STARTS)
def test_a_check_measures_the_device_and_touches_nothing(
    kernel: RealKernel, start: str, tell: Callable[..., None]
) -> None:
    found = checks.checked(kernel, start, "cuda", tell=tell)
    assert "red: " not in found["report"], found["report"]
    assert "ok: the cell comes to its end" in found["report"], found["report"]
    assert found["after"] == found["before"]
    assert found["before"][0] == (start == "zygote"), "the notebook has used CUDA, or not"
    assert found["files"] == []
    assert found["memory"] is not None, found["report"]
    low, high, whole = found["memory"]
    assert low * (1 - ROUNDED) <= found["peak"] <= high * (1 + ROUNDED), found
    assert found["peak"] < whole
    parts = found["parts"]
    assert parts.get("host to device", 0) >= 1, found["report"]
    assert parts["backward"] >= parts["forward"] > 0, found["report"]
    assert parts["forward"] + parts["backward"] >= 30, found["report"]
    assert parts.get("your own code", 0) <= 20, f"nothing is waited for in it\n{found['report']}"


@pytest.mark.takes(6)
def test_out_of_memory_at_the_longest_batch_only_is_said(kernel: RealKernel, tell: Callable[..., None]) -> None:
    found = checks.short(kernel, "cuda", tell=tell)
    (red,) = found["red"]
    assert "out of memory at the longest batch (size " in red, found["report"]
    assert red.startswith("red: line 7"), red
    assert "CUDA out of memory" in red, red


@pytest.mark.takes(25)
def test_gradients_are_compared_on_the_card(kernel: RealKernel, two_ranks: str, tell: Callable[..., None]) -> None:
    kernel.do(f"import sys; sys.path[:0] = [{str(PROGRAMS)!r}, {str(REPOSITORY)!r}]")
    found = checks.compared(kernel, "cuda", tell=tell)
    assert any(line.startswith("ok: gradients of 2 ranks are those of one process") for line in found["lines"]), found
    assert "red: " not in found["report"], found["report"]


@pytest.mark.takes(42)
def test_what_belongs_to_cards_is_tried_or_says_why_not(kernel: RealKernel, tell: Callable[..., None]) -> None:
    found = checks.tried(kernel, "cuda", "40s", tell=tell)
    assert "samples/s" in found["the cell as it is"][0], found
    for wanted in ("-p ", "pin_memory=True", "fused=True", "channels_last"):
        rows = [columns for name, columns in found.items() if name.startswith(wanted)]
        assert rows, (wanted, found)
        assert "samples/s" in rows[0][0] or rows[0][0], (wanted, found)
    measured = [name for name, columns in found.items() if "samples/s" in columns[0]]
    assert len(measured) >= 3, found
