"""Two ranks that train and save are killed, at every point of a save and at any time: what was complete loads."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from killing import Points
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.utils import ProjectConfiguration
from trainings import Trained

KEPT = 2

_GREETING = struct.Struct("<2i")
"""Rank and process number."""


def project(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=KEPT)


def digest(training: Trained) -> str:
    return f"{zlib.crc32(repr(training.weights()).encode()):08x}"


@dataclass(frozen=True)
class Diary:
    """What rank 0 says of its saves; it outlives the process, and is beside the checkpoints."""

    path: Path

    def write(self, *words: object) -> None:
        with open(self.path, "a", buffering=1) as file:
            file.write(" ".join(map(str, words)) + "\n")

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    @property
    def digests(self) -> dict[int, str]:
        """Of the weights, by the step of each save that was begun."""
        return {int(line[1]): line[2] for line in self.lines() if line[0] == "begun"}

    @property
    def completed(self) -> int:
        """The step of the last save that was complete."""
        return max((int(line[1]) for line in self.lines() if line[0] == "complete"), default=-1)


@dataclass(frozen=True)
class Program:
    """Trains and saves after each epoch. blocking: as in `save_state`. saves: how many; None for no end."""

    folder: Path
    blocking: bool
    saves: int | None = None

    @property
    def diary(self) -> Diary:
        return Diary(self.folder / "diary.txt")

    def run(self, victim: int = -1, point: int | None = None, started: int | None = None) -> None:
        """On a rank.

        victim: the rank that dies at `point` of the last save.  started: pipe for this process's greeting.
        """
        training = Trained.start(project_config=project(self.folder))
        accelerator, written = training.accelerator, -1
        for number in itertools.count(1):
            if number == self.saves and accelerator.process_index == victim:
                Points(point).watch(pytest.MonkeyPatch())
            training.epoch()
            step = accelerator._lifecycle.training().step
            if accelerator.is_main_process:
                self.diary.write("begun", step, digest(training))
            accelerator.save_state(blocking=self.blocking)
            complete, written = (step, step) if self.blocking else (written, step)  # the one before has been joined
            if accelerator.is_main_process and complete >= 0:
                self.diary.write("complete", complete)
            if number == KEPT and started is not None:
                os.write(started, _GREETING.pack(accelerator.process_index, os.getpid()))
            if number == self.saves:
                return

    def assert_nothing_is_lost(self) -> None:
        """In one process afterwards: load, compare, and go on saving in the same folder."""
        again = Trained.start(project_config=project(self.folder))
        again.accelerator.load_state()  # a damaged one would be a warning, and so an error
        step = again.accelerator._lifecycle.training().step
        assert step >= self.diary.completed, f"{step} was loaded, and {self.diary.completed} was complete"
        assert digest(again) == self.diary.digests[step]
        again.accelerator.save_state()
        assert len(CheckpointDirectory(project(self.folder))._all()) <= KEPT
        left = [path.name for path in (self.folder / "checkpoints").glob(".*") if ".rank" not in path.name]
        assert left == [], "a killed process's folders go with the next save"


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A folder in memory, which is no disk that a temporary file would be on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nbaccel-kills-") as folder:
        yield Path(folder)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_any_point_of_a_save_costs_no_complete_checkpoint(
    tmp_path: Path, other_disk: Path, victim: int, blocking: bool
) -> None:
    """On this disk and on the other in turn; the last round passes all points and lives."""
    for point in itertools.count():
        folder = (tmp_path, other_disk)[point % 2] / str(point)
        folder.mkdir()
        program = Program(folder, blocking, saves=KEPT + 1)
        try:
            run_ranks(2, program.run, victim, point)
        except RanksFailed:
            program.assert_nothing_is_lost()
        else:
            break
    assert point >= (8 if victim == 0 else 3)


def kill_any_time(program: Program, chance: random.Random) -> None:
    """Run `program` in two ranks until one of them, or both, are killed from outside."""
    reading, writing = os.pipe()
    victims = chance.choice([[0], [0], [1], [0, 1]])
    delay_s = chance.uniform(0, 0.08)  # any moment of the next few saves
    is_over = threading.Event()

    def kill() -> None:
        greetings = [os.read(reading, _GREETING.size) for _ in range(2)]
        if not all(greetings) or is_over.wait(delay_s):
            return  # they failed before; their numbers may be others' by now
        pids = dict(map(_GREETING.unpack, greetings))
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(RanksFailed):
            run_ranks(2, program.run, -1, None, writing)
    finally:
        is_over.set()
        os.close(writing)
        killer.join()
        os.close(reading)


def kill_often(times: int, places: tuple[Path, Path]) -> None:
    chance = random.Random(times)
    for number in range(times):
        folder = places[number % 2] / str(number)
        folder.mkdir()
        program = Program(folder, blocking=number % 4 < 2)
        kill_any_time(program, chance)
        program.assert_nothing_is_lost()


@pytest.mark.slow
def test_ranks_that_are_killed_at_any_time_cost_no_complete_checkpoint(tmp_path: Path, other_disk: Path) -> None:
    kill_often(8, (tmp_path, other_disk))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_kills_cost_no_complete_checkpoint(tmp_path: Path, other_disk: Path) -> None:
    kill_often(200, (tmp_path, other_disk))
