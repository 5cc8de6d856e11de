"""Ranks that stay, started in a real kernel."""

from __future__ import annotations

import pytest

from fixtures.kernels import Kernels
from kernel.test_training import GOES_BACKWARD_ON_THE_CPU, HAS_A_DEVICE


def test_the_cell_after_which_no_fork_trains_is_named_at_a_start_too(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do(HAS_A_DEVICE)
    if not kernel.value("HAS"):
        pytest.skip("this torch has no devices that are written in Python")
    number = kernel.do(GOES_BACKWARD_ON_THE_CPU).number
    assert f"since cell [{number}]\n" in kernel.do("%accelerate start -n 2 --cpu").stdout
