"""`nbaccel.sweep`: runs side by side, each like a single run; a failure ends one; a finished run is found again."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nbaccel
from nbaccel import Accelerator, LaunchRefused, launch
from nbaccel.base.hardware import Gpu, MemoryInfo, Survey
from nbaccel.base.settings import RunSettings
from nbaccel.features.sweep.sweep import line_on_copies, refuse_a_full_host, sweep
from nbaccel.launching.ipc.spec import Devices, Start
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.options.run_options import RunOptions

_SETUP = "nbaccel.train.setup:setup_rank"


@pytest.fixture(autouse=True)
def of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compute with one thread, as the runs of two slots do on two cores: then sums have one order."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trains(kind: str, lr: float, accelerator: Accelerator) -> dict[str, Any]:
    """A small training, or one that comes to a bad end."""
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for step in range(6):
        loss = model(torch.randn(16, 8)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss})
        if step == 3 and kind == "crash":
            raise ValueError("eleven classes")
        if step == 3 and kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if step == 3 and kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and kind == "hang":
            time.sleep(1000)
    return {"loss": loss.item(), "weight": accelerator.unwrap_model(model).weight.detach().clone()}


def alone(kind: str, lr: float) -> dict[str, Any]:
    return trains(kind, lr, Accelerator())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["loss"] == other["loss"] and bool((one["weight"] == other["weight"]).all())


@pytest.mark.slow
def test_of_six_runs_a_crash_a_shortage_and_a_hang_end_themselves_and_the_rest_equal_single_runs() -> None:
    kinds = ["good", "hang", "crash", "fine", "memory", "well"]
    runs = sweep(trains, kind=kinds, lr=0.1, slots=2, cpu=True, seed=3, hang_timeout_s=5.0)
    assert [run.config["kind"] for run in runs] == kinds
    assert [run.state.word for run in runs if run.state] == ["done", "failed", "failed", "done", "failed", "done"]
    assert nbaccel.last_run is not None
    assert [run.config["kind"] for run in nbaccel.last_run.runs] == kinds
    for run in runs:
        if run.error is None:
            single = launch(alone, 1, ("good", 0.1), seed=3, cpu=True, setup=_SETUP)
            assert same(run.value, single.value)
            assert run.curves["loss"].mean == single.curves["loss"].mean
        else:
            assert run.value is None
    by_kind = {run.config["kind"]: run for run in runs}
    assert str(by_kind["crash"].error).startswith("eleven classes")
    assert isinstance(by_kind["memory"].error, torch.OutOfMemoryError)
    assert "ended by its hang timeout" in str(by_kind["hang"].error)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_alone(start_method: str) -> None:
    runs = sweep(trains, kind=["dies", "good", "fine"], lr=0.1, slots=2, cpu=True, start_method=start_method)
    assert [run.state.word for run in runs if run.state] == ["failed", "done", "done"]
    assert same(runs[1].value, runs[2].value)


def adds(lr: float, fold: int) -> float:
    with open("calls", "a") as file:
        file.write(f"{lr} {fold}\n")
    return lr + fold


def calls() -> list[str]:
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []


def test_the_last_name_varies_fastest_and_a_finished_run_is_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    runs = sweep(adds, lr=[0.5, 0.25], fold=range(2), cpu=True)
    assert [run.config for run in runs] == [{"lr": lr, "fold": fold} for lr in (0.5, 0.25) for fold in (0, 1)]
    assert [run.value for run in runs] == [0.5, 1.5, 0.25, 1.25]
    assert len(calls()) == 4
    again = sweep(adds, lr=[0.5, 0.75], fold=range(2), cpu=True)
    assert [run.value for run in again] == [0.5, 1.5, 0.75, 1.75]
    assert len(calls()) == 6
    assert "2 of 4 runs finished earlier (same source, values and seed, in .nbaccel/sweeps)" in capsys.readouterr().out
    sweep(adds, lr=[0.5], fold=[0], cpu=True, seed=1)
    assert len(calls()) == 7


def test_runs_without_a_seed_are_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        sweep(adds, lr=1, fold=0, seed=None, cpu=True)
    assert len(calls()) == 2
    assert "as lr=1, fold=0: it has no seed, so that nobody knows its random numbers" in capsys.readouterr().out


def test_each_run_has_its_seed_log_and_folder() -> None:
    def draws(seed: int) -> dict[str, Any]:
        print("drawn with", seed)
        accelerator = Accelerator(log_with="jsonl")
        accelerator.init_trackers("run")
        accelerator.log({"acc": 0.5})
        accelerator.end_training()
        return {"drawn": float(torch.rand(())), "folder": str(accelerator.project_dir)}

    runs = sweep(draws, seed=[4, 5], slots=2, cpu=True)
    assert [run.origin.seed for run in runs] == [4, 5]
    for run in runs:
        torch.manual_seed(run.origin.seed or 0)
        assert run.value["drawn"] == float(torch.rand(()))
        folder = Path(run.log_path).parent
        assert Path(run.value["folder"]) == folder
        assert f"drawn with {run.origin.seed}" in Path(run.log_path).read_text()
        assert list(folder.rglob("*.jsonl"))
    assert runs[0].log_path != runs[1].log_path
    rows = runs.table()
    assert [row["seed"] for row in rows] == [4, 5]
    assert set(rows[0]) == {"seed", "drawn", "folder", "acc", "seconds", "status"}


def test_the_log_of_a_failed_run_ends_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def divides(by: int) -> float:
        print("dividing by", by)
        return 1 / by

    runs = sweep(divides, by=[0, 1], cpu=True)
    said = Path(runs[0].log_path).read_text()
    assert said.startswith("[rank 0] dividing by 0\n")
    assert "return 1 / by" in said
    assert said.endswith("ZeroDivisionError: division by zero\nraised on rank 0 of 1.\n")
    assert "Error" not in Path(runs[1].log_path).read_text()
    shown = capsys.readouterr().out
    assert f"the traceback of a failed run is at the end of its log, such as {runs[0].log_path}" in shown
    assert "1. by=0: failed on slot 1," in shown
    assert ": ZeroDivisionError: division by zero\n" in shown, "one rank needs no number"


def test_check_raises_the_first_failure_after_all_are_over() -> None:
    def divides(by: int) -> float:
        Path(f"by-{by}").touch()
        return 1 / by

    with pytest.raises(ZeroDivisionError) as caught:
        sweep(divides, by=[0, 1, 2], cpu=True, check=True)
    assert any("in the run with by=0" in note for note in caught.value.__notes__)
    assert Path("by-2").exists()
    log = Path(nbaccel.runs[-1].runs[0].log_path).read_text()
    assert "return 1 / by" in log
    assert log.rstrip().endswith("ZeroDivisionError: division by zero\nraised on rank 0 of 1.")
    assert log.count("ZeroDivisionError: ") == 1


def test_a_function_that_returns_nothing_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(fails_or_not, fold=[0, 1], cpu=True)
    assert "no run of fails_or_not returned a value" in capsys.readouterr().out
    sweep(fails_or_not, fold=[0, 2], cpu=True)
    assert "returned a value" not in capsys.readouterr().out


def fails_or_not(fold: int) -> None:
    if fold == 2:
        raise ValueError("three classes")


def waits_for_ever(fold: int) -> None:
    Path(f"begun-{fold}").touch()
    time.sleep(1000)


def test_an_interrupt_ends_the_running_ones_and_the_waiting_ones_do_not_begin(tmp_path: Path) -> None:
    def press_when_two_run() -> None:
        while len(list(tmp_path.glob("begun-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_when_two_run)
    thread.start()
    try:
        with pytest.raises(
            KeyboardInterrupt, match=r"4 runs: 4 stopped\. nbaccel\.last_run\.runs has them, and the same sweep"
        ):
            sweep(waits_for_ever, fold=range(4), slots=2, cpu=True)
    finally:
        thread.join()
    assert len(list(tmp_path.glob("begun-*"))) == 2
    assert nbaccel.last_run is not None
    assert [run.in_a_line() for run in nbaccel.last_run.runs[2:]] == ["not begun"] * 2
    assert [str(run.error) for run in nbaccel.last_run.runs[2:]] == [
        "this run had not begun when the sweep was stopped"
    ] * 2
    gc.collect()


def predicts(weight: float, accelerator: Accelerator) -> list[float]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)

    def answers(items: list[int]) -> list[float]:
        time.sleep(0.02)
        return [model(torch.tensor([float(item)])).item() for item in items]

    return list(accelerator.map(answers, list(range(10)), out="same.jsonl", batch_size=1))


@pytest.mark.parametrize("slots", [1, 2])
def test_runs_do_not_get_the_answers_of_each_others_models(slots: int) -> None:
    for _ in range(2):
        runs = sweep(predicts, weight=[1.0, 2.0], slots=slots, cpu=True)
        ended = [run.error is None for run in runs]
        assert ended == [True, False] or (ended == [False, True] and slots == 2)
        for run in runs:
            if run.error is None:
                assert run.value == [run.config["weight"] * item for item in range(10)]
            else:
                assert "'run': 'weight=1 (" in str(run.error)
                assert "another name for out keeps both" in str(run.error)


def scaled_by(factor: int) -> Callable[[int], int]:
    return lambda x: x * factor


def applies(act: Callable[[int], int]) -> int:
    return act(10)


def test_functions_that_a_function_makes_are_values_of_their_own() -> None:
    for _ in range(2):
        runs = sweep(applies, act=[scaled_by(1), scaled_by(2)], cpu=True)
        assert [run.value for run in runs] == [10, 20]
    assert [run.value for run in sweep(applies, act=[scaled_by(3), scaled_by(2)], cpu=True)] == [30, 20]


def interrupts_itself(fold: int) -> int:
    if fold == 1:
        raise KeyboardInterrupt
    return fold


def test_a_run_that_raises_an_interrupt_itself_is_stopped_and_done_again() -> None:
    for _ in range(2):
        runs = sweep(interrupts_itself, fold=range(3), cpu=True)
        assert [run.state.word for run in runs if run.state] == ["done", "stopped", "done"]
        assert [run.value for run in runs] == [0, None, 2]
        assert str(runs[1].error) == "rank 0 of 1 ended by a KeyboardInterrupt"
    assert not (Path(runs[1].log_path).parent / "run.json").exists()
    with pytest.raises(KeyboardInterrupt, match="rank 0 of 1 ended by a KeyboardInterrupt"):
        launch(interrupts_itself, 1, (1,), cpu=True)


_KILLED = """
import time
from pathlib import Path
import nbaccel

