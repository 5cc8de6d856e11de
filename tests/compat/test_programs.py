"""Programs in Accelerate's spelling: each file of `tests/programs` with one word changed, `accelerate` to `nbaccel`.

Every program answers with numbers. They are the same however it is started with as many ranks, and the same as the
real accelerate gives, but for the differences on purpose that `DIFFERENCES` names.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from environments import REPOSITORY
from nbaccel import launch, notebook_launcher
from nbaccel.launching.launcher import Launcher
from nbaccel.testing import run_ranks

PROGRAMS = REPOSITORY / "tests" / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))

NEEDS = {"lora": "peft"}
"""Packages beyond those that every development environment has."""

DIFFERENCES = {
    "accumulation": ("short", "a short last window weighs one over its own length, not one over four"),
    "cycled": ("after_the_end", "the first window after the end of the data is a whole one, not its first batch alone"),
    "resume": ("is_equal", "after a stop inside an epoch dropout goes on with the numbers it would have drawn"),
    "save_hooks": ("files", "what the optimizer and the generators save has names and formats of its own"),
}
"""Where answers differ on purpose: the entry, and what ours does instead of Accelerate's."""

every_program = pytest.mark.parametrize("name", NAMES)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def prepared(ready_launcher: Launcher) -> None:
    """Load once, before anything forks, what every program would load; and have the one launcher."""
    for module in ("torch._dynamo", "sklearn.datasets", "sklearn.model_selection", "accelerate", *NEEDS.values()):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)


def source(name: str, library: str = "nbaccel") -> str:
    """The program, importing from `library`."""
    text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    return re.sub(r"^(from|import) accelerate\b", rf"\1 {library}", text, flags=re.MULTILINE)


def answer(name: str, library: str = "nbaccel") -> Any:
    """What the program says, as JSON would carry it."""
    program = types.ModuleType(name)
    exec(compile(source(name, library), str(PROGRAMS / f"{name}.py"), "exec"), program.__dict__)
    return json.loads(json.dumps(program.main()))


def in_a_rank(name: str, library: str, has_launcher: bool) -> Any:
    gc.freeze()  # else the programs' own collections would copy the test process, page by page
    warnings.simplefilter("ignore")  # accelerate's advice on CPU training
    if not has_launcher:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(variable, None)
    if library == "accelerate":
        # Destroying a gloo group while DDP models are alive hangs now and then (torch 2.13); the rank ends anyway.
        torch.distributed.destroy_process_group = lambda *group: None
    return answer(name, library)


@functools.cache
def answers(name: str, world_size: int, library: str = "nbaccel", has_launcher: bool = True) -> Any:
    """Rank 0's answer."""
    if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test` installs it")
    return run_ranks(world_size, in_a_rank, name, library, has_launcher)[0]


def assert_alike(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Equal, numbers to seven digits: sums of floats may be taken in another order on another machine."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_alike(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(mine, other, f"{where}[{index}]")
    elif isinstance(ours, float):
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-7), f"{where}: {ours} and {theirs}"
    else:
        assert ours == theirs, f"{where}: {ours!r} and {theirs!r}"


@pytest.mark.sample(4)
@every_program
def test_a_program_says_the_same_alone_and_where_notebook_launcher_calls_it(name: str) -> None:
    assert_alike(launched(name, 1), answers(name, 1, has_launcher=False))


@pytest.mark.parametrize("name", ["accumulation", "resume"])
def test_a_program_says_the_same_alone_and_in_one_rank_of_a_launcher(name: str) -> None:
    assert_alike(launch(answer, 1, (name,)).value, answers(name, 1, has_launcher=False))


SPELLINGS = {
    "averaged",
    "by_step",
    "callbacks",
    "cycled",
    "new_token",
    "padded",
    "penalty",
    "reward_model",
    "save_hooks",
}
"""Programs whose ways to spell things do not depend on how their ranks came about."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SPELLINGS else []) for name in NAMES]
)
def test_two_ranks_say_the_same_under_every_launcher(name: str) -> None:
    assert_alike(launched(name, 2), answers(name, 2))


@functools.cache
def launched(name: str, num_processes: int) -> Any:
    def train() -> Any:
        warnings.simplefilter("ignore")
        return answer(name)

    if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test` installs it")
    return notebook_launcher(train, num_processes=num_processes)


@pytest.mark.sample(13)
@every_program
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_numbers_are_those_of_accelerate(name: str, world_size: int) -> None:
    pytest.importorskip("accelerate")
    has_launcher = world_size > 1
    ours = answers(name, world_size, "nbaccel", has_launcher)
    theirs = answers(name, world_size, "accelerate", has_launcher)
    entry, reason = DIFFERENCES.get(name, (None, ""))
    if entry is not None:
        assert ours[entry] != theirs[entry], f"no longer different: {reason}"
    assert_alike(*({key: value for key, value in said.items() if key != entry} for said in (ours, theirs)))


@every_program
def test_changing_one_word_is_all_that_was_done(name: str) -> None:
    before, after = (source(name, library).splitlines() for library in ("accelerate", "nbaccel"))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed
    assert all(old.replace("accelerate", "nbaccel", 1) == new and "import" in new for old, new in changed)
    assert "accelerate" not in re.sub(r'""".*?"""|#.*', "", "\n".join(after), flags=re.DOTALL)


UNDER_TORCHRUN = """
import json, os, runpy, sys
said = runpy.run_path(sys.argv[1])["main"]()
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump(said, file)
os._exit(0)  # a process that used gloo and DDP aborts at its end now and then (torch 2.13, plain DDP too)
"""


OF_ITS_RANK = {"averaged", "by_step", "callbacks", "cycled", "penalty", "resume", "save_hooks", "tracking"}
"""Programs that tell what their rank alone saw or wrote: losses of its batches, hooks that rank 0 calls."""

