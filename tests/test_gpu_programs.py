"""What `make gpu` runs on a card, rehearsed on the host: programs, kernels, facts, and the sentences of a lack.

Programs that have never met a card are full of slips; here each of them runs, with the CPU for a device, gloo for NCCL,
and a `MemLimit` for a card's memory. What streams, NCCL and a driver do is not shown. Cases run in forks of this
process, which has torch already, or here where they fork themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from environments import NEWEST, REPOSITORY
from gpu import checks, conftest as on_a_card, facts, launches, machine
from gpu.launches import HISTORIES
from kernel.harness import RealKernel
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.launching import plan
from nbaccel.testing import run_ranks
from nbaccel.train import setup

PROGRAMS = on_a_card.PROGRAMS
FORKS = ("ranks", "pair", "sharded", "maps")
"""Programs that start ranks, which a rank may not."""


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """What a case of a program finds on the host."""
    monkeypatch.syspath_prepend(str(PROGRAMS))

    def run(name: str, case: str) -> Any:
        function = importlib.import_module(name).CASES[case]
        return function("cpu") if name in FORKS or case == "one_card" else run_ranks(1, function, "cpu")[0]

    return run


# --- programs ---------------------------------------------------------------------------------------------------------


def test_the_driver_is_asked_in_processes_and_in_their_forks(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("driver", "nvml")["cuinit_in_fork"] == 100
    counted = rehearse("driver", "counted")
    assert (counted["in_a_fork"], counted["why_forks_fail"]) == (2, None)
    assert rehearse("driver", "cuinit")["has_uvm"] is False
    after = rehearse("driver", "backward")
    assert after["cpu_backward"] == "done"
    assert after["autograd_threads"] == []
    assert after["fork"] == {"cuinit": 100, "is_in_bad_fork": False, "backward": "", "on_device": ""}
    assert rehearse("driver", "pinned")["pin_memory"].startswith("RuntimeError: ")
    assert rehearse("driver", "contexts")["grew_mb"] == []
    assert rehearse("driver", "machine")["python"] == sys.version.split()[0]


@pytest.mark.slow
def test_two_ranks_meet_as_they_would_on_one_card(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("driver", "one_card")["works"]


def test_a_question_that_hangs_or_kills_a_fork_has_an_answer(
    rehearse: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = importlib.import_module("driver")
    monkeypatch.setattr(driver, "_CHILD_S", 0.05)
    assert driver.in_a_fork(lambda: os.read(os.pipe()[0], 1)) == "hung for 0.05 s"
    monkeypatch.setattr(driver, "_CHILD_S", 5.0)
    assert driver.in_a_fork(lambda: os._exit(1)) == "died"
    assert driver.in_a_fork(lambda: 1 // 0).startswith("ZeroDivisionError: ")


def test_batches_of_every_kind_arrive(rehearse: Callable[[str, str], Any]) -> None:
    opaque = rehearse("one_process", "opaque")
    assert (opaque["batches"], opaque["wrong"]) == (64, 0)
    assert rehearse("one_process", "epochs")["growth"] == 0
    slow = rehearse("one_process", "slow_consumer")
    assert slow["arrived"] == slow["expected"]
    refilled = rehearse("one_process", "refilled")
    assert refilled["arrived"] == refilled["expected"]


def test_values_and_saves_are_those_of_their_moment(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("one_process", "readings")["wrong"] == []
    saves = rehearse("one_process", "saves")
    assert saves["tensors"] >= 24
    assert saves["wrong"] == 0


def test_precisions_are_those_of_plain_torch(rehearse: Callable[[str, str], Any]) -> None:
    off = rehearse("one_process", "precisions")
    assert len(off) == 5
    assert set(off.values()) == {0.0}


def test_waits_are_counted_step_by_step(rehearse: Callable[[str, str], Any]) -> None:
    """On the host a fused optimizer's counters are read too, and every loss."""
    waits = rehearse("one_process", "waits")
    assert set(waits) == set(importlib.import_module("gpu.test_g2_one_process").MOST_WAITS)
    assert waits["raw, fp16"] == waits["raw, no"] + 1
    assert waits["prepared, fp16"] == waits["prepared, no"] + 1


