"""Ranks that end with their cell, one of which waits in its device for another: how the run ends, and what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.base.settings import RunSettings
from nbaccel.launching.ipc.control import ControlPage, RankPosition
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes import shutdown
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.rank.lifetime import SPOILT
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import ConsoleScreen

SOON_S = 20.0
"""On a busy machine; a rank that reads behind a wait without end is killed after two minutes."""

HEAD = """
import os, time, pathlib, torch, torch.distributed as dist, devicelike
from nbaccel.launching.rank import lifetime as cut
net = torch.nn.Linear(4, 1)
known.append(1)
first = net.weight.detach().clone()
group = devicelike.world()
"""
BEGINS_A_SUM = """
total = torch.ones(4)
dist.all_reduce(total, async_op=True)
group.later(lambda: net.weight.data.add_(total))
"""
SOONER = "cut._HUNG_S = cut._HUNG_AT_STOP_S = 1"
WAITS = {"in Python": "time.sleep(60)", "deaf": "group.drain()", "at its end": "pass"}


class InterruptOnce(Pollable):
    """Stops the run once all of `paths` are there."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    def due_in(self, now: float) -> float | None:
        return 0.02 if self._paths else None

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        if self._paths and all(path.exists() for path in self._paths):
            self._paths = ()
            interrupt()


def run(
    launcher: Launcher, of_rank_0: str, of_rank_1: str, out: tuple[str, ...] | None = None, *beside: Pollable
) -> tuple[Run, RankResults, float]:
    """The end of a cell whose ranks do different things, and its seconds."""
    lines = [
        *HEAD.splitlines(),
        "if accelerator.process_index == 0:",
        *(f"    {line}" for line in of_rank_0.splitlines()),
        "else:",
        *(f"    {line}" for line in of_rank_1.splitlines()),
    ]
    notebook: dict[str, Any] = {"__name__": "__main__", "known": []}
    task = CellTask(CellSource("\n".join(lines), "Cell In[1]"), notebook, out)
    spec = LaunchSpec(
        task,
        Devices(2),
        Start("fork", "a test"),
        RunSettings(cpu=True),
        setup="devicelike:setup_reading_rank",
    )
    began = time.monotonic()
    record, ended = launcher.run(spec, RunObservers(ConsoleScreen(), beside=beside))
    seconds = time.monotonic() - began
    print(f"{seconds:.2f} s")
    return record, ended, seconds


def missing(ended: RankResults) -> dict[str, str]:
    report = ended.reports[0]
    return {"rank 0": "did not report"} if report is None else report.missing


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_waits_in_its_device_for_one_that_failed_says_what_does_not_come(
    launcher: Launcher, wait: str
) -> None:
    record, ended, seconds = run(launcher, f"{SOONER}\n{BEGINS_A_SUM}\n{WAITS[wait]}", "1 / 0")
    try:
        assert isinstance(record.error, ZeroDivisionError)
        assert missing(ended) == dict.fromkeys(["net", "first", "group", "total", "known"], SPOILT)
        assert ended.values() == {}
        assert ended.killed_by_us == [False, False]
        assert seconds < SOON_S
    finally:
        ended.close()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_was_killed_says_what_does_not_come(launcher: Launcher) -> None:
    body = f"{SOONER}\n{BEGINS_A_SUM}\ngroup.drain()"
    _, ended, seconds = run(launcher, body, "os.kill(os.getpid(), 9)", ("net", "first"))
    try:
        assert missing(ended) == {"net": SPOILT, "first": SPOILT}
        assert ended.first_failed == 1
        assert seconds < SOON_S
    finally:
        ended.close()


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_stop_ends_a_wait_for_a_rank_that_was_stopped_before(launcher: Launcher, tmp_path: Path, wait: str) -> None:
    here = f"pathlib.Path({str(tmp_path)!r}, str(accelerator.process_index)).touch()"
    rank_0 = f"{SOONER}\n{BEGINS_A_SUM}\n{here}\n{WAITS[wait]}"
    interrupt = InterruptOnce(tmp_path / "0", tmp_path / "1")
    _, ended, seconds = run(launcher, rank_0, f"{here}\ntime.sleep(60)", ("net",), interrupt)
    try:
        assert ended.is_interrupted
        assert missing(ended) == {"net": SPOILT}
        assert ended.killed_by_us == [False, False]
        assert seconds < SOON_S
    finally:
        ended.close()


