"""Programs of the tests on a card, on the host: what they do is right before a card says anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from environments import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "gpu" / "programs" / "one_line.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "most_off"),
    [
        ("scaled", 1e-6),
        pytest.param("made_inside", 1e-6, marks=pytest.mark.full),
        pytest.param("mixed", 1e-2, marks=pytest.mark.full),
        pytest.param("carried", 1e-6, marks=pytest.mark.full),
    ],
)
def test_loops_of_one_line_end_in_two_ranks_as_in_one_process(loop: str, most_off: float) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "cpu", loop], env=environ, capture_output=True, text=True, timeout=50, check=True
    )
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    assert told["off"] <= most_off, told
    if loop == "carried":
        assert (told["there"], told["here"], told["is_one"]) == ([["cpu"], ["cpu"]], ["cpu"], True)
        return
    assert told["apart"] == 0, told
    assert told["is_split"] == [True, True]
    assert loop != "scaled" or told["printed"][0][:3] == [2.0**16, 2.0**16, 2.0**15]
