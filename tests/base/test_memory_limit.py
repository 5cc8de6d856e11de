"""How full the memory was when an error was raised, under real limits and described ones."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from environments import REPOSITORY
from nbaccel.base import hardware, memory_limit as room
from nbaccel.base.events import Event, OutOfMemory, outlet
from nbaccel.base.hardware import MemoryInfo
from nbaccel.base.memory_limit import MemoryLimit, fullness, host_limit, is_shortage
from nbaccel.train.oom.microbatch.optimizer_guard import guarded_step

ONE_DNN = ["could not create a primitive", "could not execute a primitive", "could not create a memory object"]


def status(tmp_path: Path, **kilobytes: int) -> Path:
    """A file system whose /proc says so of this process."""
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = "".join(f"{name}:\t{size} kB\n" for name, size in kilobytes.items())
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\n{lines}")
    return tmp_path


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLIMIT_DATA is 1,000 kB."""
    limits = {resource.RLIMIT_DATA: 1000 * 1024, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(hardware, "usable_memory", lambda root: MemoryInfo(100, 50))


@pytest.mark.usefixtures("limited")
def test_what_the_failed_operation_had_freed_when_it_was_left_counts(tmp_path: Path) -> None:
    found = host_limit(status(tmp_path, VmPeak=5200, VmSize=5000, VmData=750))
    assert found == MemoryLimit(750 * 1024, 1000 * 1024, 950 * 1024)
    assert found.share == 0.95


@pytest.mark.usefixtures("limited")
def test_a_peak_that_was_beyond_the_limit_was_another_one(tmp_path: Path) -> None:
    found = host_limit(status(tmp_path, VmPeak=9000, VmSize=5000, VmData=750))
    assert found is not None
    assert found.share == 0.75


@pytest.mark.usefixtures("limited")
def test_without_such_a_file_the_machines_memory_is_what_is_known(tmp_path: Path) -> None:
    assert host_limit(tmp_path) == MemoryLimit(50, 100)


def test_a_process_that_cannot_even_look_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(os, "open", refuse)
    found = host_limit()
    monkeypatch.undo()
    assert found is not None
    assert found.share == 1.0


@pytest.mark.parametrize("text", ONE_DNN)
def test_an_error_of_a_library_is_about_memory_where_that_was_nearly_full(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "host_limit", lambda: MemoryLimit(99, 100))
    assert is_shortage(RuntimeError(text))
    monkeypatch.setattr(room, "host_limit", lambda: MemoryLimit(60, 100))
    assert not is_shortage(RuntimeError(text))
    monkeypatch.setattr(room, "host_limit", lambda: None)
    assert not is_shortage(RuntimeError(text))


@pytest.mark.parametrize("text", ONE_DNN)
def test_a_wrong_call_with_plenty_of_memory_is_not_about_memory(text: str) -> None:
    """This machine as it is; it has a tenth of its memory to spare."""
    error = RuntimeError(text)
    assert fullness(error) is not None
    assert not is_shortage(error)
    assert fullness(ValueError("expected 10 classes")) is None


class Fails:
    """Raises the error once; works from then on."""

    def __init__(self, text: str) -> None:
        self.errors = [RuntimeError(text)]

    def __call__(self, *args: Any) -> torch.Tensor:
        if self.errors:
            raise self.errors.pop()
        return torch.zeros((), requires_grad=True)


def take_step(fails: Fails) -> bool:
    seen: list[Event] = []
    with outlet(seen.append):
        guarded_step(torch.optim.SGD([torch.zeros(1)]), fails, "rank 0", 3)
    return [type(event) for event in seen] == [OutOfMemory]


@pytest.mark.parametrize("text", ONE_DNN)
def test_a_step_is_tried_again_where_memory_was_nearly_full_and_nowhere_else(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "host_limit", lambda: MemoryLimit(99, 100))
    assert take_step(Fails(text))
    monkeypatch.setattr(room, "host_limit", lambda: MemoryLimit(50, 100))
    with pytest.raises(RuntimeError, match=text):
        take_step(Fails(text))


def refusals(kind: str, dtype: str, **environ: str) -> list[dict[str, Any]]:
    """How a step of `kind` ended under each of many limits."""
    command = [sys.executable, str(REPOSITORY / "tests" / "refusals.py"), kind, dtype]
    output = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "dtype", "isa"),
    [
        pytest.param("linear", "bfloat16", "DEFAULT", marks=pytest.mark.full),  # minutes of one core
        ("recurrent", "float32", "DEFAULT"),
        *(
            pytest.param(kind, dtype, isa, marks=pytest.mark.full)
            for kind, dtype in (("linear", "float32"), ("linear", "bfloat16"), ("convolution", "bfloat16"))
            for isa in ("AVX512_CORE", "AVX2", "SSE41")
        ),
    ],
)
def test_under_real_limits_every_refusal_is_seen_whatever_it_was_that_did_not_fit(
    kind: str, dtype: str, isa: str
) -> None:
    """Which of them says nothing of memory, and where, differs with the processor."""
    ends = refusals(kind, dtype, ONEDNN_MAX_CPU_ISA=isa)
    refused = [end for end in ends if end["text"]]
    assert len(refused) > 10
    assert [end for end in refused if not end["memory"]] == []


@pytest.mark.slow
def test_a_wrong_call_under_a_limit_that_is_far_away_is_not_about_memory() -> None:
    program = (
        "import refusals; from nbaccel.base.memory_limit import is_shortage; refusals.limit_to(2_000_000_000); "
        "print(is_shortage(RuntimeError('could not create a primitive')))"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
