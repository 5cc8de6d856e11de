"""A kernel that used CUDA or autograd below torch's own flag: its ranks start from a clean process, and say why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from environments import REPOSITORY
from nbaccel.base import forkable
from nbaccel.base.forkable import AUTOGRAD_HAS_THREADS, CUDA_IS_INITIALISED, DRIVER_IS_IN_USE, why_forks_fail

DRIVER = """
#include <unistd.h>
static int user;  /* the process that called cuInit */
int cuInit(unsigned flags) { if (user && user != getpid()) return 3; user = getpid(); return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return user == getpid() ? 0 : 3; }
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What became of the launches of `kernel_that_used_cuda.py`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the driver that pretends needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    driver = folder / "libcuda.so.1"
    soname = f"-Wl,-soname,{driver.name}"
    subprocess.run([compiler, "-shared", "-fPIC", soname, "-o", driver, folder / "driver.c"], check=True)
    program = REPOSITORY / "tests/kernel_that_used_cuda.py"
    done = subprocess.run([sys.executable, program, driver], stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


TRAINED = [9.0, 9.0]

runs_the_program = pytest.mark.timeout(
    150
)  # torch is loaded twice and ranks start ten times; seconds on an idle machine


@runs_the_program
@pytest.mark.parametrize("name", ["no driver", "driver loaded"])
def test_what_breaks_no_fork_is_forked(launches: dict[str, list[Any]], name: str) -> None:
    assert launches[name] == ["fork", "the notebook has not used CUDA", TRAINED]


@runs_the_program
@pytest.mark.parametrize("seen", ["", ", unseen"], ids=["seen by the kernel", "seen by the ranks"])
@pytest.mark.parametrize(("name", "why"), [("driver", DRIVER_IS_IN_USE), ("autograd", AUTOGRAD_HAS_THREADS)])
def test_ranks_whose_fork_would_fail_train_from_a_clean_process(
    launches: dict[str, list[Any]], name: str, why: str, seen: str
) -> None:
    if name not in launches:
        pytest.skip("this torch has no devices that are written in Python")
    assert launches[f"{name}{seen}"] == ["zygote", why, TRAINED]
    kind, text, _ = launches[f"{name}{seen}, insisted"]
    assert kind == "CannotFork"
    assert text.startswith(f"{why[0].upper()}{why[1:]}, so forked ranks could not train.")
    assert 'start_method="fork" was asked for; leave it out' in text
    assert ("First seen" in text) is (seen == ""), "the kernel refuses before anything starts"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /proc of a process on a machine with a GPU's driver."""
    for folder in ("self/fd", "self/task"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "self/maps").write_text("7f00-7f10 r-xp 00000000 fe:00 77  /usr/lib/libcuda.so.580.1\n")
    monkeypatch.setattr(forkable, "_PROC", tmp_path)
    monkeypatch.setattr(forkable, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(forkable, "loaded_driver", lambda: None)  # as where it was loaded by another way
    return tmp_path


def give_thread(proc: Path, name: str) -> None:
    tasks = proc / "self/task"
    task = tasks / str(len(list(tasks.iterdir())))
    task.mkdir()
    (task / "comm").write_text(f"{name}\n")


def test_what_the_driver_opens_when_it_is_initialised_betrays_it(proc: Path) -> None:
    (proc / "self/fd/4").symlink_to("/dev/nvidiactl")  # NVML opens it too
    (proc / "self/fd/5").symlink_to("/dev/nvidia0")
    (proc / "self/fd/6").symlink_to("socket:[1]")
    assert why_forks_fail() is None
    (proc / "self/fd/7").symlink_to("/dev/nvidia-uvm")
    assert why_forks_fail() == DRIVER_IS_IN_USE


def test_devices_may_be_counted_by_nvml_which_keeps_its_files_open(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (proc / "self/fd/7").symlink_to("/dev/nvidia-uvm")
    (proc / "self/maps").write_text("7f00-7f10 r-xp 00000000 fe:00 78  /usr/lib/libnvidia-ml.so.580.1\n")
    assert why_forks_fail() is None, "no driver is loaded"

    driver = SimpleNamespace(cuDeviceGetCount=lambda _: forkable.CUDA_ERROR_NOT_INITIALIZED)
    monkeypatch.setattr(forkable, "loaded_driver", lambda: driver)
    assert why_forks_fail() is None, "it is loaded, and nobody has called cuInit"


def test_the_name_of_a_thread_betrays_autograd(proc: Path) -> None:
    for name in ("python3", "my_pt_autograd_0"):
        give_thread(proc, name)
    assert why_forks_fail() is None
    give_thread(proc, "pt_autograd_15")
    assert why_forks_fail() == AUTOGRAD_HAS_THREADS


def test_what_the_others_come_with_is_named_first(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    give_thread(proc, "pt_autograd_0")
    (proc / "self/fd/7").symlink_to("/dev/nvidia-uvm")
    assert why_forks_fail() == DRIVER_IS_IN_USE
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert why_forks_fail() == CUDA_IS_INITIALISED


def test_a_process_that_proc_does_not_show_can_be_forked(proc: Path) -> None:
    (proc / "self/maps").unlink()
    (proc / "self/fd").rmdir()
    (proc / "self/task").rmdir()
    assert why_forks_fail() is None


@pytest.mark.parametrize(
    ("version", "backend", "may"),
    [
        ({}, "privateuseone", False),
        ({"cuda": None, "hip": None}, "privateuseone", False),
        ({"cuda": "12.8"}, "privateuseone", True),
        ({"hip": "6.4"}, "privateuseone", True),
        ({"xpu": "20250101"}, "privateuseone", True),
        ({}, "npu", True),
    ],
)
def test_threads_are_looked_for_only_where_there_may_be_a_device(
    proc: Path, monkeypatch: pytest.MonkeyPatch, version: dict[str, Any], backend: str, may: bool
) -> None:
    give_thread(proc, "pt_autograd_0")
    backend_name = SimpleNamespace(_get_privateuse1_backend_name=lambda: backend)
    monkeypatch.setattr(forkable, "has_gpu_driver", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(**version), _C=backend_name))  # type: ignore[arg-type]
    assert why_forks_fail() == (AUTOGRAD_HAS_THREADS if may else None)


def test_a_torch_that_is_still_being_imported_has_no_devices(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_thread(proc, "pt_autograd_0")
    monkeypatch.setattr(forkable, "has_gpu_driver", lambda: False)
    for torch in (None, SimpleNamespace(), SimpleNamespace(version=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
        monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
        assert why_forks_fail() is None
