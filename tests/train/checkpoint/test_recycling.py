"""On a mounted drive a rotation overwrites the files it has instead of deleting them; on a disk it deletes."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from killing import die_at, points_passed
from nbaccel.train.checkpoint.atomic_folder import SPARE
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.utils import ProjectConfiguration
from trainings import Tally, Trained


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the table of mounts calls a mounted drive, as Colab's is."""
    folder = tmp_path / "drive"
    folder.mkdir()
    table = [
        SimpleNamespace(mountpoint="/", fstype="overlay"),
        SimpleNamespace(mountpoint=str(folder), fstype="fuse.drive"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: table)
    return folder


def numbered(folder: Path, limit: int) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)


def inodes(folder: Path) -> dict[str, set[int]]:
    """The files that exist below `folder`, by name."""
    found: dict[str, set[int]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found.setdefault(path.name, set()).add(path.stat().st_ino)
    return found


def forbid_deletion(patch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *_: Any, **__: Any) -> None:
        if os.path.exists(path):
            raise AssertionError(f"{path} would go to the drive's trash")

    patch.setattr(shutil, "rmtree", refuse)
    patch.setattr(os, "unlink", refuse)
    patch.setattr(Path, "unlink", refuse)


def test_a_rotation_on_a_drive_writes_over_a_fixed_set_of_files(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Trained.start(project_config=numbered(drive, limit=2))
    training.epoch()  # from here on the optimizer has tensors
    forbid_deletion(monkeypatch)
    for _ in range(3):
        training.accelerator.save_state()
    files = inodes(drive)
    assert {len(places) for places in files.values()} == {3}
    for _ in range(4):
        training.epoch()
        training.accelerator.save_state()
        assert inodes(drive) == files
    assert sorted(os.listdir(drive / "checkpoints")) == [SPARE, "checkpoint_5", "checkpoint_6"]
    again = Trained.start(project_config=numbered(drive, limit=2))
    again.accelerator.load_state()
    assert again.weights() == training.weights()


def test_one_name_on_a_drive_has_two_folders_that_take_turns(drive: Path) -> None:
    training = Trained.start()
    turns = []
    for _ in range(4):
        training.epoch()
        training.accelerator.save_state(drive / "last")
        turns.append((drive / "last" / "model.safetensors").stat().st_ino)
    assert turns[:2] == turns[2:]
    assert turns[0] != turns[1]
    assert sorted(os.listdir(drive)) == [SPARE, "last"]


def test_on_a_disk_nothing_is_kept_aside(tmp_path: Path) -> None:
    training = Trained.start()
    for _ in range(2):
        training.accelerator.save_state(tmp_path / "last")
    assert os.listdir(tmp_path) == ["last"]


def test_what_the_recycled_folder_held_beyond_that_is_not_in_the_new_checkpoint(drive: Path) -> None:
    training = Trained.start()
    accelerator = training.accelerator
    accelerator.register_for_checkpointing(Tally(a=1))

    def hook(models: object, weights: object, folder: str) -> None:
        Path(folder, "notes.txt").write_text("of a hook")
        Path(folder, "more").mkdir()
        Path(folder, "more", "notes.txt").write_text("of a hook")

    handle = accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(drive / "last")
    handle.remove()
    accelerator._checkpoints.registered.objects.clear()
    for _ in range(2):
        accelerator.save_state(drive / "last")
    names = set(os.listdir(drive / "last"))
    assert {"model.safetensors", "manifest.json"} < names
    assert not names & {"custom.json", "notes.txt", "more"}
    accelerator.load_state(drive / "last")


def test_a_file_that_is_in_another_folder_too_is_not_emptied(drive: Path) -> None:
    training = Trained.start()
    training.accelerator.save_state(drive / "last")
    shutil.copytree(drive / "last", drive / "copy", copy_function=os.link)
    for _ in range(3):
        training.epoch()
        training.accelerator.save_state(drive / "last")
    again = Trained.start()
    again.accelerator.load_state(drive / "copy")
    assert again.accelerator._lifecycle.training().step == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_save_on_a_drive_that_is_killed_anywhere_leaves_a_checkpoint_that_loads(drive: Path) -> None:
    """Under one name and in a rotation, with a spare folder at hand."""
    for way in ("one name", "rotation"):
        place = drive / way
        training = Trained.start(project_config=numbered(place / "0", limit=1))
        project = training.accelerator.project_configuration
        target = None if way == "rotation" else "last"
        steps = []

        def save(folder: Path, target: str | None = target, training: Trained = training) -> Callable[[], object]:
            return lambda: training.accelerator.save_state(None if target is None else folder / target)

        for _ in range(3):
            save(place / "0")()
        training.epoch()
        for point in itertools.count():
            folder = place / str(point + 1)
            shutil.copytree(place / "0", folder)
            project.project_dir, project.iteration = folder, 3
            if point == 0:
                count = len(points_passed(save(folder)))
                continue
            if point > count:
                break
            die_at(point - 1, save(folder))
            choice = CheckpointDirectory(project).choose(None if target is None else folder / target)
            assert choice.manifest is not None
            choice.manifest.verify(choice.folder)
            steps.append(choice.manifest.step)
        assert steps == sorted(steps)
        assert set(steps) == {0, 4}
