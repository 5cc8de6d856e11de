"""What the tests of this folder need before the first of them, and what they must not leave to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401  # sets a variable of the environment, which the guard of every test would report


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Ranks are forked from this process, and accelerate keeps one state per process: they would all be rank 0 of 1."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
