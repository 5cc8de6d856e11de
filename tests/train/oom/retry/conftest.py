"""Searches collect garbage several times, and this process holds torch: what is there already need not be looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collects_little() -> Iterator[None]:
    """As launchers do before they fork."""
    gc.freeze()
    yield
    gc.unfreeze()
