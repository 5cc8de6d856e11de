"""`nbaccel.map` in real notebooks: its panel and last line, Stop, a killed kernel, a second notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kernel.conftest import Kernels
from kernel.harness import Cell, RealKernel

START = """
from dataclasses import replace
from nbaccel.notebook.jobs import map_items
_planned = map_items.planned
map_items.planned = lambda options, *rest: _planned(replace(options, start={start!r}), *rest)
"""

DEFINES = """
import time
import nbaccel

class Model:
    def __init__(self, accelerator):
        self.device = accelerator.device

    def answer(self, items):
        time.sleep({seconds} * len(items))
        return [f"{{item}} on {{self.device}}" for item in items]

def answer(model, items):
    return model.answer(items)
"""

MAPS = """
answers = nbaccel.map(answer, range({count}), setup=Model, out={out!r}, num_processes=2, cpu=True, batch_size=10)
"""


def has_begun(cell: Cell) -> bool:
    """Tell whether the panel shows that some items are done."""
    return bool(cell.frames) and re.search(r"\b[1-9][\d,]* of ", cell.frames[-1]["text/plain"]) is not None


def check(out: Path, count: int) -> None:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"index": item, "answer": f"{item} on cpu"} for item in range(count)]


def test_a_notebook_sees_the_items_of_each_rank_and_one_last_line(
    kernel: RealKernel, start: str, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(START.format(start=start) + DEFINES.format(seconds=0.005))
    cell = kernel.do(MAPS.format(count=1200, out=str(out)))
    assert cell.stdout.startswith("1,200 items in ")
    assert len(cell.stdout.splitlines()) == 1
    kernel.do("map_items.planned = _planned")
    running, kept = cell.frames[0], cell.panel
    assert "of 1,200 items" in running["text/plain"]
    assert "items/s" in running["text/plain"]
    assert '<th scope="col">failed</th>' in running["text/html"]
    assert kept["text/plain"].startswith("map(answer, 1,200 items): 1,200 items in ")
    assert "rank 0: " in kept["text/plain"]
    assert kernel.value("[len(answers), answers[1199]]") == [1200, "1199 on cpu"]
    check(out, 1200)
    again = kernel.do(MAPS.format(count=1200, out=str(out)))
    assert "already: no rank was started" in again.stdout


@pytest.mark.slow
def test_stop_keeps_what_is_done_and_the_same_cell_goes_on(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(DEFINES.format(seconds="PACE[0]") + "PACE = [0.005] * 200  # so long a list is data\nslow = Model.answer")
    execution = kernel.begin(MAPS.format(count=3000, out=str(out)))
    execution.until(has_begun)
    kernel.interrupt()
    error = execution.end(timeout_s=30).failed("KeyboardInterrupt")
    assert "are in answers.jsonl.parts; the same line goes on" in error.text
    kernel.do("Model.answer = lambda self, items: [f'{item} on {self.device}' for item in items]")
    error = kernel.run(MAPS.format(count=3000, out=str(out))).failed("CannotContinue")
    assert "answers.jsonl.parts has answers of other code: Model.answer() has changed" in error.text
    kernel.do("Model.answer = slow; PACE[0] = 0")
    cell = kernel.do(MAPS.format(count=3000, out=str(out)))
    assert " of them before" in cell.stdout
    check(out, 3000)


@pytest.mark.full
def test_a_second_kernel_goes_on_where_the_first_was_killed(new_kernel: Kernels, start: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first = new_kernel()
    first.do(START.format(start=start) + DEFINES.format(seconds=0.005))
    execution = first.begin(MAPS.format(count=2000, out=str(out)))
    execution.until(has_begun)
    first.kill()
    assert first.survivors(within_s=5.0) == {}
    assert not out.exists()
    second = new_kernel()
    second.do(DEFINES.format(seconds=0.005))
    cell = second.do(MAPS.format(count=2000, out=str(out)))
    assert " of them before" in cell.stdout
    check(out, 2000)
    assert sorted(path.name for path in tmp_path.glob("answers*")) == ["answers.jsonl", "answers.jsonl.manifest.json"]


@pytest.mark.full
def test_a_second_notebook_with_the_same_call_joins_in(new_kernel: Kernels, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    kernels = [new_kernel(), new_kernel()]
    for each in kernels:
        each.do(DEFINES.format(seconds=0.005) + "import torch, torch._dynamo")
    runs: list[Any] = [each.begin(MAPS.format(count=3000, out=str(out))) for each in kernels]
    cells = [run.end(timeout_s=60).succeeded() for run in runs]
    assert all(cell.stdout.startswith("3,000 items in ") for cell in cells)
    check(out, 3000)


def test_a_killed_rank_is_one_line_and_one_mark(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(DEFINES.format(seconds=0.005))
    kernel.do(
        """
        import os, signal, pathlib
        def kills(model, items):
            if 0 in items and not pathlib.Path(DIED).exists():
                pathlib.Path(DIED).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return model.answer(items)
        """.replace("DIED", repr(str(tmp_path / "died")))
    )
    cell = kernel.do(MAPS.format(count=800, out=str(out)).replace("(answer,", "(kills,"))
    assert cell.stderr.count("was killed by SIGKILL; started again") == 1
    assert "was killed by SIGKILL; started again" in cell.panel["text/plain"]
    check(out, 800)
