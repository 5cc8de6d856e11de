"""A logger that knows its rank."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from nbaccel.logging import MultiProcessAdapter, get_logger
from nbaccel.testing import run_ranks


def _lines(folder: Path, speak: Any) -> list[str]:
    """What `speak` logs in this rank and its peers, into one file, as "line: text"."""
    handler = logging.FileHandler(folder / "log.txt")
    handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s: %(message)s"))
    logging.getLogger("program").addHandler(handler)
    speak()
    return []


def test_the_main_process_speaks_for_all(tmp_path: Path) -> None:
    def speak() -> None:
        get_logger("program").warning("trains %d", 3)

    run_ranks(2, _lines, tmp_path, speak)
    assert (tmp_path / "log.txt").read_text() == "WARNING speak: trains 3\n"


def test_every_rank_speaks_when_asked_and_says_who_it_is(tmp_path: Path) -> None:
    def speak() -> None:
        get_logger("program").error("ready", main_process_only=False)

    run_ranks(2, _lines, tmp_path, speak)
    assert sorted((tmp_path / "log.txt").read_text().splitlines()) == [
        "ERROR speak: [rank 0] ready",
        "ERROR speak: [rank 1] ready",
    ]


def test_ranks_speak_in_order_also_when_the_first_is_slow(tmp_path: Path) -> None:
    def speak() -> None:
        from nbaccel import PartialState

        if PartialState().is_main_process:
            time.sleep(0.05)
        for text in ("first", "second"):
            get_logger("program").warning(text, in_order=True)

    run_ranks(3, _lines, tmp_path, speak)
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        f"WARNING speak: [rank {rank}] {text}" for text in ("first", "second") for rank in range(3)
    ]


def test_in_order_does_not_hang_where_levels_differ(tmp_path: Path) -> None:
    def speak() -> None:
        from nbaccel import PartialState

        state = PartialState()
        get_logger("program", "ERROR" if state.is_main_process else "INFO").info("here", in_order=True)

    run_ranks(2, _lines, tmp_path, speak)
    assert (tmp_path / "log.txt").read_text() == "INFO speak: [rank 1] here\n"


def test_it_works_before_any_state_and_names_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("program", log_level="info")
    assert isinstance(logger, MultiProcessAdapter)
    logger.info("alone")
    logger.info("alone in order", in_order=True)
    logger.debug("below the level")
    assert [(record.message, record.funcName) for record in caplog.records] == [
        ("alone", "test_it_works_before_any_state_and_names_the_callers_line"),
        ("alone in order", "test_it_works_before_any_state_and_names_the_callers_line"),
    ]


def test_a_warning_once_is_one_warning_per_text(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("program")
    for _ in range(3):
        logger.warning_once("slow: %d s", 3)
        logger.warning_once("slow: %d s", 4)
    assert [record.message for record in caplog.records] == ["slow: 3 s", "slow: 4 s"]
    assert {record.funcName for record in caplog.records} == {"test_a_warning_once_is_one_warning_per_text"}


def test_extra_fields_reach_the_handlers(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("program").warning("x", extra={"epoch": 3})
    assert caplog.records[0].__dict__["epoch"] == 3


def test_a_level_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("program.chosen").logger.level == logging.DEBUG
    assert get_logger("program.said", "error").logger.level == logging.ERROR
