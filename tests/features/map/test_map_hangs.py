"""`hang_timeout_s` of `nbaccel.map`: a call that does not return costs its item alone; under fork and zygote."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

import nbaccel
from features.map.test_map import start_by
from nbaccel.errors import LaunchRefused, RankDied
from nbaccel.launching.launcher import Launcher

LIMIT_S = 0.5


def search(text: str) -> bool:
    """Return after some days, and hold Python's lock until then."""
    return re.fullmatch(r"(a|a)*b", text) is not None


class Hangs:
    """Returns items; searches for ever at some of them."""

    def __init__(self, *items: int) -> None:
        self.items = set(items)

    def __call__(self, items: list[int]) -> list[int]:
        if self.items & set(items):
            search("a" * 64)
        return items


def sleeps(items: list[int]) -> list[int]:
    if 7 in items:
        time.sleep(600)
    return items


@pytest.mark.slow
def test_an_item_that_hangs_is_given_up_and_the_others_are_answered(
    start_method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_by(monkeypatch, start_method)
    out = tmp_path / "a.jsonl"
    answers = nbaccel.map(Hangs(7), range(40), out=out, num_processes=2, cpu=True, batch_size=4, hang_timeout_s=LIMIT_S)
    assert [failed.index for failed in answers.failed] == [7]
    assert answers[7].error.startswith("TimeoutError: took longer than hang_timeout_s=0.5, 3 times, in search, line ")
    assert [answer for number, answer in enumerate(answers) if number != 7] == [n for n in range(40) if n != 7]
    said = capsys.readouterr().err
    assert "a call with 4 items took longer than hang_timeout_s=0.5, in search, line " in said
    assert "ended with exit code 1; started again" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.manifest.json"]


@pytest.mark.slow
def test_the_line_where_it_hangs_is_named(launcher: Launcher) -> None:
    answers = nbaccel.map(sleeps, range(10), cpu=True, tries=1, hang_timeout_s=LIMIT_S)
    assert "1 time, in sleeps, line " in answers[7].error
    assert answers[7].error.endswith("of test_map_hangs.py")


@pytest.mark.slow
def test_several_items_in_a_row_at_the_end_end_no_rank_for_good(launcher: Launcher) -> None:
    answers = nbaccel.map(
        Hangs(37, 38, 39), range(40), cpu=True, num_processes=1, batch_size=4, tries=2, hang_timeout_s=LIMIT_S
    )
    assert [failed.index for failed in answers.failed] == [37, 38, 39]


@pytest.mark.slow
def test_where_each_item_hangs_the_map_ends(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(RankDied, match="started again 3 times, and finished no item in between"):
        nbaccel.map(Hangs(*range(40)), range(40), cpu=True, hang_timeout_s=LIMIT_S, out=tmp_path / "a.jsonl")


@pytest.mark.slow
def test_calls_that_take_less_are_let_alone(tmp_path: Path, launcher: Launcher) -> None:
    pids = nbaccel.map(lambda items: time.sleep(0.2) or [os.getpid()] * len(items), range(8), cpu=True,
                       batch_size=1, hang_timeout_s=0.6)  # fmt: skip
    assert len(set(pids)) == 1


def test_an_item_that_kills_is_given_up_after_three_deaths_however_many_tries(launcher: Launcher) -> None:
    def kills(items: list[int]) -> list[int]:
        if 7 in items:
            os._exit(9)
        return items

    answers = nbaccel.map(kills, range(8), cpu=True, num_processes=1, tries=9)
    assert answers[7].error == "RankDied: the process ended 3 times while it worked on this item"


@pytest.mark.parametrize("limit", [0, -1.0, "soon"])
def test_a_limit_that_is_no_time_is_refused(limit: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="time"):
        nbaccel.map(sleeps, range(3), cpu=True, hang_timeout_s=limit, out=tmp_path / "a.jsonl", overwrite=True)
    assert (tmp_path / "a.jsonl").exists()


def test_in_this_process_nothing_can_end_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    start_by(monkeypatch, "inline")
    with pytest.raises(LaunchRefused, match=r"hang_timeout_s can stop ranks only.*leave hang_timeout_s out"):
        nbaccel.map(sleeps, range(3), cpu=True, num_processes=1, hang_timeout_s=5)
