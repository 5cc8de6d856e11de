"""Tests on a real CUDA device: ``make gpu``. Each runs a program, or a kernel, in a process of its own.

A process that has used CUDA cannot fork ranks any more, and memory that one test leaves would be missing in the next:
so pytest's process starts `programs/` and touches no device itself. A program that is not done in time is told to
print the stacks of its threads, and killed. What programs find is kept as lines of JSON, see `facts`.

The groups, in the order in which they run: what would break the main job comes first, and none waits for another.

    G0 facts of the driver that everything else rests on        G3 out of memory, and how its errors read
    G1 launches from a kernel that did this or that before      G5 two ranks on one card, by gloo
    G6 two ranks by NCCL, on two cards or on one                G4 what the planner and `forward_backward` cost
    G7 models that are sharded over two ranks by NCCL           G2 one process: batches, values, saves, waits
    G8 models larger than a card                               G9 maps: many items, and ranks that start again
    G10 checks of cells, and trials of what makes them faster
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from environments import REPOSITORY, Environment
from gpu import facts, machine
from kernel.harness import RealKernel
from nbaccel.base.hardware import Survey

ORDER = ("G0", "G1", "G6", "G7", "G2", "G3", "G5", "G8", "G9", "G10", "G4")
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 120.0
"""Of one program, which on a card takes some ten seconds, most of them to load torch."""

_LEAST_S = 15.0

_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""As our extension has it: `torch.cuda.is_available()` then asks NVML, and the process can still be forked."""

_STACKS_S = 5.0
_TOOK_S = pytest.StashKey[float]()
_TAIL = 6000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of their groups; skipped, with the reason, where there is no device. By NVML: no CUDA context."""
    places = [index for index, item in enumerate(items) if _is_ours(item)]
    ours = sorted((items[index] for index in places), key=lambda item: ORDER.index(_group(item)))
    for index, item in zip(places, ours, strict=True):
        items[index] = item
    if ours and not Survey.take().gpus:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and NVML finds none here"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where the time is nearly over, skip what would not be done, so that the table is still printed."""
    takes = item.get_closest_marker("takes")
    if _is_ours(item) and _left_s() < max(_LEAST_S, 1.5 * (takes.args[0] if takes is not None else 0)):
        pytest.skip("the time is over (make gpu GPU_SECONDS=...); this is left for another call, by GPU_TESTS")


def _left_s() -> float:
    return float(os.environ.get(facts.ENDS_AT, "inf")) - time.time()


