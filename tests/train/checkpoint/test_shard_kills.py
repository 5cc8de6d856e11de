"""Ranks that save shards are killed at every point of a save, and at any time: what was complete loads."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from killing import Points
from nbaccel import Accelerator
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.utils import ProjectConfiguration

KEPT = 2

_GREETING = struct.Struct("<2i")
"""Rank and process number."""


def project(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=KEPT)


@dataclass(frozen=True)
class Program:
    """Trains a sharded layer of 5 rows, and saves after each step.

    blocking: as in `save_state`. saves: how many; None for no end.
    """

    folder: Path
    blocking: bool
    saves: int | None = None

    @property
    def diary(self) -> Path:
        return self.folder / "diary.txt"

    def write(self, *words: object) -> None:
        with open(self.diary, "a", buffering=1) as file:
            file.write(" ".join(map(str, words)) + "\n")

    def run(self, victim: int = -1, point: int | None = None, started: int | None = None) -> None:
        """On a rank.

        victim: the rank that dies at `point` of the last save.  started: pipe for this process's greeting.
        """
        from torch.distributed.fsdp import fully_shard

        accelerator = Accelerator(project_config=project(self.folder))
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 5)
        fully_shard(module)
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        written = -1
        for number in itertools.count(1):
            if number == self.saves and accelerator.process_index == victim:
                Points(point).watch(pytest.MonkeyPatch())
            accelerator.backward(model(torch.ones(2, 3) * number).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            weights = module.weight.full_tensor()  # type: ignore[operator]  # of the DTensor that it is now
            if accelerator.is_main_process:
                self.write("begun", number, digest(weights))
            accelerator.save_state(blocking=self.blocking)
            complete, written = (number, number) if self.blocking else (written, number)
            if accelerator.is_main_process and complete >= 0:
                self.write("complete", complete)
            if number == KEPT and started is not None:
                os.write(started, _GREETING.pack(accelerator.process_index, os.getpid()))
            if number == self.saves:
                accelerator.end_training()
                return

    def assert_nothing_is_lost(self) -> None:
        """In one process afterwards: load, compare, and go on saving in the same folder."""
        lines = [line.split() for line in self.diary.read_text().splitlines()] if self.diary.exists() else []
        completed = max((int(line[1]) for line in lines if line[0] == "complete"), default=-1)
        digests = {int(line[1]): line[2] for line in lines if line[0] == "begun"}
        accelerator = Accelerator(project_config=project(self.folder))
        module = torch.nn.Linear(3, 5)
        accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        accelerator.load_state()  # a damaged one would be a warning, and so an error
        step = accelerator._lifecycle.training().step
        assert step >= completed, f"{step} was loaded, and {completed} was complete"
        assert digest(module.weight) == digests[step]
        accelerator.save_state()
        assert len(CheckpointDirectory(project(self.folder))._all()) <= KEPT
        left = [path.name for path in (self.folder / "checkpoints").glob(".*")]
        assert left == [], "a killed process's folders go with the next save"


def digest(weight: torch.Tensor) -> str:
    return f"{zlib.crc32(repr(weight.tolist()).encode()):08x}"


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_any_point_of_a_save_costs_no_complete_checkpoint(
    tmp_path: Path, victim: int, blocking: bool
) -> None:
    """The last round passes all points and lives."""
    for point in itertools.count():
        folder = tmp_path / str(point)
        folder.mkdir()
        program = Program(folder, blocking, saves=KEPT + 1)
        try:
            run_ranks(2, program.run, victim, point)
        except RanksFailed:
            program.assert_nothing_is_lost()
        else:
            break
    assert point >= (8 if victim == 0 else 6)


def kill_any_time(program: Program, chance: random.Random) -> None:
    """Run `program` in two ranks until one of them, or both, are killed from outside."""
    reading, writing = os.pipe()
    victims = chance.choice([[0], [1], [1], [0, 1]])
    delay_s = chance.uniform(0, 0.15)  # any moment of the next few saves
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


def kill_often(times: int, place: Path) -> None:
    chance = random.Random(times)
    for number in range(times):
        folder = place / str(number)
        folder.mkdir()
        program = Program(folder, blocking=number % 2 < 1)
        kill_any_time(program, chance)
        program.assert_nothing_is_lost()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_that_are_killed_at_any_time_cost_no_complete_checkpoint(tmp_path: Path) -> None:
    kill_often(6, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_hundred_kills_cost_no_complete_checkpoint(tmp_path: Path) -> None:
    kill_often(100, tmp_path)
