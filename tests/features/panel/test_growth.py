"""What the kernel does and keeps for a run does not grow with the steps of the run: by counts and bytes, not times.

`make bench ROWS=history` has the times, up to a million steps and 16 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from features.panel.longruns import STRETCH, LongRun, bytes_of

EARLY, LATE = 16_000, 64_000
"""By the first of them the curves have taken all their room; of rows, 10 steps apart, 12,000 would be kept."""

RANKS = 4


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python and C functions in `work`."""
    calls = 0

    def see(frame: FrameType, event: str, called: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.full
@pytest.mark.slow
def test_neither_records_nor_frames_nor_the_history_cost_more_in_a_long_run() -> None:
    reading, drawing, frames, kept, rows = [], [], [], [], []
    with LongRun.of(RANKS) as run:
        for steps in (EARLY, LATE):
            run.go_on(steps - STRETCH)
            records = run.report()
            reading.append(calls_of(run.read) / records)
            drawing.append(calls_of(run.frame))
            frames.append(run.frame())
            kept.append(bytes_of(run.history))
            rows.append(len(run.history.rows))
    assert reading[1] <= 1.1 * reading[0]
    assert drawing[1] <= 1.1 * drawing[0]
    assert frames[1] <= 1.1 * frames[0] <= 16_000
    assert rows == [EARLY / 10, LATE / 10]
    assert kept[1] - kept[0] < 300 * (rows[1] - rows[0])  # what is kept of steps is rows alone


def test_the_bytes_of_a_thing_are_those_of_all_it_refers_to_each_once() -> None:
    text = "x" * 1000
    assert bytes_of([text, text]) == sys.getsizeof(["", ""]) + sys.getsizeof(text)
    assert bytes_of(LongRun) == 0
