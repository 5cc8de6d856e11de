"""The sentence about a DataLoader worker that died: its own error, a signal, or memory, and only what is known."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from nbaccel.launching.api import launch
from nbaccel.launching.attempts import OomKillWatch
from nbaccel.launching.diagnosis import advice
from nbaccel.launching.ipc.dead_loader_workers import WorkerEnd
from nbaccel.launching.ipc.reports import ErrorLink


def said(end: WorkerEnd, host: OomKillWatch) -> str:
    return advice([ErrorLink("RuntimeError", ["RuntimeError: DataLoader worker …"], [], "", end)], host)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A file system whose control group counts 3 kills for memory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/notebook\n")
    file = tmp_path / "sys/fs/cgroup/notebook/memory.events"
    file.parent.mkdir(parents=True)
    file.write_text("oom_kill 3\n")
    return tmp_path


def test_memory_is_blamed_for_a_killed_worker_where_the_control_group_counted_the_kill(counted: Path) -> None:
    host = OomKillWatch(counted)
    assert "a guess is host memory" in said(WorkerEnd(7, -signal.SIGKILL), host)
    (counted / "sys/fs/cgroup/notebook/memory.events").write_text("oom_kill 4\n")
    text = said(WorkerEnd(7, -signal.SIGKILL), host)
    assert text.startswith("A DataLoader worker of this rank (process 7) was killed by SIGKILL: the machine ran out of")


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (WorkerEnd(7, 1, "fork"), "(process 7) ended with exit code 1: by an error of its own, whose traceback"),
        (WorkerEnd(7, 0, "fork"), "(process 7) ended with exit code 0"),
        (WorkerEnd(7, -signal.SIGTERM), "(process 7) was ended by SIGTERM, which code of the data set or another pro"),
        (WorkerEnd(7, -signal.SIGSEGV), "(process 7) crashed with SIGSEGV, in compiled code"),
        (WorkerEnd(7, -signal.SIGBUS), "(process 7) crashed with SIGBUS. Most likely /dev/shm is full"),
        (WorkerEnd(7, -50), "(process 7) was ended by signal 50"),
        (WorkerEnd(), "worker of this rank ended while it handed over a batch; how is not known"),
        (WorkerEnd(7, 1, "spawn", "Numbers"), "are started by spawn, so they cannot know Numbers, which is defined"),
        (WorkerEnd(7, -signal.SIGTERM, "spawn", "Numbers"), "was ended by SIGTERM"),
    ],
)
def test_another_end_of_a_worker_is_not_blamed_on_the_machine(end: WorkerEnd, cause: str, counted: Path) -> None:
    text = said(end, OomKillWatch(counted))
    assert cause in text
    assert "host memory" not in text
    assert "out of memory" not in text


ENDS = {
    "exits": "ended with exit code 3: by an error of its own, whose traceback it printed into the output, or by sys.",
    "is_terminated": "was ended by SIGTERM, which code of the data set or another process sent. Memory is not",
    "crashes": "crashed with SIGSEGV, in compiled code that reads the data",
    "is_killed": "was killed by SIGKILL: ",
}


class Ending(Dataset[int]):
    """Samples of which the third ends the process that reads it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 2:
            if self.how == "exits":
                sys.exit(3)
            sent = {"is_terminated": signal.SIGTERM, "crashes": signal.SIGSEGV, "is_killed": signal.SIGKILL}[self.how]
            signal.signal(sent, signal.SIG_DFL) if sent == signal.SIGTERM else None
            os.kill(os.getpid(), sent)
            time.sleep(60)
        return index


def read(how: str, options: dict[str, Any]) -> None:
    for _ in DataLoader(Ending(how), 1, num_workers=1, **options):
        pass


def notes_of(how: str, start_method: str, **options: Any) -> str:
    error = launch(read, 1, (how, options), start_method=start_method, cpu=True, check=False).error
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_a_forked_worker_is_named(how: str, start_method: str) -> None:
    assert ENDS[how] in notes_of(how, start_method)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["exits", "is_killed"])
def test_the_end_of_a_worker_that_is_no_child_of_the_rank_is_named(how: str) -> None:
    """torch does not say how it ended; the process object knows."""
    assert ENDS[how] in notes_of(how, "fork", multiprocessing_context="spawn")