def _path() -> str:
    """The path for packages of a program or kernel: ours, and what this process was given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *([given] if given else [])])


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


def _group(item: pytest.Item) -> str:
    return str(getattr(item, "module").GROUP)  # noqa: B009  # an Item has none, a Function has


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep how a test ended, beside what it told."""
    report = yield
    took_s: float = item.stash.get(_TOOK_S, 0.0) + report.duration
    item.stash[_TOOK_S] = took_s
    path = os.environ.get(facts.FILE)
    if path is not None and (report.when == "call" or not report.passed):
        takes = item.get_closest_marker("takes")
        line = {
            "group": _group(item),
            "test": item.name,
            "outcome": report.outcome if report.when != "teardown" else "left something",
            "seconds": round(took_s, 2),
            "expected_s": takes.args[0] if takes is not None else None,
            "used_mb": [gpu.used_bytes // 10**6 for gpu in Survey.take().gpus],
            "why": _why(report),
        }
        facts.append(Path(path), line)
    return report


def _why(report: pytest.TestReport) -> str:
    """The sentence of a skip; the error of a failure, its last line first."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    return f"{message}\n{report.longreprtext[-_TAIL:]}"


@pytest.fixture(scope="session")
def about_the_machine() -> dict[str, Any]:
    return machine.about()


@pytest.fixture
def about_the_test(request: pytest.FixtureRequest, about_the_machine: dict[str, Any]) -> dict[str, Any]:
    return {"group": _group(request.node), "test": request.node.name, **about_the_machine}


@pytest.fixture(scope="session")
def told() -> dict[Any, Any]:
    """What programs have told, or why they did not: several tests look at what one program found."""
    return {}


@pytest.fixture
def program(tmp_path: Path, about_the_test: dict[str, Any], told: dict[Any, Any]) -> Callable[..., Any]:
    """``program("memory.py", "cycles", among=("cycles", "errors"), **environment)``: what that case found on the card.

    among: cases that run in one process, for whichever is asked for first; only that one by default.
    """

    def run(name: str, case: str, among: tuple[str, ...] = (), **environment: str) -> Any:
        cases = among or (case,)
        key = (name, cases, *environment.items())
        if key not in told:
            environ: dict[str, Any] = {facts.ABOUT: json.dumps(about_the_test), **environment}
            try:
                told[key] = run_program(name, "cuda", *cases, folder=tmp_path, **environ)
            except AssertionError as error:
                done = _told_so_far(tmp_path / "stdout")
                told[key] = {one: done.get(one, {facts.FAILED: str(error)}) for one in cases}
        return found_in(told[key], case)

    return run


def _told_so_far(path: Path) -> dict[str, Any]:
    """What the cases had found that were done before their program was killed."""
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(told := json.loads(line), dict):
                return told
    return {}


def found_in(told: dict[str, Any], case: str) -> Any:
    """What a case found.

    Raises:
        AssertionError: it raised; with its traceback.
    """
    found = told[case]
    if isinstance(found, dict) and facts.FAILED in found:
        raise AssertionError(found[facts.FAILED])
    return found


def run_program(name: str, *arguments: object, folder: Path, timeout_s: float = LIMIT_S, **environment: Any) -> Any:
    """What a program printed last, out of JSON.

    folder: for what it prints: a pipe would be held open by processes that it left.

    Raises:
        AssertionError: it failed, or was not done in time; with what it had printed, and where it was.
    """
    path = _path()
    out, err = folder / "stdout", folder / "stderr"
    timeout_s = min(timeout_s, max(_LEAST_S, _left_s()))
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(PROGRAMS / name), *map(str, arguments)],
            env={**os.environ, _CUDA_CHECK: "1", "PYTHONPATH": path, **environment},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            ended: object = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            ended = f"nothing: it was not done after {timeout_s:g} s, and the stacks are where it was"
            process.send_signal(signal.SIGABRT)  # faulthandler prints them
        finally:
            _end(process)
    said, complained = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
    call = " ".join([name, *map(str, arguments)])
    if ended != 0:
        raise AssertionError(f"{call} ended with {ended}\n{complained[-_TAIL:]}\n{said[-_TAIL:]}")
    return json.loads(said.strip().splitlines()[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Until the program and what it started in its session are gone."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def tell(about_the_test: dict[str, Any]) -> Callable[..., None]:
    """``tell("free", 7, "MB")``: a fact that the test itself has found."""
    began = time.monotonic()

    def fact(name: str, value: Any, unit: str = "") -> None:
        line = {"name": name, "value": value, "unit": unit, "seconds": round(time.monotonic() - began, 3)}
        if (path := os.environ.get(facts.FILE)) is not None:
            facts.append(Path(path), about_the_test | line)

    return fact


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[RealKernel]:
    """A fresh kernel of this Python, in which nothing has been imported."""
    path = _path()
    made = RealKernel(Environment("here", Path(sys.executable)), tmp_path, PYTHONPATH=path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What lets two ranks talk by NCCL here: "two cards", or "one card" that NCCL takes for two machines.

    Skips the test, with a sentence, where neither does.
    """
    if len(Survey.take().gpus) > 1:
        return "two cards"
    found = _one_card(tmp_path_factory.mktemp("one_card"))
    if not found.get("works"):
        pytest.skip(f"needs two cards: on one, NCCL did not take ranks of two NCCL_HOSTID for two: {found}")
    return "one card"


_ONE_CARD_S = 60.0


def _one_card(folder: Path) -> dict[str, Any]:
    environ: dict[str, Any] = {facts.ABOUT: json.dumps({"group": "G0", "test": "test_two_ranks_can_talk_by_nccl_here"})}
    try:
        told = run_program("driver.py", "cuda", "one_card", folder=folder, timeout_s=_ONE_CARD_S, **environ)
    except AssertionError as error:
        return {"works": False, "why": str(error)[-_TAIL:]}
    found: dict[str, Any] = told["one_card"]
    return found
