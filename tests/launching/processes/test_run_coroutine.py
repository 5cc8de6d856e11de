"""One run in one thread: it is driven to its result, and closed whatever ends the wait."""

from __future__ import annotations

import selectors

import pytest

from nbaccel.launching.processes.run_coroutine import RunCoroutine, Wait, driven


def test_a_lone_run_is_driven_to_its_result_and_closed_when_its_wait_fails() -> None:
    closed: list[str] = []

    class Breaks(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            raise OSError("no more")

    def turns(selector: selectors.BaseSelector) -> RunCoroutine[int]:
        try:
            yield Wait(selector, 0.0)
            return 7
        finally:
            closed.append("closed")

    with selectors.DefaultSelector() as selector:
        assert driven(turns(selector)) == 7
    with Breaks() as broken, pytest.raises(OSError, match="no more"):
        driven(turns(broken))
    assert closed == ["closed"] * 2