under_torchrun = [
    pytest.param(name, marks=() if name in ("classification", "inference") else pytest.mark.soak) for name in NAMES
]


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", under_torchrun)
def test_torchrun_says_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(UNDER_TORCHRUN, encoding="utf-8")
    (tmp_path / "program.py").write_text(source(name), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "start.py", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    if name not in OF_ITS_RANK:
        assert_alike(first, second)
    assert_alike(first, answers(name, 2))


# What the programs are about, in numbers that no library decides.

Checks = dict[str, Callable[[Any, int], None]]


def _classification(said: Any, world_size: int) -> None:
    assert [epoch["samples"] for epoch in said["history"]] == [333] * 3
    assert said["history"][-1]["accuracy"] > 0.85


def _language_model(said: Any, world_size: int) -> None:
    assert len(said["losses"]) == 2 * 6
    assert said["losses"][-1] < said["losses"][0] - 0.5


def _cross_validation(said: Any, world_size: int) -> None:
    assert sum(said["counts"]) == 501


def _early_stopping(said: Any, world_size: int) -> None:
    epochs, steps = said["stopped"][0]
    assert said["stopped"] == [[epochs, steps]] * world_size
    assert steps == epochs * 8 // world_size
    assert epochs < 50


def _resume(said: Any, world_size: int) -> None:
    assert said["is_equal"]
    assert len(said["first"]) == 12 // world_size + 3


def _inference(said: Any, world_size: int) -> None:
    # Half of each prompt, every letter moved on by one.
    assert said["texts"] == ["bmq", "cfu", "hbn", "efm", "fqtj", "{fu", "fu"]
    assert [seed for _, seed in said["pairs"]] == list(range(7))


def _profiling(said: Any, world_size: int) -> None:
    assert said["handled"] == [True, True]
    assert said["traces"] == [f"profile_{rank}.json" for rank in range(world_size)]


def _local_sgd(said: Any, world_size: int) -> None:
    assert said["ranks_agree"]


def _tracking(said: Any, world_size: int) -> None:
    assert [row[0] for row in said["rows"]][-1] == "by hand"
    assert len(said["rows"]) == 2 * (8 // world_size // 2 + 1) + 1
    assert said["finished"]
    assert said["config"] == {"lr": 0.1, "epochs": 2}


def _lora(said: Any, world_size: int) -> None:
    assert said["base_is_kept"]
    assert len(said["adapters"]) == 4


def _accumulation(said: Any, world_size: int) -> None:
    assert said["whole"]["synced"] == [False, False, False, True] * 4
    assert said["short"]["synced"] == [False, False, False, True, False, True] * 2
    assert said["short"]["dtypes"] == ["torch.float32"]


def _export(said: Any, world_size: int) -> None:
    assert said["same"]
    assert said["files"] == ["model.safetensors", "plain.pt"]
    assert said["keys"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def _gan(said: Any, world_size: int) -> None:
    assert len(said["losses"]) == 3
    assert 0 < said["radius"] < 3


def _cycled(said: Any, world_size: int) -> None:
    assert said["synced"] == [False, True] * (6 // world_size)
    assert said["after_the_end"] == [False, True, False]


def _save_hooks(said: Any, world_size: int) -> None:
    assert said["same"]
    assert said["seen"] == ["Denoiser", "TextEncoder"]
    assert not [name for name in said["files"] if name.startswith("model")]  # the hook took them


def _new_token(said: Any, world_size: int) -> None:
    assert said["others_are_kept"]
    assert said["moved"] > 0.1
    assert len(said["losses"]) == 3 * 8 // world_size


def _by_step(said: Any, world_size: int) -> None:
    updates = 2 * 16 // world_size // 2
    assert [run["completed"] for run in said.values()] == [updates] * 3
    for run in (said["by_step"], said["by_epoch"]):
        assert run["losses"] == said["whole"]["losses"][-len(run["losses"]) :]
        assert run["lr"] == said["whole"]["lr"]
    assert len(said["by_step"]["losses"]) < len(said["by_epoch"]["losses"]) == 16 // world_size


def _padded(said: Any, world_size: int) -> None:
    assert [(epoch["texts"], epoch["tokens"]) for epoch in said["history"]] == [(13, said["expected"])] * 3
    assert said["history"][-1]["right"] == said["expected"]


def _callbacks(said: Any, world_size: int) -> None:
    assert [seen for _, seen in said["history"]] == [70] * 3
    assert said["is_mine"]


def _penalty(said: Any, world_size: int) -> None:
    assert len(said["losses"]) == 3 // world_size
    assert len(said["penalties"]) == 2 * math.ceil(3 // world_size / 2)


def _averaged(said: Any, world_size: int) -> None:
    assert said["sizes"] == {"first": 8 // world_size, "batches": 10}
    assert said["went_back"] == 5


def _reward_model(said: Any, world_size: int) -> None:
    assert sorted(said["order"]) == list(range(64))
    assert said["ranks"] == list(range(world_size))
    assert said["distributed"] == ("NO" if world_size == 1 else "MULTI_CPU")
    assert said["moments"] == pytest.approx([0, 1], abs=1e-6)


def _streamed(said: Any, world_size: int) -> None:
    assert said["losses"][-1] < said["losses"][0]
    assert sum(said["counts"]) == pytest.approx(5 * 2 * 4 * world_size * 7 * 0.8, rel=0.1)


CHECKS: Checks = {name: check for name in NAMES if (check := globals().get(f"_{name}"))}


@pytest.mark.parametrize("world_size", [1, 2])
@every_program
def test_what_a_program_says_is_true(name: str, world_size: int) -> None:
    CHECKS[name](answers(name, world_size, has_launcher=world_size > 1), world_size)
