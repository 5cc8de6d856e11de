"""How many of our frames a rank stands on when a line of a cell runs in it: no more than today."""

from __future__ import annotations

from typing import Any

import pytest

CELL = """
import os, sys
import nbaccel
frame, found = sys._getframe(), []
while frame is not None:
    if frame.f_code.co_filename.startswith(os.path.dirname(nbaccel.__file__)):
        found.append(f"{frame.f_code.co_filename.rpartition('nbaccel/')[2]}:{frame.f_code.co_name}")
    frame = frame.f_back
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "most"), [("fork", 8), ("zygote", 10)])
def test_a_line_of_a_cell_stands_on_few_frames(notebook: Any, start: str, most: int) -> None:
    cell = notebook.run(f"%%accelerate -n 2 --start {start} --out found{CELL}")
    assert cell.error is None
    assert 0 < len(notebook.names["found"]) <= most, notebook.names["found"]


@pytest.mark.slow
def test_in_ranks_that_stay_it_stands_on_no_more(notebook: Any) -> None:
    notebook.run("%accelerate start -n 2")
    for _ in range(2):
        cell = notebook.run(f"%%accelerate --out found{CELL}")
        assert cell.error is None
        assert 0 < len(notebook.names["found"]) <= 8, notebook.names["found"]
    notebook.run("%accelerate stop")
