"""A run that hangs ends when it was told to, and says which rank holds it up and on which line."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nbaccel.errors import RanksFailed
from nbaccel.launch.functions import launch
from nbaccel.launch.hangs import ASK, HangWatch
from nbaccel.launch.member import Member
from nbaccel.launch.wire.control import ControlPage


def turns_for_ever_on_rank_1() -> None:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    while accelerator.process_index == 1:
        pass
    accelerator.wait_for_everyone()


def sleeps_in_c_on_rank_0() -> None:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 0:
        time.sleep(1000)
    accelerator.wait_for_everyone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "rank", "line"),
    [
        (turns_for_ever_on_rank_1, 1, r"in turns_for_ever_on_rank_1: (while accelerator.process_index == 1:|pass)"),
        (sleeps_in_c_on_rank_0, 0, r"in sleeps_in_c_on_rank_0: time.sleep\(1000\)"),
    ],
)
def test_a_hang_ends_with_the_guilty_rank_and_its_line(
    function: Callable[[], None], rank: int, line: str, start_method: str
) -> None:
    with pytest.raises(RanksFailed, match=rf"for \d s; rank {rank} seems to hold up the others:") as caught:
        launch(function, 2, hang_timeout_s=1.0, start_method=start_method, cpu=True)
    assert caught.value.rank == rank
    text = str(caught.value)
    assert re.search(rf"  rank {rank}: .*test_hangs.py, line \d+, {line}( \(inside .*\))?$", text, re.MULTILINE), text
    waiting = rf"  rank {1 - rank}: .*: accelerator.wait_for_everyone\(\) \(inside \w+ of transport.py\)$"
    assert re.search(waiting, text, re.MULTILINE), text


def loads_from_a_worker(what_it_does: str) -> None:
    """Rank 1's loader has a worker that comes to grief at its third sample."""
    import torch

    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    class Samples(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            if rank == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGKILL) if what_it_does == "dies" else time.sleep(1000)
            return index

    for _ in torch.utils.data.DataLoader(Samples(), 1, num_workers=1):
        accelerator.wait_for_everyone()


@pytest.mark.slow
def test_a_worker_of_a_loader_that_died_ends_the_run_and_its_rank_is_named(start_method: str) -> None:
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:  # as torch hears of it: at once, or by its socket
        launch(loads_from_a_worker, 2, ("dies",), start_method=start_method, cpu=True, hang_timeout_s=20.0)
    notes = "\n".join(caught.value.__notes__)
    assert "raised on rank 1 of 2" in notes, notes
    assert "\nA DataLoader worker of this rank ended while it handed over a batch." in notes, repr(caught.value)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_worker_of_its_loader_is_a_hang_with_the_line_of_its_loop() -> None:
    with pytest.raises(RanksFailed, match="rank 1 seems to hold up the others") as caught:
        launch(loads_from_a_worker, 2, ("sleeps",), start_method="fork", cpu=True, hang_timeout_s=1.0)
    where = r"  rank 1: .*test_hangs.py, line \d+, in loads_from_a_worker: for _ in torch.utils.data.DataLoader\("
    assert re.search(where, str(caught.value)), str(caught.value)


@pytest.mark.slow
def test_ranks_that_get_on_are_no_hang() -> None:
    def steps() -> int:
        from nbaccel import Accelerator

        accelerator = Accelerator(cpu=True)
        for _ in range(6):
            time.sleep(0.4)
            accelerator.wait_for_everyone()
        return 1

    assert launch(steps, 2, hang_timeout_s=1.5, cpu=True, start_method="fork").values == [1, 1]


@dataclass
class FakeProcess:
    pid: int = 0
    signals: list[int] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(2)
    yield page
    page.close()


def watched(page: ControlPage, folder: Path, limit_s: float | None = None) -> tuple[HangWatch, list[Member], list[str]]:
    members = [Member(rank, FakeProcess(), None) for rank in range(2)]  # type: ignore[arg-type]
    told: list[str] = []
    return HangWatch(page, members, str(folder / "store"), limit_s, told.append, now=0.0), members, told


def test_a_rank_that_others_are_ahead_of_is_named_once_after_half_a_minute(page: ControlPage, tmp_path: Path) -> None:
    watch, members, told = watched(page, tmp_path)
    (tmp_path / "stacks-0").write_text("main 0x01\n")
    page.count_collectives(0, 7)
    for now in (1.0, 30.9, 31.1, 31.8, 60.0, 90.0):
        assert watch.tick(now) is None
    assert members[0].process.signals == [ASK]  # type: ignore[attr-defined]
    assert members[1].process.signals == []  # type: ignore[attr-defined]  # it has no handler yet
    (line,) = told
    assert line.startswith("no rank has entered a step or a collective for 31 s; rank 1 seems to hold up the others:")


def test_a_long_computation_on_all_ranks_is_no_news(page: ControlPage, tmp_path: Path) -> None:
    watch, _, told = watched(page, tmp_path)
    assert [watch.tick(now) for now in (1.0, 32.0, 33.0, 90.0, 95.0)] == [None] * 5
    assert told == []


def test_whoever_gets_on_starts_the_clock_anew(page: ControlPage, tmp_path: Path) -> None:
    watch, _, _ = watched(page, tmp_path, limit_s=5.0)
    watch.tick(0.0)
    for now in range(1, 30):
        page.count_collectives(1, now)
        assert watch.tick(float(now)) is None
    assert watch.tick(34.5) is None  # asks
    hang = watch.tick(35.2)
    assert hang is not None
    assert hang.rank == 0
    assert str(hang).endswith("\n  rank 0: does not say where it is\n  rank 1: does not say where it is")
