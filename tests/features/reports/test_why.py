"""`%accelerate why`: after a run of two real ranks ended badly, the suspect stands in the first lines."""

from __future__ import annotations

import gc
import re
import threading
import time
from typing import Any

import pytest
import torch

from nbaccel.errors import CannotSend, RanksFailed
from nbaccel.features.reports.why import why_report
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.ipc.reports import ErrorLink, RankReport
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.tasks.function_task import FunctionTask

MISMATCH = """%%accelerate --cpu -n 2
import torch
def train():
    model = accelerator.prepare(torch.nn.Linear(10, 3))
    api_key = "abc-123-secret"
    for step in range(3):
        rows = 7 if accelerator.process_index == 1 and step == 1 else 8
        inputs, labels = torch.randn(8, 10), torch.zeros(rows, dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
train()
"""

EARLY = """%%accelerate --cpu -n 2
import torch
for step in range(4):
    if accelerator.process_index == 1 and step == 2:
        break
    accelerator.gather(torch.ones(2))
"""

HANGS = """%%accelerate --cpu -n 2 --hang-timeout 1
turns = 0
while accelerator.process_index == 1:
    turns += 1
accelerator.wait_for_everyone()
"""

NOT_A_NUMBER = """%%accelerate --cpu -n 2
import torch
from nbaccel import Accelerator
accelerator = Accelerator(on_nan="stop")
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
scale = float("nan") if accelerator.process_index == 1 else 1.0
loss = model(torch.ones(4, 2)).sum() * scale
accelerator.backward(loss)
optimizer.step()
"""


OUT_OF_MEMORY = """%%accelerate --cpu -n 2 --oom stop
import torch
from nbaccel.testing import MemLimit
model = accelerator.prepare(torch.nn.Linear(100, 100))
with MemLimit(3_000_000):
    for length in 10, 20, {longest}:
        pages = torch.zeros(length, 100)
        loss = model(pages).sum()
        accelerator.backward(loss)
"""


def why(notebook: Any) -> list[str]:
    answer = notebook.run("%accelerate why")
    assert answer.error is None, answer.error
    lines: list[str] = answer.stdout.splitlines()
    return lines


def tensors() -> int:
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def test_a_shape_that_differs_is_shown_side_by_side_in_the_first_lines(notebook: Any) -> None:
    assert isinstance(notebook.run(MISMATCH).error, ValueError)
    lines = why(notebook)
    assert lines[0].startswith("Cell In[1] failed on rank 1 of 2: ValueError: Expected input batch_size (8)")
    (suspect,) = [line for line in lines[:10] if ": labels " in line]
    rank_1, rank_0, place = suspect.split(" | ")
    assert (rank_1, rank_0) == (
        "  rank 1: labels int64 (7,) on cpu, 56 B",
        "rank 0: labels int64 (8,) on cpu, 64 B",
    )
    assert place == "Cell In[1], line 9, in train"
    assert "  rank 1: raised ValueError at Cell In[1], line 9, in train: loss = torch.nn" in "\n".join(lines[:10])
    assert "abc-123" not in "\n".join(lines)
    assert "    api_key  str = <masked>" in lines
    assert "    model  Linear of 33 parameters, 132 B" in lines


def test_a_rank_that_left_early_is_named_with_where_it_stood_and_what_it_entered_last(notebook: Any) -> None:
    notebook.run(EARLY)
    lines = why(notebook)
    assert "  rank 1: had finished" in lines[:10]
    assert "CollectiveMismatch at Cell In[1], line 6: accelerator.gather" in "\n".join(lines[:10])
    assert "  rank 0: gather at Cell In[1], line 6 (3 times)" in "\n".join(lines[:10])
    assert "  rank 1: gather at Cell In[1], line 6 (2 times)" in "\n".join(lines[:10])


def test_a_cell_in_the_notebooks_own_process_is_explained_too(notebook: Any) -> None:
    failed = notebook.run(
        "%%accelerate --start inline\nepoch = 3\ndef train(rows):\n    1 / (rows - 3)\ntrain(epoch)\n"
    )
    assert isinstance(failed.error, ZeroDivisionError)
    lines = why(notebook)
    assert lines[:5] == [
        "Cell In[1] failed on rank 0 of 1: ZeroDivisionError: division by zero",
        "to look at first:",
        "  rank 0: rows int = 3 | Cell In[1], line 4, in train",
        "where the ranks were:",
        "  rank 0: raised ZeroDivisionError at Cell In[1], line 4, in train: 1 / (rows - 3)",
    ]
    assert "    rows  int = 3" in lines
    assert "    epoch  int = 3" in lines
    notebook.run("%%accelerate --start inline\n1\n")
    assert why(notebook) == ["nothing to explain: nothing has run in ranks yet, or the last run ended well."]