def waits(fold):
    import os, subprocess
    child = subprocess.Popen(["sleep", "1000"])
    Path(f"pids-{fold}.tmp").write_text(f"{os.getpid()} {child.pid}")
    Path(f"pids-{fold}.tmp").rename(f"pids-{fold}")
    time.sleep(1000)

nbaccel.sweep(waits, fold=range(3), slots=2, cpu=True)
"""


def test_nothing_survives_the_sigkill_of_the_process_that_sweeps(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(_KILLED))
    sweeps = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    try:
        _until(lambda: len(list(tmp_path.glob("pids-?"))) == 2)
        pids = [int(pid) for path in tmp_path.glob("pids-?") for pid in path.read_text().split()]
    finally:
        sweeps.kill()
        sweeps.wait()
    _until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it has not come so far"
        time.sleep(0.05)


# --- what is refused ------------------------------------------------------------------------------------------------


def takes(lr: float, epochs: int = 1) -> float:
    return lr * epochs


def needs_slots(slots: int) -> int:
    return slots


def checks(check: int = 1, devices: str | None = None) -> int:
    return check


def test_a_parameter_with_a_default_may_have_the_name_of_an_argument_of_the_sweep() -> None:
    assert sweep(checks, cpu=True)[0].value == 1


def test_a_function_gets_the_seed_of_its_run_if_it_asks_for_one() -> None:
    def needs(lr: int, seed: int) -> int:
        return seed

    def has(lr: int, seed: int = 42) -> int:
        return seed

    def takes_any(**given: Any) -> list[str]:
        return sorted(given)

    assert [run.value for run in sweep(needs, lr=[1, 2], seed=7, cpu=True)] == [7, 7]
    assert sweep(needs, lr=1, cpu=True)[0].value == 0
    assert sweep(has, lr=1, seed=7, cpu=True)[0].value == 7
    assert sweep(has, lr=1, cpu=True)[0].value == 42
    assert sweep(has, lr=1, seed=None, cpu=True)[0].value == 42
    assert sweep(takes_any, lr=1, seed=7, cpu=True)[0].value == ["lr"]
    runs = sweep(needs, lr=1, seed=[3, 4], cpu=True)
    assert [(run.value, run.origin.seed) for run in runs] == [(3, 3), (4, 4)]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    Path("file").touch()
    for folder in ("file", "file/in", "/proc/sweeps"):
        with pytest.raises(
            LaunchRefused, match=f"and {folder} cannot be written .*pass another folder= to nbaccel.sweep"
        ):
            sweep(takes, lr=[1.0], cpu=True, folder=folder)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: sweep(takes, lr=[], cpu=True), ValueError, "lr has no value: a sweep needs one or more for each"),
        (lambda: sweep(takes, lr=[1.0], fold=[0], cpu=True), TypeError, r"takes\(\) has no parameter 'fold'; it takes"),
        (lambda: sweep(takes, lr=1.0, num_processes=2), TypeError, r"The ranks of each run are gpus_per_run\. Nothing"),
        (lambda: sweep(takes, epochs=[1], cpu=True), TypeError, r"takes\(\) needs a value for 'lr', and the sweep has"),
        (lambda: sweep(takes, lr=1, slots="2"), TypeError, "slots must be a whole number, or None; got '2'. Nothing"),  # type: ignore[arg-type]
        (lambda: sweep(takes, lr=1, gpus_per_run=1.5), TypeError, "gpus_per_run must be a whole number; got 1.5"),  # type: ignore[arg-type]
        (
            lambda: sweep(takes, lr=1, devices=[0]),  # type: ignore[arg-type]
            TypeError,
            r'devices must be a text such as "0,1", or None; got \[0\]',
        ),
        (lambda: sweep(takes, lr=1, folder=None), TypeError, "folder must be a path; got None"),  # type: ignore[arg-type]
        (
            lambda: sweep(takes, lr=1, seed="a"),
            TypeError,
            "seed must be a whole number, several of them, or None; got 'a'",
        ),
        (
            lambda: sweep(needs_slots, slots=2),
            TypeError,
            r"slots is an argument of nbaccel.sweep itself, so needs_slots",
        ),
        (
            lambda: sweep(checks, check=[1, 2]),  # type: ignore[arg-type]
            TypeError,
            r"check is an argument of nbaccel.sweep itself, so checks\(\) d",
        ),
        (lambda: sweep(takes, lr=[1.0], slots=0, cpu=True), LaunchRefused, "slots must be 1 or more; got 0."),
        (lambda: sweep(takes, accelerator=[1], lr=1.0, cpu=True), TypeError, "accelerator is given to the function"),
        (lambda: sweep(3, lr=[1.0]), TypeError, "the first argument must be the function that each run calls, got int"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_call_is_one_sentence_and_nothing_is_started(
    call: Callable[[], Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        call()
    assert not Path(".nbaccel").exists()


def test_a_function_that_cannot_be_sent_is_one_sentence_and_works_by_fork() -> None:
    lock = threading.Lock()

    def holds_a_lock(lr: float) -> float:
        return lr if lock else 0.0

    with pytest.raises(LaunchRefused) as caught:
        sweep(holds_a_lock, lr=[0.1, 0.2], cpu=True, start_method="zygote")
    assert "lock" in str(caught.value)
    assert [run.value for run in sweep(holds_a_lock, lr=[0.1, 0.2], cpu=True, start_method="fork")] == [0.1, 0.2]


def test_a_rank_cannot_sweep() -> None:
    with pytest.raises(nbaccel.NestedLaunch, match="ranks do not launch ranks"):
        launch(sweep, 1, (takes,), {"lr": [1.0]}, cpu=True)


def test_a_rank_of_torchrun_cannot_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        nbaccel.NestedLaunch, match=r"this is rank 1 of 2 that torchrun .* start the script by python alone"
    ):
        sweep(takes, lr=[1.0], cpu=True)


def planned(start: str, ranks: int = 1, *, bytes_to_copy: int = 0, gpus: tuple[Gpu, ...] = ()) -> LaunchPlan:
    devices = Devices(ranks, gpus)
    return LaunchPlan(RunOptions(), devices, Start(start, "asked for"), RunSettings(), 1, bytes_to_copy=bytes_to_copy)


def host(available_bytes: int) -> Survey:
    return Survey(ram=MemoryInfo(16 * 10**9, available_bytes))


def test_copies_that_do_not_fit_are_refused_with_the_number_that_does() -> None:
    plan = planned("zygote", bytes_to_copy=3 * 10**9)
    refuse_a_full_host(plan, 2, host(8 * 10**9))
    with pytest.raises(LaunchRefused, match=r"3 runs side by side would each get a copy of 3\.0 GB.*use --slots 2\."):
        refuse_a_full_host(plan, 3, host(8 * 10**9))


def test_processes_that_do_not_fit_are_refused_however_they_start(start_method: str) -> None:
    refuse_a_full_host(planned(start_method, 2), 10, host(400_000_000))
    with pytest.raises(
        LaunchRefused, match=r"10 runs side by side, of 2 ranks each, need 400\.0 MB of host memory before they load"
    ) as caught:
        refuse_a_full_host(planned(start_method, 2), 10, host(300_000_000))
    assert str(caught.value).endswith("and the host has 300.0 MB available: use --slots 7.")
    cards = tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9, number=number) for number in range(2))
    with pytest.raises(LaunchRefused, match=r"need 520\.0 MB .* 200\.0 MB available: end what else uses it"):
        refuse_a_full_host(planned(start_method, 2, gpus=cards), 2, host(200_000_000))
    refuse_a_full_host(planned(start_method, 2), 10, host(0))  # unknown


def test_python_objects_that_forked_ranks_may_come_to_copy_are_said() -> None:
    rows = [f"{number} and some words that are long enough to count" for number in range(20_000)]
    task = FunctionTask(len, (rows,), {})
    plan = planned("fork", 2)
    line = line_on_copies(plan, 4, task, host(5_000_000), 10**9)
    assert re.match(r"the runs read 2\.\d MB of Python objects of the notebook, and each of 8 ranks may come to", line)
    assert "with 5.0 MB available. Tensors and arrays stay shared; or use fewer slots (--slots)" in line
    assert line_on_copies(plan, 1, task, host(5_000_000), 10**9) == ""
    assert line_on_copies(planned("zygote", 2), 4, task, host(5_000_000), 10**9) == ""
    arrays = FunctionTask(len, (torch.zeros(2_000_000),), {})
    assert line_on_copies(plan, 4, arrays, host(5_000_000), 10**9) == ""
    assert line_on_copies(plan, 4, task, host(5_000_000), 500_000) == "", "all that the process holds fits"


# --- the whole of it ------------------------------------------------------------------------------------------------


def waits_like_a_card(kind: str) -> float:
    """A run whose time passes in steps on a device; or one that comes to a bad end."""
    torch.manual_seed(7)
    total = 0.0
    accelerator = Accelerator()
    for step in range(20):
        with accelerator.accumulate():
            total += torch.rand(()).item()
            time.sleep(0.1)
        if step == 10 and kind == "crash":
            raise ValueError("eleven classes")
        if step == 10 and kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if step == 10 and kind == "hang":
            time.sleep(1000)
    return total


@pytest.mark.full
@pytest.mark.timed
@pytest.mark.timeout(400)
def test_twelve_runs_on_two_slots_take_half_the_time_of_twelve_single_runs() -> None:
    kinds = ["hang", *(f"good {at}" for at in range(5)), "crash", "memory", *(f"good {at}" for at in range(5, 9))]
    sweep(waits_like_a_card, kind=["warm"], cpu=True, folder="warm")
    began = time.monotonic()
    singles = {}
    for kind in kinds:
        options: dict[str, Any] = {"cpu": True, "seed": 0, "hang_timeout_s": 4.0, "setup": _SETUP, "check": False}
        singles[kind] = launch(waits_like_a_card, 1, (kind,), **options)
    one_by_one_s = time.monotonic() - began
    began = time.monotonic()
    runs = sweep(waits_like_a_card, kind=kinds, slots=2, cpu=True, hang_timeout_s=4.0)
    side_by_side_s = time.monotonic() - began
    assert sum(run.error is None for run in runs) == 9
    assert [run.value for run in runs] == [singles[kind].value for kind in kinds]
    assert side_by_side_s <= 1.15 * one_by_one_s / 2, f"{side_by_side_s:.1f} s against {one_by_one_s:.1f} s one by one"


_READS_DATA = """
import sys, time
import torch
import nbaccel

