"""Ranks decide alike: by rank 0, and by whoever was first where rank 0 does not come."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from nbaccel.features.check.dry_run.decisions import SharedDecisions


def never() -> Any:
    raise AssertionError("only rank 0 decides")


def test_others_take_what_rank_0_has_decided(tmp_path: Path) -> None:
    assert SharedDecisions(tmp_path, 0, 2).take("more", lambda: [1, 2], []) == [1, 2]
    assert SharedDecisions(tmp_path, 1, 2).take("more", never, []) == [1, 2]


def test_others_wait_for_rank_0(tmp_path: Path) -> None:
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(SharedDecisions(tmp_path, 1, 2).take("a", never, 0)))
    waiting.start()
    SharedDecisions(tmp_path, 0, 2).take("a", lambda: 7, 0)
    waiting.join()
    assert found == [7]


def test_a_rank_0_that_comes_late_takes_the_default_that_another_rank_has_taken(tmp_path: Path) -> None:
    assert SharedDecisions(tmp_path, 1, 3, patience_s=0).take("more", never, 0) == 0
    assert SharedDecisions(tmp_path, 0, 3).take("more", lambda: 20, 0) == 0
    assert SharedDecisions(tmp_path, 2, 3, patience_s=0).take("more", never, 5) == 0


def test_a_second_run_takes_what_the_first_one_has_decided(tmp_path: Path) -> None:
    assert SharedDecisions(tmp_path, 1, 1).take("more", lambda: 3, 0) == 3
    assert SharedDecisions(tmp_path, 1, 1).take("more", never, 0) == 3
    assert SharedDecisions(tmp_path, 0, 1).take("more", lambda: 4, 0) == 4, "ranks that are independent"
    assert SharedDecisions(tmp_path, 0, 2).take("more", lambda: 5, 0) == 5
    assert SharedDecisions(tmp_path, 0, 2).take("more", never, 0) == 5


def test_nothing_is_left_beside_the_decision(tmp_path: Path) -> None:
    for rank in (0, 1):
        SharedDecisions(tmp_path, rank, 2, patience_s=0).take("more", lambda: 1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["more.json"]