def test_models_larger_than_a_card_compute_what_plain_ones_do(rehearse: Callable[[str, str], Any]) -> None:
    for case in ("host", "disk"):
        found = rehearse("device_maps", case)
        assert set(found["off"]) == {0.0}
    assert rehearse("device_maps", "memory")["blocks"] == 0
    for case in ("cards", "pairs"):
        assert rehearse("device_maps", case) == {"cards": 0, "off": []}


def test_adapters_beside_four_bits_are_trained_saved_and_resumed(rehearse: Callable[[str, str], Any]) -> None:
    found = rehearse("quantised", "trained")
    assert not found["is_real"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["off"] == [0.0] * 3
    assert found["base"]
    assert len(found["names"]) == found["wanted"]


@pytest.mark.slow
@pytest.mark.usefixtures("launcher")
def test_items_are_answered_though_one_breaks_the_device(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("maps", "short")["failed"] == {}
    broken = rehearse("maps", "broken")
    assert list(broken["failed"]) == [13]
    assert "the process ended 3 times" in broken["failed"][13]
    assert rehearse("maps", "used")["off"] < 1e-3


@pytest.mark.slow
def test_shortages_leave_nothing_and_read_as_shortages(rehearse: Callable[[str, str], Any]) -> None:
    cycles = rehearse("memory", "cycles")
    assert (set(cycles["allocated"]), cycles["counted"], cycles["works"]) == ({0}, 20, True)
    errors = rehearse("memory", "errors")
    assert all(error["is_retry"] for error in errors["refused"])
    assert [need for need, at in errors["worked"].items() if at is None] == ["a block that is larger than what is left"]
    segments = rehearse("memory", "segments")
    assert segments["failed"]
    assert segments["losses"] == pytest.approx(segments["expected"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.full
def test_functions_are_compiled_while_somebody_holds_the_memory(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("memory", "compiled")["after"]


@pytest.mark.slow
def test_two_ranks_share_a_device_and_one_is_short(rehearse: Callable[[str, str], Any]) -> None:
    roomy, tight = rehearse("ranks", "step")
    assert roomy["weights"] == tight["weights"]
    assert (roomy["failed"], bool(tight["failed"])) == ([], True)
    roomy, tight = rehearse("ranks", "function")
    assert roomy == tight
    assert len(tight["tried"]) > 1
    assert max(rank["off"] for rank in rehearse("ranks", "plain")) <= 1e-5


@pytest.mark.slow
def test_one_rank_fails_and_its_peer_is_told(rehearse: Callable[[str, str], Any]) -> None:
    for place, (peer, cause) in (rehearse("pair", "early") | rehearse("pair", "late")).items():
        assert (peer["fired"], cause["fired"]) == (0, 1), place
        assert peer["weights"] == cause["weights"], place
        assert (place not in ("forward", "backward")) or peer["attempts"][0]["steps"] == 1
    soaked = rehearse("pair", "soak")
    assert min(soaked["ooms"]) >= 2
    assert soaked["digests"][0] == soaked["digests"][1]
    assert soaked["off"] <= 1e-5


@pytest.mark.full
def test_sharded_models_go_on_when_one_rank_is_short(rehearse: Callable[[str, str], Any]) -> None:
    assert rehearse("sharded", "ahead")["off"] <= 1e-6
    told = rehearse("sharded", "short")
    roomy, tight = told["step"]
    assert roomy["losses"] == tight["losses"]
    assert (roomy["failed"], bool(tight["failed"])) == ([], True)
    roomy, tight = told["function"]
    assert roomy == tight
    assert len(tight["tried"]) > 1
    assert len({rank["size"] for rank in told["search"]}) == 1


@pytest.mark.slow
@pytest.mark.full
def test_sharded_models_are_trained_counted_and_repeated(rehearse: Callable[[str, str], Any], launcher: None) -> None:
    repeated = rehearse("sharded", "repeated")
    assert max(found["off"] for found in repeated.values()) <= 1e-6, repeated
    assert sum(sum(found["fired"]) for found in repeated.values()) == 11
    assert not [found for found in rehearse("sharded", "conform").values() if found["other"]]
    assert all(rank["estimated_mb"] for rank in rehearse("sharded", "memory")["ddp, no"])
    for found in rehearse("sharded", "alone").values():
        assert "in _asked_alone" in found["error"]


@pytest.mark.slow
@pytest.mark.full
def test_runs_end_however_a_rank_ends(tmp_path: Path) -> None:
    ended = on_a_card.run_program("pair.py", "cpu", "finally", "killed", "hang", folder=tmp_path, timeout_s=50)
    assert ended["finally"]["error"].startswith("ValueError: on purpose")
    assert "rank 1 of 2 was killed by SIGKILL" in ended["killed"]["error"]
    assert "rank 1 seems to hold up the others" in ended["hang"]["error"]


@pytest.mark.slow
def test_the_exchange_is_timed_and_its_group_ends(rehearse: Callable[[str, str], Any]) -> None:
    buckets = rehearse("cost", "buckets")
    assert buckets["off"] <= 1e-6
    assert buckets["ratio"] > 0
    assert rehearse("cost", "group")["totals"] == [1000, 1000, 1000]


@pytest.mark.slow
@pytest.mark.full
def test_a_planner_finds_the_size_that_fits(rehearse: Callable[[str, str], Any]) -> None:
    found = rehearse("cost", "planner")
    assert len(found["tried"]) <= 7
    assert (found["fits"], found["more_fits"]) == (True, False)


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
def test_loops_of_one_line_end_in_two_ranks_as_in_one_process(loop: str, most_off: float, tmp_path: Path) -> None:
    ran = on_a_card.run_program("one_line.py", "cpu", loop, folder=tmp_path, timeout_s=50, CUDA_VISIBLE_DEVICES="")
    told = ran[loop]
    assert told["off"] <= most_off, told
    if loop == "carried":
        assert (told["there"], told["here"], told["is_one"]) == ([["cpu"], ["cpu"]], ["cpu"], True)
        return
    assert told["apart"] == 0, told
    assert told["is_split"] == [True, True]
    assert loop != "scaled" or told["printed"][0][:3] == [2.0**16, 2.0**16, 2.0**15]


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    """One for all: on the host no history decides how ranks start."""
    made = RealKernel(NEWEST, tmp_path_factory.mktemp("kernel"))
    made.do(f"import sys; sys.path[:0] = [{str(PROGRAMS)!r}, {str(REPOSITORY)!r}]")
    for start in ("fork", "zygote"):  # what lives as long as it is there now
        made.do(f"import nbaccel; nbaccel.launch(int, 1, cpu=True, start_method={start!r})")
    yield made
    made.close()


OFTEN = ("clean", "optimizer")
SELDOM = [name for name, history in HISTORIES.items() if not history.needs_card and name not in OFTEN]


@pytest.mark.full
@pytest.mark.parametrize("histories", [pytest.param(OFTEN, id="some"), pytest.param(SELDOM, id="others")])
def test_notebooks_of_every_history_train_as_on_the_host(one_kernel: RealKernel, histories: list[str]) -> None:
    for history in histories:
        trained = launches.trained(one_kernel, history, "cpu")
        assert trained.off <= 1e-5, history
        assert trained.start == "fork"


@pytest.mark.slow
@pytest.mark.full
def test_a_notebook_itself_trains_as_on_the_host(one_kernel: RealKernel) -> None:
    trained = launches.inline(one_kernel, "cpu")
    assert (trained.start, trained.off) == ("inline", 0.0)
    lent = launches.lent(one_kernel, "cpu")
    assert lent["where"] == ["cpu", "cpu"]
    assert abs(lent["grew"] - 1) <= 1e-6


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(120)
def test_ranks_that_stay_give_back_what_they_have_and_interrupts_come_through(one_kernel: RealKernel) -> None:
    told = launches.staying(one_kernel, "cpu")
    assert told["pulled"] == [[0.0] * 6, [1.0] * 6]
    assert "out of step since Cell In[" in told["after"][0], "not since the pull"
    assert "loss" in launches.interrupted(one_kernel, "cpu")["anew"]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_label_out_of_range_is_an_error_of_the_cell(one_kernel: RealKernel, ranks: int) -> None:
    told = launches.mislabelled(one_kernel, "cpu", ranks)
    assert told["class"] == "IndexError"
    assert "Target 1000 is out of bounds" in told["error"]
    assert "cross_entropy(net(a), labels)" in told["error"]
    assert f"rank {ranks - 1}" in told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", pytest.param("zygote", marks=pytest.mark.full)])
def test_a_check_measures_and_touches_nothing(one_kernel: RealKernel, start: str) -> None:
    found = checks.checked(one_kernel, start, "cpu")
    assert "red: " not in found["report"]
    assert "ok: the cell comes to its end" in found["report"]
    assert found["after"] == found["before"]
    assert found["files"] == []
    assert found["memory"] is None, "it is the host's"
    assert {"forward", "backward"} <= found["parts"].keys()
    assert found["parts"].keys() <= {"loader", "forward", "backward", "communication", "optimizer", "your own code"}
    assert 90 <= sum(found["parts"].values()) <= 103


def test_the_memory_line_of_a_device_is_read() -> None:
    line = "ok: memory at the longest batch (size 52): 960.0 MB to 1.1 GB of 16.0 GB on the device, where CUDA itself"
    assert checks._memory(line) == [960e6, 1.1e9, 16e9]


@pytest.mark.slow
@pytest.mark.full
def test_checks_find_a_longest_batch_and_compare_gradients(one_kernel: RealKernel) -> None:
    (red,) = checks.short(one_kernel, "cpu")["red"]
    assert red.startswith("red: line 7")
    assert "out of memory at the longest batch (size " in red
    lines = checks.compared(one_kernel, "cpu")["lines"]
    assert "ok: two runs gave the same results" in lines
    assert any(line.startswith("ok: gradients of 2 ranks are those of one process") for line in lines)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(120)
def test_changes_of_a_training_are_tried(one_kernel: RealKernel) -> None:
    found = checks.tried(one_kernel, "cpu", "15s")
    assert "samples/s" in found["the cell as it is"][0]
    assert {"fused=True", "channels_last", "model.compile()"} <= found.keys()
    assert all(columns[0] for columns in found.values())


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_stop_and_a_kill_are_timed(tmp_path: Path) -> None:
    kernel = RealKernel(NEWEST, tmp_path)
    try:
        launches.begin(kernel, "cpu")
        assert len(set(launches.stopped(kernel, "cpu")["steps"])) == 1
        killed = launches.killed(kernel, "cpu")
        assert (killed["survivors"], killed["left"]) == ({}, [])
        assert killed["back_s"] is not None
    finally:
        kernel.close()


CARD = Gpu(0, "GPU-1", "Tesla T4", 16 * 10**9, compute_capability=(7, 5))


def test_two_ranks_may_have_the_one_card_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    one_card = importlib.import_module("one_card")
    choosing = one_card.who_chooses_devices()
    assert plan in choosing
    for module, name in (*((module, "choose_devices") for module in choosing), (setup, "setup_rank")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    ours = setup.setup_rank
    survey = replace(Survey.take(), gpus=(CARD, replace(CARD, index=1, uuid="GPU-2")))
    monkeypatch.setattr(Survey, "take", lambda: survey)
    one_card.let_ranks_share("cuda")
    assert setup.setup_rank is ours  # two cards: each rank has its own
    survey = replace(survey, gpus=(CARD,))
    one_card.let_ranks_share("cuda")
    choose: Any = vars(plan)["choose_devices"]
    devices = choose(2, None, False, survey)
    assert (devices.num_processes, devices.gpus, devices.environ()) == (2, (CARD, CARD), {})
    assert all(vars(module)["choose_devices"] is choose for module in choosing)
    assert setup.setup_rank is not ours


def test_ranks_on_one_card_are_machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    one_card = importlib.import_module("one_card")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    one_card.enter("cuda")
    assert os.environ["NCCL_HOSTID"] == "nbaccel-rank-1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_program_that_hangs_is_ended_with_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nprint('so far', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(on_a_card, "PROGRAMS", tmp_path)
    with pytest.raises(AssertionError, match=r"it was not done after 0\.5 s") as caught:
        on_a_card.run_program("sleeps.py", folder=tmp_path, timeout_s=0.5)
    assert 'sleeps.py", line 3 in <module>' in str(caught.value)
    assert "so far" in str(caught.value)


def test_what_a_program_found_before_it_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text(
        "from gpu.facts import fact\nfact('free', 7, 'MB')\nraise SystemExit('no more')\n"
    )
    monkeypatch.setattr(on_a_card, "PROGRAMS", tmp_path)
    kept: dict[str, Any] = {
        facts.FILE: str(tmp_path / "facts.jsonl"),
        facts.ABOUT: json.dumps({"test": "test_it", "torch": "2.13"}),
    }
    with pytest.raises(AssertionError, match=r"fails\.py ended with 1\nno more"):
        on_a_card.run_program("fails.py", folder=tmp_path, **kept)
    (line,) = facts.read(tmp_path / "facts.jsonl")
    assert (line["test"], line["torch"], line["name"], line["value"], line["unit"]) == (
        "test_it",
        "2.13",
        "free",
        7,
        "MB",
    )
    assert line["seconds"] >= 0


def test_a_case_that_raises_does_not_keep_the_next_one_from_running(capsys: pytest.CaptureFixture[str]) -> None:
    def short(device: str) -> dict[str, Any]:
        return {"failed": [400], "device": device}  # a case may find failures

    def broken(device: str) -> None:
        raise ValueError("on purpose")

    facts.tell_cases({"broken": broken, "short": short}, ["cpu", "broken", "short"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert on_a_card.found_in(told, "short") == {"failed": [400], "device": "cpu"}
    with pytest.raises(AssertionError, match="ValueError: on purpose"):
        on_a_card.found_in(told, "broken")


def test_a_line_that_a_dying_process_left_half_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    facts.append(path, {"name": "a"})
    with path.open("a") as file:
        file.write('{"name": "b", "va')
    assert facts.read(path) == [{"name": "a"}]
    assert facts.read(tmp_path / "none") == []


def _collected(*arguments: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def test_tests_of_a_card_run_in_the_order_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(on_a_card.__file__).parent
    items: list[Any] = [
        SimpleNamespace(path=path, module=SimpleNamespace(GROUP=group), name=name)
        for path, group, name in (
            (here / "test_g4.py", "G4", "a"),
            (Path("elsewhere.py"), "", "b"),
            (here / "test_g6.py", "G6", "c"),
            (here / "test_g0.py", "G0", "d"),
            (here / "test_g6.py", "G6", "e"),
        )
    ]
    monkeypatch.setattr(Survey, "take", lambda: replace(Survey(), gpus=(CARD,)))
    on_a_card.pytest_collection_modifyitems(items)
    assert [item.name for item in items] == ["d", "b", "c", "e", "a"]


@pytest.mark.slow
@pytest.mark.full
def test_every_group_is_collected_in_its_turn() -> None:
    files = [line.partition("::")[0] for line in _collected("--collect-only") if "::" in line]
    groups = dict.fromkeys(Path(file).name.split("_")[1].upper() for file in files)
    assert list(groups) == list(on_a_card.ORDER)


def test_all_tests_of_a_card_say_what_they_take_and_sum_up_to_fifteen_minutes_at_most() -> None:
    total = 0.0
    for path in sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py")):
        module = importlib.import_module(f"gpu.{path.stem}")
        assert module.GROUP in on_a_card.ORDER
        for name, test in vars(module).items():
            if not name.startswith("test_"):
                continue
            marks = {mark.name: mark for mark in test.pytestmark}
            assert "takes" in marks, f"{path.name}: {name}"
            times = len(marks["parametrize"].args[1]) if "parametrize" in marks else 1
            total += times * marks["takes"].args[0]
    assert 300 <= total <= 905, total


def test_the_table_tells_outcomes_beside_what_was_expected() -> None:
    about = {"group": "G0", "test": "test_it"}
    table = facts.table(
        [
            {"machine": {}},
            about | {"name": "free", "value": "x" * 200, "unit": "MB"},
            about | {"outcome": "failed", "seconds": 2.0, "expected_s": 8, "why": "a sentence\nand more"},
            {"group": "G6", "test": "test_two", "outcome": "skipped", "seconds": 0.0, "expected_s": None, "why": "one"},
        ]
    )
    assert table.splitlines() == [
        "G0 failed     2.0 s (8)  test_it",
        f'     free = "{"x" * 98}… MB',
        "     a sentence",
        "G6 skipped    0.0 s  test_two",
        "     one",
        "1 failed, 1 skipped, 2 s",
    ]


# --- the machine ------------------------------------------------------------------------------------------------------


def _torch(cuda: str | None, devices: int) -> Any:
    return SimpleNamespace(
        __version__="2.10.0", version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(device_count=lambda: devices)
    )


@pytest.fixture
def with_driver(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    return tmp_path


def _lack(root: Path, *absent: str, cuda: str | None = "12.8", devices: int = 1, purpose: str = "tests") -> str:
    return machine.what_is_missing(
        purpose, root, lambda name: None if name in absent else name, lambda: _torch(cuda, devices)
    )


def test_a_machine_without_a_driver_is_told_first(tmp_path: Path) -> None:
    assert _lack(tmp_path, "torch").startswith("no CUDA device: there is no NVIDIA driver on this machine")


def test_what_a_machine_lacks_is_a_sentence_with_the_next_move(with_driver: Path) -> None:
    assert _lack(with_driver) == ""
    assert "has no torch" in _lack(with_driver, "torch")
    assert "torch 2.10.0 of " in _lack(with_driver, cuda=None)
    assert "was built without CUDA" in _lack(with_driver, cuda=None)
    assert "torch 2.10.0 (CUDA 12.8) finds none here" in _lack(with_driver, devices=0)


def test_missing_packages_are_named_with_the_line_that_leaves_torch_alone(with_driver: Path) -> None:
    told = _lack(with_driver, "pytest", "ipykernel")
    assert told.startswith("missing: ipykernel, pytest>=8. This installs them and leaves torch alone:")
    assert told.endswith(f"{sys.executable} -m pip install ipykernel 'pytest>=8'")
    assert "torch" not in told.splitlines()[-1]
    assert _lack(with_driver, "pytest", purpose="benchmarks") == ""


@pytest.mark.parametrize("target", ["gpu", "bench-gpu"])
def test_make_ends_at_once_where_there_is_no_card(target: str) -> None:
    if any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg")):
        pytest.skip("there is a driver here")
    make = shutil.which("make")
    assert make is not None
    ended = subprocess.run(
        [make, "-C", str(REPOSITORY), target, f"GPU_PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "no CUDA device: there is no NVIDIA driver on this machine" in ended.stderr
