"""What will keep a GPU from computing, one sentence each, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nbaccel.base.hardware import ComputeMode, Gpu
from nbaccel.launching import gpu_trouble
from nbaccel.launching.gpu_trouble import TorchBuild, before_a_run, troubles

GB = 10**9
T4 = Gpu(0, "GPU-1", "Tesla T4", 16 * GB, compute_capability=(7, 5))
P100 = Gpu(1, "GPU-2", "Tesla P100-PCIE-16GB", 16 * GB, compute_capability=(6, 0))
CU128 = TorchBuild("2.10.0+cu128", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))


def said(*gpus: Gpu, build: TorchBuild | None = CU128, **names: str) -> list[str]:
    return list(troubles(gpus, lambda pid: names.get(f"pid{pid}", ""), build))


def test_a_gpu_that_can_compute_is_no_trouble() -> None:
    assert said(T4) == said(replace(T4, used_bytes=15 * GB)) == said() == said(build=None) == []
    assert said(replace(T4, compute_mode=ComputeMode.EXCLUSIVE)) == []


def test_a_gpu_that_torch_has_no_code_for_is_named_with_the_code_that_it_has() -> None:
    assert said(T4, P100) == [
        "GPU 1 Tesla P100-PCIE-16GB has compute capability 6.0, and torch 2.10.0+cu128 has code for sm_75, sm_80, "
        "sm_86, sm_90, sm_100, sm_120 only: what it computes there will fail (no kernel image is available). Install a "
        "build that has it, use other GPUs (--devices), or --cpu."
    ]
    assert said(P100, build=None) == []


def test_a_torch_without_cuda_is_said_once_for_all_gpus() -> None:
    (line,) = said(T4, P100, build=TorchBuild("2.13.0+cpu", ()))
    assert line.startswith(
        "torch 2.13.0+cpu is built without CUDA, so no rank can use the GPUs: install a build for CUDA"
    )
    assert said(build=TorchBuild("2.13.0+cpu", ())) == []


@pytest.mark.parametrize(
    ("flags", "capability", "runs"),
    [
        pytest.param("sm_80", (8, 0), True, id="its own"),
        pytest.param("sm_80", (8, 6), True, id="newer of the same generation"),
        pytest.param("sm_86", (8, 0), False, id="older of the same generation"),
        pytest.param("sm_80", (9, 0), False, id="another generation"),
        pytest.param("sm_50 sm_60 sm_70", (6, 1), True, id="one of several"),
        pytest.param("sm_70 compute_70", (12, 0), True, id="what its driver compiles"),
        pytest.param("compute_90", (8, 9), False, id="compiled for newer ones"),
        pytest.param("sm_90", (12, 0), False, id="older generation, two digits"),
        pytest.param("sm_120", (12, 1), True, id="two digits"),
        pytest.param("sm_100", (12, 0), False, id="neither a generation"),
        pytest.param("sm_90a", (9, 0), True, id="for one GPU"),
        pytest.param("compute_100a", (10, 3), False, id="for another GPU alone"),
        pytest.param("sm_100f compute_100f", (10, 3), True, id="for a family"),
        pytest.param("compute_100f", (12, 0), False, id="for another family"),
        pytest.param("sm_80", (8, 7), True, id="a Jetson, for which nobody can tell"),
        pytest.param("sm_80", (0, 0), True, id="a capability that is not known"),
        pytest.param("gfx90a", (8, 0), True, id="words of another maker"),
    ],
)
def test_code_runs_where_cuda_runs_it(flags: str, capability: tuple[int, int], runs: bool) -> None:
    assert TorchBuild("", tuple(flags.split())).runs_on(capability) is runs


def test_a_full_gpu_is_said_with_who_holds_it() -> None:
    full = replace(T4, used_bytes=int(15.8 * GB), processes=((77, GB), (4321, 14 * GB), (5, None)))
    assert said(full, pid4321="python3") == [
        "GPU 0 Tesla T4 is full: 0.2 GB of 16.0 GB are free, and a process takes up to 0.5 GB before its first tensor; "
        "14.0 GB held by process 4321 (python3); 1.0 GB held by process 77 (not visible from here); an unknown amount "
        "held by process 5 (not visible from here)."
    ]
    assert said(replace(full, processes=()))[0].endswith("; who holds it the driver does not tell here.")
    assert said(replace(T4, total_bytes=0)) == []  # the driver does not tell


def test_a_full_gpu_from_which_enough_leaves_before_the_run_is_not_said() -> None:
    full = replace(T4, index=1, used_bytes=int(15.8 * GB))
    assert list(troubles([full], str, None, {"cuda:1": GB}.__getitem__)) == []
    (line,) = troubles([full], str, None, {"cuda:1": GB // 10}.__getitem__)
    assert line.startswith("GPU 1 Tesla T4 is full: 0.2 GB of 16.0 GB are free")


def test_a_gpu_that_takes_one_process_and_has_one_is_said() -> None:
    assert said(replace(T4, compute_mode=ComputeMode.EXCLUSIVE, processes=((4321, GB),)), pid4321="python3") == [
        "GPU 0 Tesla T4 takes one process at a time (compute mode exclusive), and has one: 1.0 GB held by process 4321 "
        "(python3). End it; if it is this notebook, which has used CUDA, restart the kernel."
    ]


def test_a_gpu_that_takes_no_process_is_said() -> None:
    (line,) = said(replace(T4, compute_mode=ComputeMode.PROHIBITED))
    assert "GPU 0 Tesla T4 lets no process compute (compute mode prohibited)" in line
    assert "nvidia-smi -c DEFAULT" in line


# --- torch


def loaded(
    monkeypatch: pytest.MonkeyPatch,
    flags: str | None,
    cuda: str | None = "12.8",
    hip: str | None = None,
    uses_cuda: bool = True,
) -> None:
    core = SimpleNamespace() if flags is None else SimpleNamespace(_cuda_getArchFlags=lambda: flags)
    torch = SimpleNamespace(_C=core, version=SimpleNamespace(cuda=cuda, hip=hip), __version__="2.10.0")
    torch.cuda = SimpleNamespace(is_initialized=lambda: uses_cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_what_torch_was_built_for_is_read_without_asking_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "sm_75 compute_90")
    assert TorchBuild.loaded() == TorchBuild("2.10.0", ("sm_75", "compute_90"))
    loaded(monkeypatch, None, cuda=None)
    assert TorchBuild.loaded() == TorchBuild("2.10.0", ())


def test_it_is_not_read_where_reading_would_spoil_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "sm_75", uses_cuda=False)
    monkeypatch.setattr(sys.modules["torch"]._C, "_cuda_getArchFlags", lambda: pytest.fail("spoils forks"))
    assert TorchBuild.loaded() is None
    assert before_a_run([P100]) == []


def test_a_process_that_was_told_of_its_gpus_can_still_be_forked() -> None:
    program = """
