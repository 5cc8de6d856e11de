"""A rank answers where it is, and takes nothing from its program for it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from nbaccel.errors import RanksFailed
from nbaccel.launching.api import launch
from nbaccel.launching.ipc.user_code import ASK


def test_a_handler_that_the_notebook_has_for_the_signal_is_kept_in_its_ranks() -> None:
    heard: list[int] = []

    def sends_it_to_itself() -> tuple[list[int], bool]:
        signal.raise_signal(ASK)
        return heard, "nbaccel-stacks" in [thread.name for thread in threading.enumerate()]

    before = signal.signal(ASK, lambda number, frame: heard.append(number))
    try:
        assert launch(sends_it_to_itself, 1, start_method="fork").value == ([ASK], True)
    finally:
        signal.signal(ASK, before)


@pytest.mark.slow
def test_where_no_fifo_can_be_made_the_signal_alone_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int) -> None:
        raise PermissionError("no FIFOs on this file system")

    monkeypatch.setattr(os, "mkfifo", refuse)
    with pytest.raises(RanksFailed) as caught:
        launch(time.sleep, 1, (1000,), hang_timeout_s=0.5, start_method="fork")
    assert "  rank 0: does not answer" not in str(caught.value)
