"""Ranks that do not need each other: one that dies is started again alone, and what ends such a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.events import Event, ItemsDone, RankRestarted, emit
from nbaccel.base.settings import RunSettings
from nbaccel.errors import PeerFailed, RankDied
from nbaccel.launching.ipc.reaper import session_members
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, RunEnd, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.restarted_ranks import MOST_RESTARTS
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen


@dataclass
class Told:
    """What the kernel was told of a run."""

    lines: list[str] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)

    def feed(self, rank: int, at: float, event: Event) -> None:
        self.events.append((rank, event))

    def tick(self, now: float) -> None:
        pass


def run_restartable(
    launcher: Launcher,
    function: Callable[..., Any],
    *args: Any,
    n: int = 2,
    start: str = "fork",
    seed: int | None = None,
) -> tuple[Run, RankResults, Told]:
    told = Told()
    settings = RunSettings(cpu=True, independent=True, seed=seed)
    spec = LaunchSpec(
        FunctionTask(function, args), Devices(n), Start(start, "a test"), settings, end=RunEnd(restarts_ranks=True)
    )
    watching = RunObservers(ConsoleScreen(), notice=told.lines.append, listeners=[told])
    run, ended = launcher.run(spec, watching)
    return run, ended, told


def values(run: Run, ended: RankResults) -> list[Any]:
    assert run.error is None, run.error
    try:
        return [ended.values(rank)["value"] for rank in range(len(ended.reports))]
    finally:
        ended.close()


def tries_of(folder: str) -> int:
    """Count this rank's processes, of which this is one."""
    path = Path(folder, os.environ["RANK"])
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())


def wait_for(path: Path) -> None:
    while not path.exists():  # ended by the test's own timeout
        time.sleep(0.01)


def dies_once(folder: str) -> tuple[int, int]:
    rank, tries = int(os.environ["RANK"]), tries_of(folder)
    if rank == 1 and tries == 1:
        print("about to die")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        print("is back")
        Path(folder, "back").touch()
    wait_for(Path(folder, "back"))  # rank 0 works until rank 1 is back: one process for it is enough
    return rank, tries


