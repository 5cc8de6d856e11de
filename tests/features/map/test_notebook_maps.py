"""`nbaccel.map` in real notebooks: its panel and last line, Stop, a killed kernel, a second notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.kernels import Kernels
from kernel.harness import Cell, Execution, RealKernel, accelerate

START = """
from dataclasses import replace
from nbaccel.features.map import map_items
_planned = map_items.planned
map_items.planned = lambda options, *rest: _planned(replace(options, start={start!r}), *rest)
"""

DEFINES = """
import os
import time
import nbaccel

os.environ.pop("AT_ONCE", None)

class Model:
    def __init__(self, accelerator):
        self.device = accelerator.device

    def answer(self, items):
        if "AT_ONCE" not in os.environ:
            time.sleep({seconds} * len(items))
        return [f"{{item}} on {{self.device}}" for item in items]

def answer(model, items):
    return model.answer(items)
"""

AT_ONCE = "os.environ['AT_ONCE'] = '1'"
"""Lets the same function take no time, until it is defined again."""

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
    kernel.do(DEFINES.format(seconds=0.005) + "defined = Model.answer")
    execution = kernel.begin(MAPS.format(count=3000, out=str(out)))
    execution.until(has_begun)
    kernel.interrupt()
    error = execution.end(timeout_s=30).failed("KeyboardInterrupt")
    assert "are in answers.jsonl.parts; the same line goes on" in error.text
    kernel.do("Model.answer = lambda self, items: [f'{item} on {self.device}' for item in items]")
    error = kernel.run(MAPS.format(count=3000, out=str(out))).failed("CannotContinue")
    assert "answers.jsonl.parts has answers of other code: Model.answer() has changed" in error.text
    kernel.do("Model.answer = defined\n" + AT_ONCE)
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
    assert any(counts_items_of_others(frame["text/plain"]) for cell in cells for frame in cell.frames)


def counts_items_of_others(panel: str) -> bool:
    """Tell whether more items are done than the ranks of this panel have done."""
    done = re.search(r"([\d,]+) of 3,000 items", panel)
    own = re.findall(r"rank \d: ([\d,]+) items", panel)
    return done is not None and int(done[1].replace(",", "")) > sum(int(each.replace(",", "")) for each in own) > 0


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


# --- in the background ---------------------------------------------------------------------------------------------

IN_BACKGROUND = MAPS.replace("batch_size=10", "batch_size=10, background=True")


def begin_in_background(kernel: RealKernel, out: Path, count: int, seconds: float) -> Execution:
    """Run the cell of a map in the background; it has ended, and the panel there shows that items are done."""
    kernel.do(DEFINES.format(seconds=seconds))
    running = kernel.begin(IN_BACKGROUND.format(count=count, out=str(out)))
    running.end().succeeded()
    running.until(has_begun, after_end=True)
    return running


def test_a_map_in_the_background_stays_in_its_cell_and_its_answers_come_to_who_reads_them(
    kernel: RealKernel, start: str, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(START.format(start=start))
    try:
        running = begin_in_background(kernel, out, 1200, 0.005)
        name = "map(answer, 1,200 items)"
        assert "in the background: %accelerate wait, status, attach and stop come back to it" in running.cell.stdout
        shown = kernel.do("answers")  # the name alone waits for nothing
        assert shown.result is not None
        assert shown.result["text/plain"].startswith(f"<{name} has been running in the background since ")
        assert f"\n{name} has been running in the background since " in kernel.do("%accelerate status").stdout
        for code in (accelerate("1"), "nbaccel.map(answer, [1], setup=Model, cpu=True)", "nbaccel.launch(int, 1)"):
            refused = kernel.run(code).failed("LaunchRefused").evalue
            assert refused.startswith(f"{name} has been running in the background since ")
            assert "%accelerate wait for it, or %accelerate stop it" in refused
        other = kernel.do("[len(answers), answers[1199], answers.is_over]")
        assert other.result is not None
        assert other.result["text/plain"] == "[1200, '1199 on cpu', True]"
        assert (other.stdout, other.panels) == ("", 0)
        assert "1,200 items in " in running.cell.stdout
        assert running.cell.panel["text/plain"].startswith(f"{name}: 1,200 items in ")
        assert kernel.do("%accelerate wait").stdout.startswith("nothing runs in the background")
        check(out, 1200)
        kernel.do(accelerate("last = answers[1199]", start, flags="--out last"))  # ranks have them, too
        assert kernel.value("last") == "1199 on cpu"
    finally:
        kernel.do("map_items.planned = _planned")


def test_the_commands_of_bg_reach_a_map(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    begin_in_background(kernel, out, 9000, 0.005)
    stopped = kernel.do("%accelerate stop").stdout
    assert "map(answer, 9,000 items) finishes the calls under way; %accelerate wait brings what it has" in stopped
    error = kernel.run("%accelerate wait").failed("KeyboardInterrupt")
    assert re.match(r"stopped by an interrupt: [\d,]+ of 9,000 items are in answers.jsonl.parts", error.evalue)
    assert "nbaccel" not in error.text.replace("answers", "")  # one sentence, no frame of ours
    kernel.run("len(answers)").failed("KeyboardInterrupt")
    kernel.do(AT_ONCE)
    kernel.do(IN_BACKGROUND.format(count=9000, out=str(out)))
    assert kernel.do("%accelerate wait").text.count("error") == 0
    check(out, 9000)


def test_an_interrupt_of_another_cell_leaves_a_map_alone(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    begin_in_background(kernel, out, 1200, 0.005)
    for code, said in (("print('now'); time.sleep(60)", ""), ("print('now'); len(answers)", "the waiting was")):
        other = kernel.begin(code)
        other.until_text("now")
        kernel.interrupt()
        assert other.end().failed("KeyboardInterrupt").evalue.startswith(said)
    assert kernel.value("[len(answers), answers.failed]") == [1200, []]
    check(out, 1200)


@pytest.mark.slow
def test_a_kernel_that_dies_takes_a_map_in_the_background_along(new_kernel: Kernels, tmp_path: Path) -> None:
    kernel = new_kernel()
    begin_in_background(kernel, tmp_path / "answers.jsonl", 9000, 0.005)
    assert "has been running in the background since" in kernel.do("%accelerate status").stdout  # no %load_ext before
    kernel.kill()
    assert kernel.survivors(within_s=30) == {}


# --- in ranks of a cell --------------------------------------------------------------------------------------------

IN_A_CELL = """
answers = accelerator.map(answer, range({count}), setup=Model, out={out!r}, batch_size=10)
total = accelerator.reduce(torch.ones(1))
"""


def counts(cell: Cell) -> bool:
    return bool(cell.frames) and re.search(r"\b[1-9][\d,]* items", cell.frames[-1]["text/plain"]) is not None


def begin_cell(kernel: RealKernel, out: Path, flags: str) -> Execution:
    kernel.do(DEFINES.format(seconds=0.01))
    running = kernel.begin(accelerate(IN_A_CELL.format(count=2000, out=str(out)), flags=flags))
    return running


def finish(kernel: RealKernel, out: Path) -> None:
    """The same `out` is finished by a map of the notebook."""
    kernel.do(AT_ONCE)
    cell = kernel.do(MAPS.format(count=2000, out=str(out)))
    assert " of them before" in cell.stdout
    check(out, 2000)


def test_a_map_in_the_ranks_of_a_cell_in_the_background(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(DEFINES.format(seconds=0.0))
    kernel.do(accelerate(IN_A_CELL.format(count=2000, out=str(out)), flags="--bg --out answers,total"))
    kernel.do("%accelerate wait")
    assert kernel.value("[len(answers), answers[1999], total.item()]") == [2000, "1999 on cpu", 2.0]
    check(out, 2000)


@pytest.mark.parametrize("flags", ["", "--bg"])
def test_stop_ends_a_map_in_the_ranks_of_a_cell_without_a_hang(kernel: RealKernel, flags: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    running = begin_cell(kernel, out, flags)
    if flags:
        running.end().succeeded()
        running.until(counts, after_end=True)
        kernel.do("%accelerate stop")
        cell = kernel.run("%accelerate wait", timeout_s=20)
    else:
        running.until(counts)
        kernel.interrupt()
        cell = running.end(timeout_s=20)
    assert cell.failed("KeyboardInterrupt").evalue.startswith("the run was interrupted after ")
    finish(kernel, out)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--bg --time-limit 6s", "--time-limit 6s", "--timeout 6"])
def test_a_time_limit_ends_a_map_in_the_ranks_of_a_cell(kernel: RealKernel, flags: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    cell = begin_cell(kernel, out, flags).end(timeout_s=30)
    if "--bg" in flags:
        cell = kernel.run("%accelerate wait", timeout_s=30)
    if "--timeout" in flags:
        cell.failed("TimeoutError")
    else:
        said = r"stopped at the time limit of 6 s; [\d,]+ items of a map are done, and a map with out= goes on"
        assert re.search(said, cell.succeeded().stdout)
    finish(kernel, out)


@pytest.mark.slow
def test_ranks_that_stay_are_there_after_a_map_was_stopped_in_them(kernel: RealKernel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    kernel.do(DEFINES.format(seconds=0.01))
    kernel.do("%accelerate start -n 2 --cpu")
    try:
        kernel.do("%accelerate push Model,answer")
        cell = f"%%accelerate\nimport time{IN_A_CELL.format(count=2000, out=str(out))}"
        running = kernel.begin(cell)
        running.until(counts)
        kernel.interrupt()
        running.end(timeout_s=20).failed("KeyboardInterrupt")
        after = kernel.do("%%accelerate\nprint(accelerator.reduce(torch.ones(1)).item())")
        assert "2.0" in after.stdout
    finally:
        kernel.do("%accelerate stop")
