"""Faults 11 to 16 of 26, as launched ranks meet them: checkpoints that are cut off, damaged, foreign or too many."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mounts import make_read_only, on_small_disk
from nbaccel import RankDied, launch
from nbaccel.errors import CannotSave, CheckpointCorrupt, UntrustedPickle
from nbaccel.testing import Faults
from nbaccel.train.checkpoint import saving
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.utils import ProjectConfiguration
from trainings import Trained

pytestmark = pytest.mark.slow


def project(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)


def save_twice(folder: Path, faults: Faults | None = None) -> list[float]:
    """A checkpoint of step 2, and one of step 4 under `faults`; the weights of the first."""
    training = Trained.start(project_config=project(folder), cpu=True)
    training.epoch()
    training.accelerator.save_state()
    weights = training.weights()
    training.accelerator.wait_for_everyone()
    training.epoch()
    with faults or Faults() as faults, faults.in_saves():
        training.accelerator.save_state()
    return weights


def loaded(folder: Path) -> tuple[int, list[float]]:
    training = Trained.start(project_config=project(folder), cpu=True)
    training.accelerator.load_state()
    return training.accelerator._lifecycle.training().step, training.weights()


@pytest.mark.parametrize(("point", "passings"), [("sync", (0, 1, 4)), ("rename", (0, 1))])
def test_fault_11_sigkill_in_save_state(tmp_path: Path, point: str, passings: tuple[int, ...]) -> None:
    """`total_limit=1`: whatever is deleted for the new checkpoint is deleted after it is complete."""
    steps = set()
    for passing in passings:
        folder = tmp_path / str(passing)
        faults = Faults().kill_at(point, rank=0, passing=passing)
        error = launch(save_twice, 2, (folder, faults), start_method="fork", cpu=True, check=False).error
        assert isinstance(error, RankDied)
        assert (error.rank, error.exit_code) == (0, -signal.SIGKILL)
        step, _ = loaded(folder)
        steps.add(step)
    assert steps <= {2, 4}
    assert 2 in steps


def fail_while_rank_0_saves(folder: Path, blocking: bool) -> None:
    training = Trained.start(cpu=True)
    training.epoch()
    if is_saving := training.accelerator.is_main_process:
        saving.sweep = lambda folder: time.sleep(3)  # of this process, which ends with the run
    training.accelerator.save_state(folder, blocking=blocking)
    if not is_saving:
        raise ValueError("a peer fails")
    training.accelerator.wait_for_everyone()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_is_complete_though_another_rank_fails_meanwhile(tmp_path: Path, blocking: bool) -> None:
    """Rank 0 needs no other rank for it, and would be killed after 0.7 s."""
    error = launch(fail_while_rank_0_saves, 2, (tmp_path / "last", blocking), cpu=True, check=False).error
    assert isinstance(error, ValueError)
    assert Manifest.read(tmp_path / "last").step == 2


DAMAGES = {
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "removed": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")

    def save() -> None:
        training = Trained.start(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
        for _ in range(2):
            training.epoch()
            training.accelerator.save_state()

    launch(save, 2, start_method="fork", cpu=True)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_fault_12_a_damaged_file(two_checkpoints: Path, tmp_path: Path, damage: str) -> None:
    names = sorted(path.name for path in (two_checkpoints / "checkpoints" / "checkpoint_1").iterdir())
    for name in names:
        folder = tmp_path / name
        shutil.copytree(two_checkpoints, folder)
        DAMAGES[damage](folder / "checkpoints" / "checkpoint_1" / name)
        training = Trained.start(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            training.accelerator.load_state()
        # Random numbers can be drawn anew; anything else that is damaged makes the older checkpoint the newest.
        is_random = name.startswith("generators")
        assert training.accelerator._lifecycle.training().step == (4 if is_random else 2)
        assert any(name in str(warning.message) for warning in said) or name == "generators_1.json", name


def save_on_a_disk_with_trouble(folder: Path, trouble: str) -> tuple[str, int]:
    training = Trained.start(cpu=True, on_save_error="warn")
    training.epoch()
    training.accelerator.save_state(folder / "last")
    training.accelerator.wait_for_everyone()
    if training.accelerator.is_main_process:
        if trouble == "full":
            with pytest.raises(OSError, match="No space"), open(folder / "ballast", "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1 << 16))
        else:
            make_read_only(folder)
    training.accelerator.wait_for_everyone()
    training.epoch()
    with pytest.warns(UserWarning, match="goes on without this checkpoint") as said:
        training.accelerator.save_state(folder / "last")
    training.epoch()
    training.accelerator.load_state(folder / "last")
    return str(said[0].message), training.accelerator._lifecycle.training().step


@pytest.mark.parametrize(("trouble", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
def test_fault_13_the_disk_is_full(tmp_path: Path, trouble: str, reason: str) -> None:
    def run() -> Any:
        return launch(save_on_a_disk_with_trouble, 2, (tmp_path, trouble), start_method="fork", cpu=True).values

    for said, step in on_small_disk(tmp_path, 4 << 20, run):
        assert reason in said
        assert step == 2


def test_fault_13_the_disk_is_full_is_an_error_by_default(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match="No space left on device"):
        launch(save_twice, 2, (tmp_path, Faults().enospc_at("sync")), start_method="fork", cpu=True)
    assert loaded(tmp_path)[0] == 2


class Canary:
    """Sings when a pickle builds it."""

    def __init__(self, song: Path) -> None:
        self.song = song

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.song),)


def test_fault_14_a_malicious_pickle(two_checkpoints: Path, tmp_path: Path) -> None:
    song = tmp_path / "song"
    names = sorted(path.name for path in (two_checkpoints / "checkpoints" / "checkpoint_1").iterdir())
    foreign = ["custom_checkpoint_0.pkl", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", ".metadata"]
    for name in [*names, *foreign]:
        folder = tmp_path / f"copy-{name}"
        shutil.copytree(two_checkpoints, folder)
        for number in range(2):
            path = folder / "checkpoints" / f"checkpoint_{number}" / name
            with open(path, "wb") as file:
                torch.save({"state": Canary(song)}, file)
        training = Trained.start(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(CheckpointCorrupt, UntrustedPickle):
                training.accelerator.load_state()
    assert not song.exists()
    torch.load(path, weights_only=False)  # it would have sung
    assert song.exists()


def save_one(folder: Path) -> int:
    training = Trained.start(gradient_accumulation_steps=2, samples=96, batch_size=2, cpu=True)
    for number, (x,) in enumerate(training.loader):
        training.batch(x)
        if number == 5:
            break
    training.accelerator.save_state(folder)
    return training.accelerator._lifecycle.training().step


def go_on(folder: Path) -> int:
    training = Trained.start(gradient_accumulation_steps=2, samples=96, batch_size=2, cpu=True)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        training.accelerator.load_state(folder)
    step = training.accelerator._lifecycle.training().step
    training.epoch()
    return step


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_fault_15_the_world_size_changes_on_resume(tmp_path: Path, before: int, after: int) -> None:
    """Every rank goes on at the same step: else their windows shift, and they hang in each other's gradients."""
    saved = launch(save_one, before, (tmp_path / "last",), start_method="fork", cpu=True).values
    assert saved == [3] * before
    assert launch(go_on, after, (tmp_path / "last",), start_method="fork", cpu=True).values == [3] * after


def saves_on_the_main_process_only(folder: Path) -> list[float]:
    training = Trained.start(cpu=True)
    training.epoch()
    if training.accelerator.is_main_process:
        training.accelerator.save_state(folder)
    training.accelerator.wait_for_everyone()  # pairs with nothing inside of save_state
    total = training.accelerator.reduce(torch.ones(1))
    assert float(total) == 2
    return training.weights()


def test_fault_16_save_on_the_main_rank_only(tmp_path: Path) -> None:
    first, _ = launch(saves_on_the_main_process_only, 2, (tmp_path / "last",), start_method="fork", cpu=True).values
    training = Trained.start(cpu=True)
    training.accelerator.load_state(tmp_path / "last")
    assert training.weights() == first
