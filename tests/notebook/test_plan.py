"""What a cell asks the launcher for, on machines that are made up: precedence, devices, precision, the line before."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import fakes
import nbaccel.launching.plan
from nbaccel.base import forkable
from nbaccel.base.hardware import Survey
from nbaccel.errors import CannotFork, LaunchRefused, NoSuchDevice


@pytest.fixture
def survey(request: pytest.FixtureRequest) -> Survey:
    boards = getattr(request, "param", None)
    return Survey(cpu_count=4) if boards is None else Survey.take(nvml=fakes.FakeNvml(boards), environ={})


T4 = [fakes.FakeGpu(uuid=f"GPU-{number}") for number in "ab"]
A100 = [fakes.FakeGpu(name="A100", uuid="GPU-c", compute_capability=(8, 0))]
on = pytest.mark.parametrize("survey", [T4], indirect=True)


def test_a_cell_without_flags_is_one_rank_on_the_cpu(planned: Any) -> None:
    spec = planned.plan("%%accelerate\nx = 1")
    assert spec.world_size == 1
    assert spec.threads == min(4, torch.get_num_threads())
    assert spec.setup == "nbaccel.train.setup:setup_rank"
    assert spec.start.method == "fork"
    assert spec.end.timeout_s is None
    assert spec.end.wants_results  # all that the cell leaves
    assert spec.task.leaves_all
    assert spec.oom == "shrink"
    assert {name: value for name, value in spec.environ_of(0).items() if name != "NBACCEL_SEED"} == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_USE_CPU": "true",
        "NBACCEL_SEEDS_ALIKE": "1",
    }


def test_flags_reach_the_launch(planned: Any, recorder: Any) -> None:
    planned.names["y"] = 2
    spec = planned.plan("%%accelerate -n 2 -p bf16 -a 4 -o x -i y -r 1 -t 9 --start zygote --seed 7 --debug\nx = 1")
    assert (spec.world_size, spec.threads, spec.end.timeout_s, spec.start.method) == (2, 2, 9.0, "zygote")
    assert spec.task.out == ("x",)
    assert spec.task.names_to_send() == ["y"]
    assert recorder.shown_ranks == {1}
    assert spec.end.wants_results
    assert spec.environ_of(0) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "NBACCEL_RAW_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_MODE": "1",
        "NBACCEL_SEED": "7",
        "NBACCEL_SEEDS_ALIKE": "1",
    }


def test_a_flag_beats_the_configuration_which_beats_automatic(planned: Any) -> None:
    assert "accumulate=8" in planned.run("%accelerate config accumulate=8 num-processes=2").stdout
    spec = planned.plan("%%accelerate -a 2\nx = 1")
    assert spec.world_size == 2
    assert spec.settings.gradient_accumulation_steps == 2
    assert planned.plan("%%accelerate -n auto\nx = 1").world_size == 1
    assert planned.plan("%%accelerate --oom stop\nx = 1").oom == "stop"
    assert planned.plan("%%accelerate\nx = 1").settings.gradient_accumulation_steps == 8


@on
def test_auto_is_one_rank_per_gpu_in_the_precision_that_suits_it(planned: Any) -> None:
    ran = planned.run("%%accelerate --seed 1\nx = 1")
    spec = planned.session.launcher.spec
    assert spec.devices.environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert spec.settings.mixed_precision == "fp16"
    assert spec.settings.cpu is None
    assert ran.stdout.splitlines()[0] == "2 ranks on GPU 0, 1 (Tesla T4), seed 1"
    assert planned.run("%accelerate").stdout.splitlines()[1] == (
        "the latest ranks were started as: "
        "2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4 (each its own as cuda:0), fork (the notebook has not used CUDA), "
        "seed 1, what is prepared: precision fp16 (Tesla T4 has no bf16 units), accumulate 1"
    )
    ran = planned.run("%%accelerate --seed 1\naccelerator.print(1)")
    assert ran.stdout.splitlines()[0] == "2 ranks on GPU 0, 1 (Tesla T4), seed 1; prepared: fp16"
    explained = planned.run("%accelerate status").stdout.splitlines()[1]
    assert explained.startswith("the latest ranks were started as: 2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4, fork (")
    assert explained.endswith(", seed 1, what is prepared: precision fp16 (Tesla T4 has no bf16 units), accumulate 1")
    assert planned.run("%%accelerate -n 1\nx = 1").stdout.startswith("1 rank on GPU 0 (Tesla T4)\n")


def test_a_strategy_reaches_the_ranks_and_is_said_before_the_run(planned: Any) -> None:
    prepares = "model = accelerator.prepare(model)"
    ran = planned.run(f"%%accelerate -n 2 --strategy FSDP --seed 1\n{prepares}")
    assert ran.stdout.splitlines()[0] == "2 ranks on CPU, seed 1; prepared: fsdp"
    assert planned.session.launcher.spec.environ_of(0)["NBACCEL_STRATEGY"] == "fsdp"
    assert ", accumulate 1, strategy fsdp\n" in planned.run("%accelerate").stdout
    planned.run("%accelerate config strategy=fsdp num-processes=2")
    assert "accumulate 1, strategy fsdp;" in planned.run("%accelerate").stdout
    assert planned.plan(f"%%accelerate\n{prepares}").settings.strategy == "fsdp"
    for flags, first in {"--strategy ddp": "seed 1; prepared: ddp", "--strategy auto": "seed 1"}.items():
        said = planned.run(f"%%accelerate {flags} --seed 1\n{prepares}").stdout.splitlines()[0]
        assert said == f"2 ranks on CPU, {first}"


EIGHT = [fakes.FakeGpu(name="NVIDIA H100 80GB HBM3 of a long name", uuid=f"GPU-{n}") for n in range(8)]


@pytest.mark.parametrize("survey", [EIGHT], indirect=True)
@pytest.mark.parametrize("flags", ["-a 16 --seed 4000000000 --start zygote", ""])
def test_the_first_line_has_at_most_80_characters(planned: Any, flags: str) -> None:
    first, *_ = planned.run(f"%%accelerate {flags}\nloss.backward()").stdout.splitlines()
    assert first.startswith("8 ranks on GPU 0-7")
    assert len(first) <= 80


@on
def test_cpu_hides_the_gpus(planned: Any) -> None:
    spec = planned.plan("%%accelerate -n 3 --cpu\nx = 1")
    assert spec.world_size == 3
    assert spec.devices.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert spec.settings.cpu


@on
def test_devices_are_chosen_by_number(planned: Any) -> None:
    assert planned.plan("%%accelerate -d 1\nx = 1").environ_of(0)["CUDA_VISIBLE_DEVICES"] == "1"


@on
def test_a_run_in_the_notebook_gets_no_other_device_than_the_notebook_has(planned: Any) -> None:
    error = planned.run("%%accelerate --start inline -d 1\nx = 1").error
    assert isinstance(error, LaunchRefused)
    assert "where CUDA cannot be given other devices: leave --devices out and say torch.device('cuda', 1)" in str(error)
    assert "x" not in planned.names
    before = dict(os.environ)
    assert planned.run("%%accelerate --start inline -n 1 --out seen\nimport os; seen = dict(os.environ)").error is None
    assert "CUDA_VISIBLE_DEVICES" not in planned.names["seen"]
    assert dict(os.environ) == before


FULL = replace(T4[0], used_bytes=T4[0].total_bytes, processes=[(2**22 + 1, 15 * fakes.GB)])


@pytest.mark.parametrize("survey", [[FULL]], indirect=True)
def test_a_gpu_that_is_full_is_said_before_the_run(planned: Any) -> None:
    lines = planned.run("%%accelerate\nx = 1").stdout.splitlines()
    assert lines[1] == (
        "GPU 0 Tesla T4 is full: 0.0 GB of 16.0 GB are free, and a process takes up to 0.5 GB before its first tensor; "
        f"15.0 GB held by process {2**22 + 1} (not visible from here)."
    )
    started = planned.run("%accelerate start")
    assert "GPU 0 Tesla T4 is full" in started.stdout


@on
@pytest.mark.parametrize("flags", ["", "--start zygote", "--independent"])
def test_each_rank_of_a_cell_that_knows_no_ranks_sees_its_own_gpu_alone(planned: Any, flags: str) -> None:
    spec = planned.plan(f"%%accelerate {flags}\nmodel.to('cuda:0')")
    assert [spec.environ_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]
    knows = planned.plan(f"%%accelerate {flags}\nmodel.to(accelerator.device)")
    assert [knows.environ_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0,1"] * 2
    assert planned.plan("%%accelerate --cpu -n 2\nx = 1").environ_of(1)["CUDA_VISIBLE_DEVICES"] == ""


@on
@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_each_rank_of_a_cell_that_says_cuda_0_sees_its_own_gpu_alone_and_is_told_so(planned: Any, start: str) -> None:
    planned.names["device"] = torch.device("cuda:0")
    cell = "model, loader = accelerator.prepare(model, loader)\nfor x in loader: model(x.to(device))"
    spec = planned.plan(f"%%accelerate --start {start}\n{cell}")
    assert [spec.environ_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]
    told = planned.run(f"%%accelerate --start {start}\n{cell}").stdout.splitlines()
    assert told[0].startswith(f"2 ranks on GPU 0, 1 (Tesla T4), {start}, ")
    assert told[1] == "each rank sees its own GPU alone, as cuda:0, because the cell says device"
    counts = planned.plan(f"%%accelerate\n{cell}\nother = f'cuda:{{accelerator.process_index}}'")
    assert [counts.environ_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0,1"] * 2


@pytest.mark.parametrize("survey", [[fakes.FakeGpu(uuid=f"GPU-{letter}") for letter in "abcd"]], indirect=True)
def test_devices_that_are_named_are_shared_out(planned: Any) -> None:
    spec = planned.plan("%%accelerate -n 2 -d 0,1,2,3\nmodel.to(accelerator.device)")
    assert [spec.environ_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0,1", "2,3"]
    told = planned.run("%%accelerate -n 2 -d 0,1,2,3\nx = 1").stdout.splitlines()
    assert told[0] == "2 ranks on GPU 0-3, 2 each (Tesla T4)"
    assert told[1] == "each rank sees its own 2 GPUs alone, as cuda:0 to cuda:1, and computes on cuda:0"
    assert planned.plan("%%accelerate -n 1 -d 2,3\nx = 1").environ_of(0)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "names 4 GPUs for 3 ranks (-n 3)" in str(planned.run("%%accelerate -n 3 -d 0,1,2,3\nx = 1").error)


def test_hundreds_of_ranks_on_a_few_cores_are_refused_before_any_is_started(planned: Any, recorder: Any) -> None:
    error = planned.run("%%accelerate -n 500\nx = 1").error
    assert isinstance(error, LaunchRefused)
    assert str(error) == (
        "500 ranks were asked for (-n 500), and there are 4 cores: ranks beyond that only wait for each other. "
        "Use -n 4, or up to 64 to try something out; nbaccel.launch(function, 500) starts as many as it is told."
    )
    assert not recorder.specs
    assert planned.plan("%%accelerate -n 64\nx = 1").world_size == 64
    planned.run("%accelerate config num-processes=65")
    assert "refused as configured (65 ranks were asked for" in planned.run("%accelerate").stdout


@on
def test_more_ranks_than_gpus_are_refused_with_a_way_out(planned: Any) -> None:
    error = planned.run("%%accelerate -n 3\nx = 1").error
    assert isinstance(error, NoSuchDevice)
    assert "use -n 2, or --cpu" in str(error)


@on
def test_bf16_without_its_units_is_refused_with_a_way_out(planned: Any) -> None:
    error = planned.run("%%accelerate -p bf16\nx = 1").error
    assert isinstance(error, LaunchRefused)
    assert str(error) == ("Tesla T4 has no bf16 units and would emulate bf16 slowly: use -p fp16, or leave -p out.")


@pytest.mark.parametrize("survey", [A100], indirect=True)
def test_bf16_is_taken_where_there_are_units(planned: Any) -> None:
    ran = planned.run("%%accelerate -p bf16 --seed 3\nx = 1")
    assert "; bf16\n" in ran.stdout
    assert planned.plan("%%accelerate\nx = 1").settings.mixed_precision == "bf16"


def test_a_fresh_seed_is_drawn_printed_and_does_not_move_the_notebooks_own(planned: Any) -> None:
    state = random.getstate()
    seeds = set()
    for _ in range(3):
        line = planned.run("%%accelerate\naccelerator.print(1)").stdout.splitlines()[0]
        seeds.add(planned.session.launcher.spec.settings.seed)
        assert line.endswith(f"seed {planned.session.launcher.spec.settings.seed}")
    assert len(seeds) > 1
    assert random.getstate() == state


def test_a_cell_that_knows_no_ranks_goes_on_with_the_notebooks_random_numbers(planned: Any) -> None:
    raw = "loss.backward()"
    line = planned.run(f"%%accelerate -n 2\n{raw}").stdout.splitlines()[0]
    assert line == "2 ranks on CPU"
    spec = planned.session.launcher.spec
    assert spec.settings.seed is None
    assert spec.settings.seeds_alike
    assert spec.task.random["random"] == random.getstate()
    for flag in ("--seed 7", "--independent", "--strict"):
        line = planned.run(f"%%accelerate -n 2 {flag}\n{raw}").stdout.splitlines()[0]
        spec = planned.session.launcher.spec
        assert line.endswith(f"seed {spec.settings.seed}")
        assert spec.task.random is None
        assert bool(spec.settings.seeds_alike) is (flag == "--seed 7"), "else each rank has its own"
    planned.run("%accelerate config seed=3")
    assert planned.plan(f"%%accelerate -n 2\n{raw}").settings.seed == 3


def test_what_an_unprepared_loop_gets_reaches_the_ranks(planned: Any) -> None:
    planned.run("%accelerate config batches=each")
    settings = planned.plan("%%accelerate -n 2 --strict\nx = 1").settings
    assert (settings.strict, settings.batches) == (True, "each")


def test_a_copy_of_more_than_a_gigabyte_is_said_before_the_launch(planned: Any) -> None:
    numpy = pytest.importorskip("numpy")
    planned.names["data"] = numpy.empty(1_500_000_000, "uint8")  # no page of it is ever touched
    ran = planned.run("%%accelerate --start zygote\ndata")
    assert ran.stdout.splitlines()[1] == "1.5 GB to copy to the ranks first"
    assert "to copy" not in planned.run("%%accelerate\ndata").stdout


@pytest.fixture
def cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_a_notebook_that_used_cuda_starts_ranks_by_zygote_and_names_the_cell(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    planned.names["touch"] = lambda: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    planned.run("x = 1")
    planned.run("touch()")
    planned.run("x = 2")
    ran = planned.run("%%accelerate\nx = 1")
    assert "zygote, not fork: CUDA is initialised in the notebook since cell [2]\n" in ran.stdout
    error = planned.run("%%accelerate --start fork\nx = 1").error
    assert isinstance(error, CannotFork)
    assert "First seen: cell [2]." in str(error)
    assert "since cell [2]" in planned.run("%accelerate doctor").stdout


def test_a_function_that_used_cuda_in_place_has_the_next_cell_start_by_zygote(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    planned.names["touch"] = lambda: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ran = planned.run("import nbaccel\nnbaccel.notebook_launcher(touch, num_processes=1)")
    assert ran.stdout.startswith("in this process, as in Accelerate: no restart")
    ran = planned.run("%%accelerate\nx = 1")
    assert "zygote, not fork: CUDA is initialised in the notebook since cell [1]\n" in ran.stdout


def test_each_reason_why_forks_fail_is_given_with_the_cell_that_it_came_with(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(forkable, "has_gpu_driver", lambda: True)
    planned.names["backward"] = lambda: monkeypatch.setattr(forkable, "_autograd_has_threads", lambda: True)
    planned.names["pin"] = lambda: monkeypatch.setattr(forkable, "_driver_is_in_use", lambda: True)
    planned.names["touch"] = lambda: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for cell, why in {
        "backward()": "autograd has device threads in the notebook since cell [1]",
        "pin()": "the CUDA driver is in use in the notebook since cell [3]",
        "touch()": "CUDA is initialised in the notebook since cell [5]",
    }.items():
        planned.run(cell)
        assert f"zygote, not fork: {why}\n" in planned.run("%%accelerate\nx = 1").stdout
    assert "initialised in this process since cell [5]" in planned.run("%accelerate doctor").stdout


def test_threads_that_show_a_moment_after_their_cell_are_still_those_of_that_cell(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkable, "has_gpu_driver", lambda: True)
    planned.run("loss_backward = 1")
    monkeypatch.setattr(forkable, "_autograd_has_threads", lambda: True)  # between the cells
    error = planned.run("%accelerate start -n 2 --cpu --start fork").error
    assert isinstance(error, CannotFork)
    assert str(error).startswith("Autograd has device threads in the notebook, so forked ranks could not train.")
    assert "First seen: cell [1]." in str(error)
    assert "since cell [1]" in planned.run("%%accelerate\nx = 1").stdout
    doctor = planned.run("%accelerate doctor").stdout
    assert "not initialised by torch, but autograd has device threads in the notebook since cell [1]" in doctor


@pytest.mark.usefixtures("cuda_is_initialized")
def test_a_context_older_than_the_extension_is_blamed_on_no_cell(planned: Any) -> None:
    planned.run("x = 1")
    assert "CUDA is initialised in the notebook\n" in planned.run("%%accelerate\nx = 1").stdout


@pytest.mark.usefixtures("cuda_is_initialized")
def test_one_rank_runs_inline_rather_than_copy_a_gigabyte_of_device_memory(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"one": 600_000_000, "two": 600_000_000}
    monkeypatch.setattr(
        nbaccel.launching.plan,
        "sizes_on_devices",
        lambda values: {"cuda:0": Counter({name: sizes.get(name, 0) for name in values})},
    )
    planned.names.update({"one": 1, "two": 2, "result": None})
    monkeypatch.setattr("nbaccel.notebook.inline_cell.run_in_the_kernel", lambda *given: "inline")
    ran = planned.run("%%accelerate\none, two")
    assert ran.value == "inline"
    assert "inline, not fork: the names it reads hold 1.2 GB on the device, too much to copy\n" in ran.stdout
    assert "zygote" in planned.run("%%accelerate\none").stdout


def test_a_time_limit_cannot_be_held_inline_and_that_is_said(planned: Any) -> None:
    error = planned.run("%%accelerate --start inline -t 5\nx = 1").error
    assert str(error) == (
        "--timeout can stop ranks only, and this cell would run in the notebook's own process (asked for): "
        "leave --timeout out."
    )


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (
            "%%accelerate --out histroy\nhistory = []",
            "--out histroy: neither the notebook nor the cell has a variable of that name (did you mean history?); "
            "nothing was started. Correct it or leave it out.",
        ),
        (
            "%%accelerate --in dta\nx = 1",
            "--in dta: the notebook has not a variable of that name (did you mean data?); "
            "nothing was started. Correct it or leave it out.",
        ),
        ("%%accelerate --out xyzzy\n1", "has a variable of that name; nothing was started."),
    ],
)
def test_names_that_can_only_be_mistakes_are_refused_before_the_launch(planned: Any, cell: str, sentence: str) -> None:
    planned.names["data"] = 1
    ran = planned.run(cell)
    assert isinstance(ran.error, LaunchRefused)
    assert sentence in str(ran.error)
    assert not planned.session.launcher.specs


def test_a_name_that_only_a_string_of_the_cell_mentions_may_come_back(planned: Any) -> None:
    assert planned.plan('%%accelerate --out x\nexec("x = 1")').task.out == ("x",)


def test_a_syntax_error_is_raised_here_with_its_line_and_nothing_starts(planned: Any) -> None:
    ran = planned.run("%%accelerate -n 2\nx = 1\ny = (\n")
    error = ran.error
    assert isinstance(error, SyntaxError)
    assert (error.filename, error.lineno) == ("Cell In[1]", 3)
    assert "Cell In[1]" in ran.stdout
    assert "interactiveshell" not in ran.stdout
    elsewhere = planned.run("compile('y = (', 'config', 'exec')").stdout
    assert "Cell In[2]" in elsewhere, "the call that led to another one is shown"
    assert not planned.session.launcher.specs


def test_refusals_are_shown_as_one_sentence_without_our_frames(planned: Any) -> None:
    ran = planned.run("%%accelerate --out xyzzy\n1")
    assert ran.stdout.startswith("LaunchRefused: --out xyzzy")
    assert ran.stdout.count("\n") == 1


def test_the_session_imports_no_torch() -> None:
    import subprocess

    code = (
        "import nbaccel.notebook.commands, sys; print({'torch', 'ipywidgets', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