import os, torch
from nbaccel.base.hardware import Gpu
from nbaccel.launching.gpu_trouble import before_a_run
before_a_run([Gpu(0, "GPU-a", "Tesla T4", 10**9, 0, (7, 5))])
pid = os.fork()
if pid == 0:
    os._exit(int(torch.cuda._is_in_bad_fork()))
print("broken" if os.waitpid(pid, 0)[1] else "good")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "good\n", answer.stderr


@pytest.mark.parametrize(("flags", "cuda", "hip"), [(None, "12.8", None), ("", "12.8", None), ("gfx90a", None, "6.0")])
def test_a_torch_that_does_not_tell_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, cuda: str | None, hip: str | None
) -> None:
    loaded(monkeypatch, flags, cuda, hip)
    assert TorchBuild.loaded() is None


def test_a_torch_that_is_not_loaded_or_half_loaded_is_not_judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert TorchBuild.loaded() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert TorchBuild.loaded() is None
    assert before_a_run([P100]) == []


def test_a_run_is_told_what_the_loaded_torch_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "sm_75")
    assert before_a_run([T4]) == []
    (line,) = before_a_run([P100])
    assert "torch 2.10.0 has code for sm_75 only" in line


def test_the_installed_torch_tells_from_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(torch_version="2.10.0", flags=("sm_75",))
    monkeypatch.setattr(gpu_trouble, "ask_torch", lambda: answer)
    assert TorchBuild.installed() == TorchBuild("2.10.0", ("sm_75",))
    answer.torch_version = ""
    assert TorchBuild.installed() is None