def test_a_run_that_could_not_be_started_does_not_hide_why_the_one_before_failed(notebook: Any) -> None:
    notebook.run("%%accelerate --start inline\n1 / 0\n")
    notebook.names["lock"] = threading.Lock()
    assert isinstance(notebook.run("%%accelerate -n 2 --start zygote\nlock.locked()\n").error, CannotSend)
    assert why(notebook)[0].startswith("Cell In[1] failed on rank 0 of 1: ZeroDivisionError")


def test_a_value_that_is_not_a_number_is_named(notebook: Any) -> None:
    assert isinstance(notebook.run(NOT_A_NUMBER).error, FloatingPointError)
    first = "\n".join(why(notebook)[:10])
    assert "loss float32 () on cpu, 4 B = nan, holds NaN" in first


@pytest.mark.parametrize(
    ("longest", "suspect"),
    [
        (
            "4990 if accelerator.process_index else 30",
            r"  rank 1: pages float32 \(4990, 100\) .*2 MB \| rank 0: pages ",
        ),
        ("4990", r"  (all ranks|rank \d): pages float32 \(4990, 100\) on cpu, 2 MB"),
    ],
    ids=["on one rank", "on all"],
)
def test_what_memory_ran_out_for_stands_in_the_first_lines(notebook: Any, longest: str, suspect: str) -> None:
    assert isinstance(notebook.run(OUT_OF_MEMORY.format(longest=longest)).error, torch.OutOfMemoryError)
    first = why(notebook)[:10]
    assert "OutOfMemoryError" in first[0]
    assert any(re.match(suspect, line) for line in first), first


@pytest.mark.slow
def test_a_hang_ends_and_is_explained(notebook: Any) -> None:
    error = notebook.run(HANGS).error
    assert isinstance(error, RanksFailed)
    assert "rank 1 seems to hold up the others" in str(error)
    assert re.search(r"\n  rank 1: Cell In\[1\], line [34]", str(error))
    assert "\n  rank 0: Cell In[1], line 5: accelerator.wait_for_everyone() (inside _wait_on_host" in str(error)
    lines = why(notebook)
    assert lines[0].startswith("Cell In[1] failed on rank 1 of 2: RanksFailed: no rank has entered a step")
    assert re.search(r"  rank 1: was interrupted at Cell In\[1\], line [34]: ", "\n".join(lines[:10]))
    assert "  rank 0: was interrupted at Cell In[1], line 5: accelerator.wait_for_everyone()" in lines[:10]


def test_after_a_run_that_ended_well_there_is_nothing_to_explain(notebook: Any) -> None:
    nothing = ["nothing to explain: nothing has run in ranks yet, or the last run ended well."]
    assert why(notebook) == nothing
    notebook.run("%%accelerate --cpu -n 2\nraise ValueError('once')")
    assert re.fullmatch(r"Cell In\[2\] failed on (rank [01] of 2|all 2 ranks): ValueError: once", why(notebook)[0])
    notebook.run("%%accelerate --cpu -n 2\nx = 1")
    assert why(notebook) == nothing


def test_the_answer_comes_at_once_from_text_alone(notebook: Any) -> None:
    notebook.run(MISMATCH)
    gc.collect()
    before = tensors()
    began = time.monotonic()
    why(notebook)
    assert time.monotonic() - began < 8
    assert tensors() <= before


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (["no room", "no room", "no room"], "on all 3 ranks"),
        (["no room", "no", "no room"], "on rank 2 of 3"),
        (["no room"], "on rank 0 of 1"),
    ],
)
def test_an_error_that_all_ranks_had_is_said_of_all_of_them(messages: list[str], where: str) -> None:
    links = [[ErrorLink("ValueError", [f"ValueError: {message}"], [])] for message in messages]
    reports: list[RankReport | None] = [RankReport("failed", -1, links=chain) for chain in links]
    ranks = len(reports)
    ended = RankResults(FunctionTask(print), reports, [1] * ranks, [False] * ranks, ranks - 1, False, False, 1.0)
    told = PostMortem.of("Cell In[1]", "failed", ValueError("no room"), ended)
    assert why_report(told, str).splitlines()[0] == f"Cell In[1] failed {where}: ValueError: no room"