@pytest.mark.slow
def test_what_a_device_is_still_computing_when_another_rank_fails_comes(launcher: Launcher) -> None:
    """It is given some time before it is taken for one that waits."""
    slow = "group.later(lambda: time.sleep(1.2))\ngroup.later(lambda: net.weight.data.add_(1))\ntime.sleep(60)"
    record, ended, _ = run(launcher, slow, "1 / 0", ("net", "first"))
    try:
        values = ended.values()
        assert isinstance(record.error, ZeroDivisionError)
        assert missing(ended) == {}
        assert (values["net"].weight - values["first"]).flatten().tolist() == pytest.approx([1] * 4)
    finally:
        ended.close()


@pytest.mark.slow
def test_what_a_device_is_still_computing_at_a_stop_comes(launcher: Launcher, tmp_path: Path) -> None:
    """Nobody has failed: it may take longer."""
    here = f"pathlib.Path({str(tmp_path)!r}, str(accelerator.process_index)).touch()"
    slow = f"group.later(lambda: time.sleep(5))\ngroup.later(lambda: net.weight.data.add_(1))\n{here}\ntime.sleep(60)"
    interrupt = InterruptOnce(tmp_path / "0", tmp_path / "1")
    _, ended, _ = run(launcher, slow, f"{here}\ntime.sleep(60)", ("net", "first"), interrupt)
    try:
        values = ended.values()
        assert missing(ended) == {}
        assert (values["net"].weight - values["first"]).flatten().tolist() == pytest.approx([1] * 4)
    finally:
        ended.close()


@pytest.mark.slow
def test_a_rank_that_is_through_waits_for_a_sum_as_long_as_there_is_a_peer_to_join_it(launcher: Launcher) -> None:
    record, ended, seconds = run(launcher, f"cut._ALONE_S = 1\n{BEGINS_A_SUM}", "pass", ("net",))
    try:
        assert record.error is None
        assert missing(ended) == {"net": SPOILT}
        assert seconds < SOON_S
    finally:
        ended.close()


@pytest.mark.slow
def test_a_device_that_computes_for_long_at_the_end_of_a_run_is_waited_for(launcher: Launcher) -> None:
    late = "group.later(lambda: time.sleep(0.5))"
    body = f"cut._HUNG_S = cut._FAILED_S = 0.05\n{BEGINS_A_SUM}"
    record, ended, _ = run(launcher, body, f"{late}\n{BEGINS_A_SUM}", ("net", "first"))
    try:
        values = ended.values()
        assert record.error is None
        assert (values["net"].weight - values["first"]).flatten().tolist() == pytest.approx([2] * 4)
    finally:
        ended.close()


@pytest.mark.slow
def test_a_rank_that_failed_behind_a_wait_without_end_says_so(launcher: Launcher) -> None:
    """Its peer waits for it on the host, and the kernel does not know that anything is wrong."""
    fails = "cut._FAILED_S = 0.2\ngroup.later(group.wait_for_abort)\n1 / 0"
    record, ended, seconds = run(launcher, fails, "time.sleep(60)", ("net",))
    try:
        assert isinstance(record.error, ZeroDivisionError)
        assert missing(ended) == {"net": SPOILT}
        assert seconds < SOON_S
    finally:
        ended.close()


@pytest.mark.slow
def test_a_device_that_an_abort_does_not_free_is_not_read(launcher: Launcher) -> None:
    stuck = f"{SOONER}\ncut._FREE_S = 0.2\ngroup.later(lambda: time.sleep(1000))\ntime.sleep(60)"
    record, ended, seconds = run(launcher, stuck, "1 / 0", ("net",))
    try:
        assert isinstance(record.error, ZeroDivisionError)
        assert missing(ended) == {"the results": SPOILT}
        assert seconds < SOON_S
    finally:
        ended.close()


