"""Threads of a library that a fork would lack count if the cell leads to the library, and only then."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.namespace import thread_pools
from nbaccel.namespace.thread_pools import threads_a_fork_lacks

SENTENCE = "pooled has threads in the notebook, which a fork lacks"


class _Frame:
    """A table of the library."""


_Frame.__module__ = "pooled.frame"


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A library that is loaded, with a thread of its own."""
    module = types.ModuleType("pooled")
    monkeypatch.setitem(sys.modules, "pooled", module)
    monkeypatch.setattr(thread_pools, "_BY_NAME", {"pooled": ("pooled-",)})
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, name="pooled-0")
    thread.start()
    yield module
    is_over.set()
    thread.join()


LEAD: dict[str, Callable[[], Any]] = {
    "a table": _Frame,
    "the module": lambda: sys.modules["pooled"],
    "a loader over a data set with a table": lambda: torch.utils.data.DataLoader(_Rows({"a": _Frame()})),
    "a function with a table": lambda: (lambda frame: lambda: frame)(_Frame()),
}


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("value", LEAD)
def test_a_value_that_leads_to_the_library_has_the_ranks_started_otherwise(value: str) -> None:
    assert threads_a_fork_lacks(lambda: {"value": LEAD[value]()}) == SENTENCE


@pytest.mark.usefixtures("_library")
def test_a_cell_that_does_not_lead_to_the_library_forks() -> None:
    layer = torch.nn.Linear(2, 2)
    values = {"torch": torch, "layer": layer, "sgd": torch.optim.SGD(layer.parameters(), 0.1), "path": Path()}
    assert threads_a_fork_lacks(lambda: values) is None


def test_values_are_not_even_asked_for_without_such_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pools, "_BY_NAME", {"torch": ("no such thread-",)})
    assert threads_a_fork_lacks(lambda: pytest.fail("the values were asked for")) is None