def test_a_killed_rank_is_started_again_while_the_others_work(
    launcher: Launcher, tmp_path: Path, start_method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run, ended, told = run_restartable(launcher, dies_once, str(tmp_path), start=start_method)
    assert values(run, ended) == [(0, 1), (1, 2)]
    line = "rank 1 was killed by SIGKILL; started again, its items go to the others meanwhile"
    assert told.lines == [line]
    assert (1, RankRestarted(line)) in told.events
    shown = capfd.readouterr().out
    assert "about to die\n" in shown
    assert "is back\n" in shown


def dies_twice(folder: str) -> tuple[int, int]:
    """Return the number of this rank's processes, and where its random numbers begin."""
    tries = tries_of(folder)
    seed = int(os.environ["NBACCEL_SEED"]) + int(os.environ["RANK"])
    with open(Path(folder, "seeds"), "a") as file:
        file.write(f"{seed}\n")
    if tries < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tries, seed


def test_no_two_processes_of_a_run_draw_the_same_random_numbers(
    launcher: Launcher, tmp_path: Path, start_method: str
) -> None:
    run, ended, _ = run_restartable(launcher, dies_twice, str(tmp_path), start=start_method, seed=100)
    assert values(run, ended) == [(3, 104), (3, 105)]
    assert sorted((tmp_path / "seeds").read_text().split()) == ["100", "101", "102", "103", "104", "105"]


def test_a_rank_that_leaves_by_an_exit_code_is_started_again_too(launcher: Launcher, tmp_path: Path) -> None:
    def leaves_once() -> int:
        tries = tries_of(str(tmp_path))
        if tries == 1:
            os._exit(3)
        return tries

    run, ended, told = run_restartable(launcher, leaves_once)
    assert values(run, ended) == [2, 2]
    assert sorted(told.lines)[1].startswith("rank 1 ended with exit code 3; started again")


def test_a_rank_without_progress_ends_the_run_after_three_restarts(launcher: Launcher, tmp_path: Path) -> None:
    def always_dies() -> None:
        if int(os.environ["RANK"]) == 0:
            time.sleep(60)
        if tries_of(str(tmp_path)) > 3 * MOST_RESTARTS:
            return
        emit(ItemsDone())  # a report without an item is no progress
        os.kill(os.getpid(), signal.SIGKILL)

    run, ended, told = run_restartable(launcher, always_dies)
    assert isinstance(run.error, RankDied)
    assert "rank 1 of 2 was killed by SIGKILL" in str(run.error)
    assert "started again 3 times, and finished no item in between" in str(run.error)
    assert len(told.lines) == MOST_RESTARTS
    assert (tmp_path / "1").read_text() == "x" * (MOST_RESTARTS + 1)
    ended.close()


def test_progress_allows_as_many_restarts_again(launcher: Launcher, tmp_path: Path) -> None:
    def works_and_dies() -> int:
        tries = tries_of(str(tmp_path))
        if tries > 2 * MOST_RESTARTS:
            return tries
        if tries == MOST_RESTARTS + 1:
            emit(ItemsDone(done=1, failed=0))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    run, ended, told = run_restartable(launcher, works_and_dies, n=1)
    assert values(run, ended) == [2 * MOST_RESTARTS + 1]
    assert len(told.lines) == 2 * MOST_RESTARTS


def test_a_rank_that_raises_ends_the_run_as_ever(launcher: Launcher, start_method: str) -> None:
    def fails() -> None:
        if int(os.environ["RANK"]) == 1:
            raise ValueError("boom")
        time.sleep(60)

    run, ended, told = run_restartable(launcher, fails, start=start_method)
    assert isinstance(run.error, ValueError)
    assert told.lines == []
    ended.close()


def test_no_process_of_a_dead_rank_is_left(launcher: Launcher, tmp_path: Path) -> None:
    def leaves_a_child() -> int:
        if tries_of(str(tmp_path)) == 1:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
            (tmp_path / "child").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    run, ended, _ = run_restartable(launcher, leaves_a_child, n=1)
    (pid,) = values(run, ended)
    assert not session_members([pid, int((tmp_path / "child").read_text())])


def meets() -> float:
    import torch

    from nbaccel import PartialState

    state = PartialState()
    return float(state.reduce(torch.ones(1, device="cpu"))[0])


def test_ranks_form_a_group_at_the_first_collective(launcher: Launcher) -> None:
    def meets_late() -> tuple[bool, float]:
        import torch.distributed as dist

        from nbaccel import Accelerator, PartialState

        assert (Accelerator().num_processes, PartialState().num_processes) == (2, 2)
        return dist.is_initialized(), meets()

    run, ended, _ = run_restartable(launcher, meets_late)
    assert values(run, ended) == [(False, 2.0), (False, 2.0)]


def test_a_death_after_ranks_have_met_ends_the_run_in_one_sentence(launcher: Launcher) -> None:
    def meets_and_dies() -> None:
        meets()
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        meets()

    run, ended, told = run_restartable(launcher, meets_and_dies)
    assert isinstance(run.error, RankDied)
    assert "have formed a process group, so none of them can be started again alone" in str(run.error)
    assert told.lines == []
    ended.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_collective_after_a_death_is_an_error_and_no_hang(launcher: Launcher, tmp_path: Path, who: int) -> None:
    def meets_after_a_death() -> None:
        rank = int(os.environ["RANK"])
        if rank == 1 and tries_of(str(tmp_path)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            (tmp_path / "back").touch()
        wait_for(tmp_path / "back")
        if rank == who:
            meets()
        time.sleep(60)

    run, ended, told = run_restartable(launcher, meets_after_a_death)
    assert isinstance(run.error, PeerFailed)
    assert f"rank {who} of 2 was about to form a process group, and a rank of this run has died" in str(run.error)
    assert len(told.lines) == 1
    ended.close()


def test_a_dead_zygote_is_replaced_when_a_rank_is_started_again(tmp_path: Path) -> None:
    with closing(Launcher()) as launcher:
        zygote = launcher.resources.zygote()
        run, ended, told = run_restartable(launcher, kills_the_zygote, str(tmp_path), zygote.pid, start="zygote")
        assert values(run, ended) == [1, 2]
        assert len(told.lines) == 1
        assert launcher.resources.zygote() is not zygote


def kills_the_zygote(folder: str, zygote: int) -> int:
    rank, tries = int(os.environ["RANK"]), tries_of(folder)
    if rank == 1 and tries == 1:
        os.kill(zygote, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        Path(folder, "back").touch()
    wait_for(Path(folder, "back"))
    return tries