class Ranks:
    """Two of a group that is being stopped, as the kernel knows them; told: what was done to them."""

    def __init__(self) -> None:
        self.page = ControlPage.create(2)
        self.told: list[str] = []
        self.members: list[Any] = [self._member(rank) for rank in range(2)]

    def _member(self, rank: int) -> SimpleNamespace:
        member = SimpleNamespace(rank=rank, stays=False, takes_part=True, is_working=True, has_ended=False, report=None)
        member.was_interrupted, member.released_at = False, None
        member.interrupt = lambda: setattr(member, "was_interrupted", True)
        member.terminate = lambda: self.told.append(f"terminate {rank}")
        member.kill = lambda: self.told.append(f"kill {rank}")
        member.release = lambda now: None
        self.page.hear_cuts(rank)
        return member

    def cut_at(self, stopping: shutdown.StopAtStep, *times: float) -> list[bool]:
        """Whether the word is set at each of these times."""
        told = []
        for now in times:
            stopping.advance(now)
            told.append(self.page.frees_hung)
        assert not self.page.is_cut, "nobody has failed"
        return told


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.page.close()


def test_a_stop_does_not_take_ranks_for_hung_that_are_in_a_step_or_save(ranks: Ranks) -> None:
    ranks.page.write(0, RankPosition(1, 0, 0.0, 3.0, parked=False, in_step=True))
    stopping = shutdown.StopAtStep(ranks.members, 100.0, ranks.page)
    ranks.page.finish(1)
    ranks.members[1].is_working = False
    assert ranks.cut_at(stopping, 101.1, 103.0, 105.0) == [False] * 3
    ranks.page.set_saving(0, True)
    assert ranks.cut_at(stopping, 107.0, 119.0, 121.0, 123.0) == [False] * 4
    assert ranks.told == [], "the rank that is done is let go first"
    assert ranks.cut_at(stopping, 124.5, 126.0) == [False] * 2
    assert ranks.told == ["terminate 0", "kill 0"]


def test_a_rank_in_a_step_that_takes_too_long_is_woken_before_it_is_terminated(ranks: Ranks) -> None:
    ranks.page.write(0, RankPosition(1, 0, 0.0, 3.0, parked=False, in_step=True))
    stopping = shutdown.StopAtStep(ranks.members, 100.0, ranks.page)
    ranks.members[1].is_working = False
    assert ranks.cut_at(stopping, 105.9, 106.1, 126.0) == [False, True, True]
    ranks.cut_at(stopping, 126.2, 128.0)
    assert ranks.told == [], "the rank that is done is let go first"
    ranks.cut_at(stopping, 129.5)
    assert ranks.told == ["terminate 0"]


def test_a_rank_that_stays_is_woken_also_when_the_results_have_come(ranks: Ranks) -> None:
    ranks.members[1].stays = True
    stopping = shutdown.StopAtStep(ranks.members, 100.0, ranks.page)
    ranks.cut_at(stopping, 100.9, 101.1)
    ranks.members[0].is_working = False
    assert ranks.cut_at(stopping, 102.0, 102.9, 104.1, 122.0) == [False, False, True, True]
    assert ranks.told == []


@pytest.mark.parametrize(("stays", "after_s"), [(False, 0.5), (True, 2.0)])
def test_a_rank_that_has_finished_is_woken_when_its_peer_has_left(ranks: Ranks, stays: bool, after_s: float) -> None:
    ranks.members[0].stays = stays
    ranks.page.write(0, RankPosition(1, 0, 0.0, 1.5, parked=False, in_step=True))
    stopping = shutdown.StopAtStep(ranks.members, 100.0, ranks.page)
    for rank in range(2):
        ranks.page.finish(rank)
    assert ranks.cut_at(stopping, 100.1, 110.0) == [False, False]  # both compute what they were given, most likely
    ranks.members[1].is_working = False
    late = 111.5 + after_s  # the time of a step, and a moment
    assert ranks.cut_at(stopping, 110.0, late - 0.1, late + 0.1) == [False, False, True]
    assert ranks.told == []


def test_a_rank_that_runs_alone_waits_for_nobody(ranks: Ranks) -> None:
    ranks.members[1].takes_part = ranks.members[1].is_working = False
    stopping = shutdown.StopAtStep(ranks.members, 100.0, ranks.page)
    ranks.page.finish(0)
    assert ranks.cut_at(stopping, 100.1, 105.0, 140.0) == [False] * 3
