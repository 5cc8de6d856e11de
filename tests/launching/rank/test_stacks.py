"""A rank answers where it is, and takes nothing from its program for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from nbaccel.base.world import run_folder
from nbaccel.errors import RanksFailed
from nbaccel.launching.api import launch
from nbaccel.launching.ipc.user_code import ASK


def test_a_handler_that_the_notebook_has_for_the_signal_is_kept_in_its_ranks() -> None:
    heard: list[int] = []

    def sends_it_to_itself() -> list[int]:
        signal.raise_signal(ASK)
        return heard

    before = signal.signal(ASK, lambda number, frame: heard.append(number))
    try:
        assert launch(sends_it_to_itself, 1, start_method="fork").value == [ASK]
    finally:
        signal.signal(ASK, before)


def test_a_rank_has_two_threads_of_the_project_beside_its_program() -> None:
    """Each costs a stack, and pages of the kernel that are copied for it."""

    def threads() -> tuple[int, set[str]]:
        time.sleep(0.3)  # until they run: nobody waits for that
        known = {each.name for each in threading.enumerate() if each is not threading.main_thread()}
        return len(sys._current_frames()) - 1, known

    count, known = launch(threads, 1, start_method="fork").value
    assert known <= {"nbaccel-lost-threads"}  # only where the process of the tests has other threads
    assert count == 2 + len(known)


def test_the_death_watch_answers_every_question() -> None:
    def asks() -> list[int]:
        counts = []
        for number in (1, 2):
            with open(f"{run_folder()}/questions-0", "wb", buffering=0) as questions:
                questions.write(b"?")
            while (count := Path(run_folder(), "stacks-0").read_text().count("(most recent call first)")) < number:
                time.sleep(0.01)
            counts.append(count)
        return counts

    assert launch(asks, 1, start_method="fork", timeout_s=30).value == [1, 2]


@pytest.mark.slow
def test_where_no_fifo_can_be_made_the_signal_alone_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int) -> None:
        raise PermissionError("no FIFOs on this file system")

    monkeypatch.setattr(os, "mkfifo", refuse)
    with pytest.raises(RanksFailed) as caught:
        launch(time.sleep, 1, (1000,), hang_timeout_s=0.5, start_method="fork")
    assert "  rank 0: does not answer" not in str(caught.value)
