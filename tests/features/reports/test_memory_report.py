"""`%accelerate memory`: who holds what."""

from __future__ import annotations

import os
from typing import Any

import numpy
import pandas
import pytest
import torch

from nbaccel.base.events import Memory, Metric
from nbaccel.base.hardware import Gpu, MemoryInfo as HostMemory, Survey
from nbaccel.features.reports.memory_report import Held, Processes, held_by_names, memory_report
from nbaccel.notebook.rank_memory import RankMemory

SURVEY = Survey(
    gpus=(Gpu(0, "GPU-a", "Tesla T4", 15_800_000_000, 2_100_000_000, processes=((7, 1_200_000_000), (8, None))),),
    ram=HostMemory(16_000_000_000, 12_300_000_000),
)


def report(*events: tuple[int, Memory], held: tuple[Held, ...] = (), survey: Survey = SURVEY) -> list[str]:
    ranks = RankMemory()
    ranks.begin("Cell In[5]")
    for rank, event in events:
        ranks.feed(rank, 0.0, event)
    processes = Processes(7, 1_240_000_000, 310_000_000, 2, {"cuda:0": 412_000_000})
    return memory_report(survey, processes, ranks, held).splitlines()


def test_kernel_and_ranks_stand_in_one_table_by_host_and_device() -> None:
    first = Memory(980_000_000, 1_200_000_000, None, 8_100_000_000, 8_500_000_000, 9_000_000_000, 15_800_000_000)
    assert report((0, first), (1, Memory(500_000_000, 600_000_000))) == [
        "                        host                        device",
        "kernel                  1.2 GB                      cuda:0 412.0 MB",
        "2 processes it started  310.0 MB",
        "rank 0 of Cell In[5]    980.0 MB, at most 1.2 GB    8.1 GB in tensors, at most 9.0 GB of 15.8 GB reserved",
        "rank 1 of Cell In[5]    500.0 MB, at most 600.0 MB  none used",
        "machine: 12.3 GB of 16.0 GB host memory available",
        "cuda:0 Tesla T4: 2.1 GB of 15.8 GB in use, 1.2 GB of it by this kernel",
        "no name of the notebook holds a tensor or an array",
    ]


def test_the_last_word_of_a_rank_counts_and_a_new_run_begins_anew() -> None:
    ranks = RankMemory()
    ranks.begin("Cell In[1]")
    ranks.feed(0, 0.0, Memory(1))
    ranks.feed(0, 1.0, Metric(0, {"loss": 1.0}))
    ranks.feed(0, 2.0, Memory(3))
    ranks.tick(3.0)
    assert ranks.latest == {0: Memory(3)}
    ranks.begin("Cell In[2]")
    assert (ranks.latest, ranks.cell) == ({}, "Cell In[2]")


def test_arrays_and_frames_are_found_by_their_names_and_a_view_counts_with_its_array() -> None:
    array = numpy.zeros(100_000)
    names = {"array": array, "view": array[1:], "frame": pandas.DataFrame({"column": numpy.ones(300_000)}), "_": array}
    held = [one for one in held_by_names(names) if one.name in names]
    assert [one.name for one in held] == ["frame", "array"]
    assert held[1] == Held("array", 800_000)
    assert 2_400_000 <= held[0].bytes < 2_410_000


def test_names_are_listed_with_size_and_device_and_how_to_let_them_go() -> None:
    held = [Held("opt.state", 824_000_000, "cuda:0"), Held("model", 412_000_000, "cuda:0")]
    assert report(held=tuple(held))[-3:] == [
        "held by names of the notebook:",
        "  opt.state   824.0 MB  cuda:0",
        "  model       412.0 MB  cuda:0",
    ]
    held.append(Held("Out[7]", 96_000_000))
    assert report(held=tuple(held))[-2:] == [
        "  Out[7]       96.0 MB  cpu",
        "outputs go with nbaccel.free_memory(history=True), names with del",
    ]


def test_very_many_names_are_summed_up() -> None:
    lines = report(held=tuple(Held(f"x{number:02}", 1_000_000) for number in range(20)))
    assert lines[-2:] == ["  x11     1.0 MB  cpu", "  and 8 more, 8.0 MB"]


def test_without_torch_nothing_is_imported_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "torch")
    assert held_by_names({}) == []
    assert Processes.now().devices == {}


def test_this_process_is_the_kernel_of_the_report() -> None:
    now = Processes.now()
    assert now.pid == os.getpid()
    assert now.kernel_bytes > 10_000_000


def test_the_command_answers_in_a_notebook(planned: Any) -> None:
    planned.names["weights"] = torch.zeros(250_000)
    answer = planned.run("%accelerate memory").stdout
    assert answer.startswith(" ")
    assert "\nkernel" in answer
    assert "  weights     1.0 MB  cpu\n" in answer


def test_ranks_that_are_gone_are_said_to_be_and_our_own_processes_have_names() -> None:
    ranks = RankMemory()
    ranks.begin("Cell In[5]")
    ranks.feed(0, 0.0, Memory(980_000_000, 1_200_000_000))
    processes = Processes(7, 1_240_000_000, helpers={"reaper, which ends ranks if the kernel dies": 12_000_000})
    lines = memory_report(SURVEY, processes, ranks, (), are_gone=True).splitlines()
    assert lines[2:4] == [
        "reaper, which ends ranks if the kernel dies  12.0 MB",
        "gone: rank 0 of Cell In[5]                   980.0 MB, at most 1.2 GB  none used",
    ]


@pytest.mark.slow
def test_after_a_run_its_ranks_are_in_the_table(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -n 2\nimport torch\nx = torch.ones(1000)")
    assert cell.error is None
    lines = notebook.run("%accelerate memory").stdout.splitlines()
    ranks = [line for line in lines if " of Cell In[1] " in line]
    assert [line.split(" of ")[0] for line in ranks] == ["gone: rank 0", "gone: rank 1"]
    assert any(line.startswith("reaper, which ends ranks if the kernel dies ") for line in lines), lines
    assert any(line.startswith("zygote, a clean process to start ranks from ") for line in lines), lines
    assert all("B, at most " in line and line.endswith("none used") for line in ranks)  # GB in a long test run
