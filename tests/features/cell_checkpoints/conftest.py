"""Cells of these tests look for functions among objects of the test alone: a test process has millions of others."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nbaccel.features.cell_checkpoints import marked_cell
from nbaccel.features.source import users_functions


@pytest.fixture(autouse=True)
def few_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out of what is listed all that was there before."""
    for module in (users_functions, marked_cell):
        monkeypatch.setattr(module, "objects_of_process", gc.get_objects)
    gc.freeze()
    yield
    gc.unfreeze()
