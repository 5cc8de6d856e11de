"""The zygote: what it hands over, what refuses, and what becomes of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import CannotSend, LaunchRefused
from nbaccel.features.clean_start import zygote as zygote_module
from nbaccel.launching import api as functions_module
from nbaccel.launching.api import launch
from nbaccel.launching.ipc.reaper import session_members
from nbaccel.launching.launcher import Launcher, LauncherResources
from nbaccel.launching.rank.lifetime import DeathWatch


def surroundings() -> dict[str, Any]:
    """What a program may depend on without noticing."""
    import random

    import numpy as np
    import torch

    return {
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "torch": torch.rand(1).item(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": [(action, category.__name__) for action, _, category, _, _ in warnings.filters],
        "cwd": os.getcwd(),
        "path": sys.path[:],
        "variable": os.environ.get("SOME_VARIABLE"),
        "threads": torch.get_num_threads(),
        "stdin": sys.stdin.isatty(),
        "signals": [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGCHLD)],
    }


def test_both_starts_give_ranks_the_same_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    monkeypatch.setenv("SOME_VARIABLE", "value")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(warnings, "filters", [("ignore", None, UserWarning, None, 0), *warnings.filters])
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        forked = launch(surroundings, 2, start_method="fork").values
        clean = launch(surroundings, 2, start_method="zygote").values
    finally:
        torch.set_default_dtype(torch.float32)
    assert forked == clean
    assert forked[0]["variable"] == "value"
    assert forked[0]["dtype"] == "torch.float64"


def test_a_zygote_follows_the_kernels_environment_and_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has them from the launch before, and passes them on with its fork."""

    def surroundings() -> tuple[str | None, str | None, str]:
        return os.environ.get("FIRST"), os.environ.get("SECOND"), os.getcwd()

    home = Path.cwd()
    monkeypatch.setenv("FIRST", "1")
    monkeypatch.chdir(tmp_path)
    assert launch(surroundings, 2, start_method="zygote").values == [("1", None, str(tmp_path))] * 2
    monkeypatch.delenv("FIRST")
    monkeypatch.setenv("SECOND", "2")
    monkeypatch.chdir(home)
    assert launch(surroundings, 2, start_method="zygote").values == [(None, "2", str(home))] * 2


def test_what_every_rank_needs_is_loaded_before_it_is_forked(start_method: str) -> None:
    def loaded_by_a_look_at_the_memory() -> list[str]:  # within: by its name it would bring this module's imports along
        from nbaccel.launching.rank.reporter import MemoryMeter

        before = set(sys.modules)
        MemoryMeter().read()
        return sorted(set(sys.modules) - before)

    assert launch(loaded_by_a_look_at_the_memory, 1, start_method=start_method).value == []


def test_modules_of_the_kernels_path_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load() -> int:
        import only_here  # type: ignore[import-not-found]

        return int(only_here.VALUE)

    assert launch(load, 2, start_method="zygote").values == [42, 42]


def test_an_open_file_is_refused_before_the_start(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file, pytest.raises(CannotSend, match="open file"):
        launch(print, 2, args=("x", file), start_method="zygote")


@pytest.fixture
def resources() -> Iterator[LauncherResources]:
    """One that may lose its zygote."""
    resources = LauncherResources()
    yield resources
    resources.close()


def test_a_zygote_that_died_is_replaced(resources: LauncherResources) -> None:
    first = resources.zygote()
    os.kill(first.pid, signal.SIGKILL)
    while session_members([first.pid]):
        time.sleep(0.01)
    assert resources.zygote() is not first


def test_entries_of_the_path_that_python_skips_keep_no_zygote_from_starting(
    resources: LauncherResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    assert resources.zygote().pid


@pytest.mark.full
def test_another_torch_installation_restarts_the_zygote(
    resources: LauncherResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resources.zygote()
    assert resources.zygote() is first
    monkeypatch.setattr(zygote_module, "torch_fingerprint", lambda: ("elsewhere", 1.0))
    assert resources.zygote() is not first


def test_a_run_survives_the_death_of_its_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    monkeypatch.setattr(functions_module, "default_launcher", lambda: launcher)

    def kill_parent() -> int:
        meet()
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        return os.getpid()

    def meet() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()

    pids = launch(kill_parent, 2, start_method="zygote").values
    launcher.close()
    assert not session_members(pids)


@pytest.mark.full
def test_a_zygote_that_answered_too_late_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    monkeypatch.setattr(functions_module, "default_launcher", lambda: launcher)
    launch(os.getpid, 2, start_method="zygote")
    pid = launcher.resources.zygote().pid
    with monkeypatch.context() as impatient:
        impatient.setattr(zygote_module, "_START_TIMEOUT_S", 0.2)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LaunchRefused, match="does not answer"):
            launch(os.getpid, 2, start_method="zygote")
    os.kill(pid, signal.SIGCONT)
    assert len(set(launch(os.getpid, 2, start_method="zygote").values)) == 2
    launcher.close()


def test_a_rank_that_its_kernel_let_go_of_ends() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ours.close()
        DeathWatch(os.pidfd_open(os.getppid()), theirs.fileno()).start()
        time.sleep(30)
        os._exit(0)
    theirs.close()
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
