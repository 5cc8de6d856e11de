"""What a marked loop costs, counted and not timed."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest

from features.cell_checkpoints.marked_programs import Notebook, Watched

ROUNDS = 100

LOOPS = {
    "for": ("for k in range(ROUNDS):\n    if k < 0: opt.step()\n", "__next__"),
    "while": ("k = 0\nwhile k < ROUNDS:\n    k += 1\n    if k < 0: opt.step()\n", "turn"),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_round_of_a_loop_without_a_step_is_one_call_of_ours(kind: str) -> None:
    cell, name = LOOPS[kind]
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "cell_checkpoints" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    notebook = Notebook(f"opt, ROUNDS = None, {ROUNDS}")
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        notebook.run_marked(cell, Watched())
    finally:
        sys.setprofile(before)
    assert calls[name] == ROUNDS + 1
    assert not [each for each, times in calls.items() if times > ROUNDS // 2 and each != name]


def test_a_loop_that_cannot_train_costs_nothing() -> None:
    notebook = Notebook("rows = [1, 2]")
    assert "__nbaccel_loops__" not in notebook.run_marked("for row in rows: print(row)", Watched()).parts[0].co_names
