"""Modules that are imported between cells."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from nbaccel.notebook.idle_loading import IdleLoading


class Timers:
    """An event loop whose timers end when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def call_later(self, seconds: float, function: Callable[..., None], *args: Any) -> Any:
        assert seconds > 0
        callback = partial(function, *args)
        self._waiting.append(callback)
        waiting = self._waiting

        class Handle:
            def cancel(self) -> None:
                if callback in waiting:  # else it has ended
                    waiting.remove(callback)

        return Handle()

    def end(self) -> None:
        for callback in list(self._waiting):
            self._waiting.remove(callback)
            callback()


@pytest.fixture
def loads() -> list[str]:
    return []


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def idle(loads: list[str], timers: Timers, monkeypatch: pytest.MonkeyPatch) -> IdleLoading:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    return IdleLoading([lambda: loads.append("loaded")], lambda: timers)  # type: ignore[arg-type, return-value]


def test_modules_are_loaded_once_when_no_cell_follows(idle: IdleLoading, loads: list[str], timers: Timers) -> None:
    for _ in range(3):
        idle.before_cell()
        idle.after_cell()
        timers.end()
    assert loads == ["loaded"]


def test_nothing_is_loaded_while_cells_follow_each_other(idle: IdleLoading, loads: list[str], timers: Timers) -> None:
    idle.after_cell()
    idle.before_cell()
    timers.end()
    assert loads == []
    idle.after_cell()
    timers.end()
    assert loads == ["loaded"]


def test_nothing_is_loaded_before_torch_is_imported(
    idle: IdleLoading, loads: list[str], timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    idle.after_cell()
    timers.end()
    assert loads == []


def test_nothing_is_loaded_where_no_event_loop_runs(loads: list[str]) -> None:
    IdleLoading([lambda: loads.append("loaded")]).after_cell()
    assert loads == []


def test_a_cell_that_comes_meanwhile_waits_for_one_load_and_the_others_follow_it(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    loads: list[int] = []

    def fails() -> None:
        loads.append(1)
        raise ImportError("no matplotlib")

    idle = IdleLoading([fails, lambda: loads.append(2), lambda: loads.append(3)], lambda: timers)  # type: ignore[arg-type, return-value]
    idle.after_cell()
    timers.end()
    assert loads == [1], "the kernel reads what has arrived before the next"
    idle.before_cell()
    timers.end()
    assert loads == [1]
    idle.after_cell()
    for _ in range(4):
        timers.end()
    assert loads == [1, 2, 3]