data = torch.ones(int(float(sys.argv[1]) * 1e6 / 4))

def reads(fold):
    total = float(data[fold::2].sum())
    time.sleep(2)
    return total

runs = nbaccel.sweep(reads, fold=range(4), slots=2, cpu=True, folder=sys.argv[1])
assert all(run.error is None for run in runs), runs
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_forked_runs_share_the_data_of_the_notebook(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_READS_DATA)
    little, much = (_peak_bytes_of(tmp_path, megabytes) for megabytes in (1, 801))
    assert much - little <= 1.2 * 800e6


def _peak_bytes_of(folder: Path, megabytes: int) -> float:
    """Return the most host memory that the script and its ranks had at once; shared pages count once."""
    import psutil

    sweeps = subprocess.Popen([sys.executable, "script.py", str(megabytes)], cwd=folder)
    most = 0.0
    try:
        while sweeps.poll() is None:
            try:
                family = [psutil.Process(sweeps.pid), *psutil.Process(sweeps.pid).children(recursive=True)]
            except psutil.Error:
                break
            most = max(most, sum(map(_proportional_bytes, family)))
            time.sleep(0.05)
    finally:
        sweeps.kill()
    assert sweeps.wait() == 0
    return most


def _proportional_bytes(process: Any) -> float:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
