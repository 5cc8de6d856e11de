"""Maps whose ranks, helpers and kernels are killed at random: no answer is lost, none is there twice.

The kernel is a script that maps what it is told to; one that was killed is replaced, and maps the same again. Kills
come when the map has got so far, not at a time, so that a slow machine sees the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ITEMS = 10_000
WAIT_S = 120.0
KERNEL = """
import json, sys, time
import nbaccel
from nbaccel.features.map import map_items
from dataclasses import replace

def answer(state, items):
    time.sleep(0.0001 * len(items))
    return [f"{state}{item}" for item in items]

def load(accelerator):
    return "answer "

planned = map_items.planned
for line in sys.stdin:
    call = json.loads(line)
    map_items.planned = lambda options, *rest: planned(replace(options, start=call["start"]), *rest)
    answers = nbaccel.map(
        answer, [str(item) * (1 + item % 9) for item in range(call["items"])], setup=load, out=call["out"],
        num_processes=2, cpu=True, batch_size=20,
    )
    print("done", len(answers), len(answers.failed), flush=True)
"""


class MapKernel:
    """A process that maps; `kill` ends it as the system would."""

    def __init__(self, log: Path) -> None:
        self._log = open(log, "ab")  # noqa: SIM115  # until `close`
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def begin(self, out: Path, start: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"out": str(out), "items": ITEMS, "start": start}) + "\n")
        self.process.stdin.flush()

    def wait(self) -> str:
        """Return the line about the end of the map."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("done"):
                return line.strip()
        raise AssertionError(f"the map ended otherwise: {Path(self._log.name).read_text()[-3000:]}")

    def family(self) -> dict[str, list[int]]:
        """Return what has descended from the kernel: "ranks", and its helpers."""
        found: dict[str, list[int]] = {"ranks": [], "helpers": []}
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    command = " ".join(child.cmdline())
                    is_helper = "reaper.py" in command or (
                        "zygote import main" in command and child.ppid() == self.process.pid
                    )
                    found["helpers" if is_helper else "ranks"].append(child.pid)
                except psutil.Error:
                    continue
        except psutil.Error:
            pass
        return found

    def kill(self) -> None:
        """Kill it, and wait until nothing of it is left."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + WAIT_S
        while left := [pid for pids in family.values() for pid in pids if _lives(pid)]:
            assert time.monotonic() < deadline, f"these survived their kernel: {left}"
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._log.close()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class Runs:
    """Maps one after the other, in as many kernels as they take."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.kernel = self._new_kernel()
        self.kills: list[str] = []

    def _new_kernel(self) -> MapKernel:
        return MapKernel(self.folder / "log")

    def round(self, number: int, victims: list[str], start: str) -> None:
        """Map once, and kill one of each of `victims` on the way, each when a part of the work is done."""
        out = self.folder / f"answers-{number}.jsonl"
        self.kernel.begin(out, start)
        for turn, victim in enumerate(victims):
            share = (turn + self.chance.random()) / len(victims)
            if not self._wait_until(out, share):
                break  # it was faster
            self._kill(victim, out, start)
        assert self.kernel.wait() == f"done {ITEMS} 0"
        check(out)
        out.unlink()
        Path(f"{out}.manifest.json").unlink()

    def _wait_until(self, out: Path, share: float) -> bool:
        """Wait until about `share` of the records are written; return False if the map is over before."""
        records = Path(f"{out}.parts") / "records"
        deadline = time.monotonic() + WAIT_S
        while not out.exists():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            if self.kernel.process.poll() is not None:
                raise AssertionError((self.folder / "log").read_text()[-3000:])
            if _size_of(records) >= share * ITEMS * 60:
                return True
            time.sleep(0.005)
        return False

    def _kill(self, victim: str, out: Path, start: str) -> None:
        self.kills.append(victim)
        if victim == "kernel":
            self.kernel.kill()
            self.kernel.close()
            self.kernel = self._new_kernel()
            self.kernel.begin(out, start)
            return
        pids = self.kernel.family()[victim]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)

    def close(self) -> None:
        self.kernel.close()


def _size_of(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def check(out: Path) -> None:
    """Check that each item has one answer, its own, and that nothing else is there."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [{"index": item, "answer": f"answer {str(item) * (1 + item % 9)}"} for item in range(ITEMS)]
    assert lines == expected
    assert not [path.name for path in out.parent.iterdir() if ".parts" in path.name]


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    runs = Runs(tmp_path, getattr(request, "param", 0))
    yield runs
    runs.close()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "way"),
    [
        (["ranks", "helpers", "ranks"], "fork"),
        (["ranks", "ranks"], "fork"),
        (["helpers", "ranks"], "zygote"),
        (["ranks", "ranks", "ranks"], "fork"),
        (["ranks", "kernel", "ranks"], "fork"),
    ],
)
def test_a_map_survives_kills_of_ranks_helpers_and_kernels(runs: Runs, victims: list[str], way: str) -> None:
    runs.round(0, victims, way)
    assert runs.kills, "the map was over before anything was killed"
    assert runs.kills == victims[: len(runs.kills)]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runs", [time.time_ns()], indirect=True, ids=["random"])
def test_fifty_maps_survive_random_kills(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(50):
        victims = [
            runs.chance.choice(["ranks", "ranks", "helpers", "kernel"]) for _ in range(runs.chance.randint(1, 4))
        ]
        if (
            victims.count("ranks") == 4
        ):  # all may hit one rank before it has done anything: then the map ends, by design
            victims.pop()
        start, began = runs.chance.choice(["fork", "zygote"]), time.monotonic()
        runs.round(number, victims, start)
        with capsys.disabled():
            print(f"{number:3d} {start:6} {', '.join(victims):40} {time.monotonic() - began:5.1f} s", flush=True)
