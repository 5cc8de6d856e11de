"""A checkpoint folder is whole or not there, wherever the process is killed, and damage never loads."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from killing import die_at, points_passed
from nbaccel.errors import CannotSave, CheckpointCorrupt
from nbaccel.train.checkpoint import atomic_folder as folders
from nbaccel.train.checkpoint.atomic_folder import delete_whole, replacing
from nbaccel.train.checkpoint.content import Content
from nbaccel.train.checkpoint.directory import CheckpointDirectory, ProjectConfiguration
from nbaccel.train.checkpoint.manifest import Manifest


def save(target: Path, step: int) -> None:
    content = Content([{"weight": torch.full((4,), float(step))}], progress={"step": step})
    with replacing(target, content.nbytes) as folder:
        parts = list(content.ready())
        for part in parts:
            part.write(folder)
        Manifest(f"step {step}", step, 0, 0, 1, parts=[part.name for part in parts]).seal(folder)


def step_in(target: Path) -> int:
    choice = CheckpointDirectory(ProjectConfiguration()).choose(target)
    assert choice.manifest is not None
    content = Content.read(choice.folder, choice.manifest, trust=False)
    assert content.models[0]["weight"].tolist() == [float(content.progress["step"])] * 4
    return int(content.progress["step"])


def test_a_package_that_is_imported_from_a_folder_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    save(tmp_path / "saved", 3)
    assert step_in(tmp_path / "saved") == 3
    versions = json.loads((tmp_path / "saved" / "manifest.json").read_text())["versions"]
    assert versions["nbaccel"] == "not installed"


def points_of(target: Path) -> list[str]:
    return points_passed(lambda: save(target, step=0))


def killed_at(point: int, target: Path) -> None:
    """Save step 2 in a child that is killed at `point`."""
    die_at(point, lambda: save(target, step=2))


def test_a_save_that_is_killed_anywhere_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    save(tmp_path / "probe", step=0)
    points = points_of(tmp_path / "probe")
    assert len(points) >= 8
    assert {"fsync", "rename", "rmtree", "write_text"} <= set(points)
    steps = []
    for point, name in enumerate(points):
        target = tmp_path / f"{point}-{name}" / "last"
        save(target, step=1)
        killed_at(point, target)
        steps.append(step_in(target))
        save(target, step=3)
        assert step_in(target) == 3
        assert os.listdir(target.parent) == ["last"], f"killed before {name}: something was left behind"
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_while_the_older_one_is_deleted_its_name_is_that_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "last", step=1)

    def delete_half(folder: Path, **_: Any) -> None:
        os.unlink(folder / "manifest.json")
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die() -> None:
        monkeypatch.setattr(shutil, "rmtree", delete_half)
        save(tmp_path / "last", step=2)

    die_at(-1, save_and_die)
    assert Manifest.read(tmp_path / "last").step == 2


def test_a_first_save_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "last"
    killed_at(2, target)
    assert not target.exists()
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*last: no such folder"):
        step_in(target)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("file", ["manifest.json", "model.json", "model.safetensors", "training.json"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path / "last", step=1)
    path = tmp_path / "last" / file
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CheckpointCorrupt, match=rf"{file} is (missing|damaged)") as caught:
        step_in(tmp_path / "last")
    assert caught.value.file == str(path)
    if file == "model.safetensors":
        expected = {"remove": ("none",), "truncate": (f"{len(content) - 1} bytes",), "flip": ()}[damage]
        assert not expected or caught.value.got in expected
        assert caught.value.expected != caught.value.got


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    save(tmp_path / "last", step=1)
    path = tmp_path / "last" / "manifest.json"
    whole = path.read_bytes()
    content = json.loads(whole)
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 2
        path.write_bytes(flipped)
        try:
            Manifest.read(tmp_path / "last")
        except CheckpointCorrupt:
            continue
        assert json.loads(flipped) == content, "only white space may change unseen"


def test_a_newer_layout_is_refused_with_the_version_that_reads_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nbaccel.train.checkpoint.manifest._LAYOUT_WITHOUT_SHARDS", 4)
    save(tmp_path / "last", step=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointCorrupt, match=r"has layout 4, and this nbaccel reads layout 3 and older: .*cel \d"):
        Manifest.read(tmp_path / "last")


def test_a_full_disk_is_known_before_the_first_byte(tmp_path: Path) -> None:
    save(tmp_path / "last", step=1)
    huge = 10**18
    with (
        pytest.raises(CannotSave, match=r"last: No space left on device\. It needs 10{18} bytes, 1e\+09 GB") as caught,
        replacing(tmp_path / "last", huge),
    ):
        pytest.fail("nothing may be written")
    assert caught.value.needed_bytes == huge
    assert 0 < caught.value.free_bytes < huge
    assert step_in(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


def test_a_disk_that_fills_up_while_writing_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A limit on file sizes fails as a full disk does, for Python's own files and for safetensors'."""
    target = tmp_path / "last"
    save(target, step=1)
    content = Content([{"weight": torch.ones(50_000)}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with (
            pytest.raises(CannotSave, match=r"cannot write the checkpoint .*last: File too large\. It needs 200000 b"),
            replacing(target, content.nbytes) as folder,
        ):
            for part in content.ready():
                part.write(folder)
            Manifest("step 2", 2, 0, 0, 1).seal(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert step_in(target) == 1
    assert os.listdir(tmp_path) == ["last"]


def test_a_disk_that_fails_while_files_are_brought_to_it_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    save(tmp_path / "last", step=1)
    monkeypatch.setattr("nbaccel.train.checkpoint.manifest.sync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save(tmp_path / "last", step=2)
    assert step_in(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_to_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        CannotSave, match=rf"cannot write the checkpoint .*last \(16 bytes\): {os.strerror(code)}\. Save"
    ):
        save(tmp_path / "last", step=1)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "last", 0):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    alive = tmp_path / f".last.tmp-{os.getppid()}"
    alive.mkdir()
    dead = tmp_path / ".last.tmp-4194999"  # beyond the largest process number
    dead.mkdir()
    save(tmp_path / "last", step=1)
    assert sorted(os.listdir(tmp_path)) == [alive.name, "last"]


def test_names_with_pattern_characters_are_names(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "run[1]*", step)
    (tmp_path / ".run[1]*.tmp-4194999").mkdir()
    save(tmp_path / "run[1]*", step=3)
    assert os.listdir(tmp_path) == ["run[1]*"]


def test_deleting_is_a_rename_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "checkpoint_0", step=1)

    def killed(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_whole(tmp_path / "checkpoint_0")
    assert not (tmp_path / "checkpoint_0").exists()


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path / "last", step=1)
    assert step_in(tmp_path / "last") == 1


def test_files_that_no_manifest_lists_are_not_read(tmp_path: Path) -> None:
    save(tmp_path / "last", step=1)
    torch.save({"weight": torch.zeros(4)}, tmp_path / "last" / "model.pkl")
    (tmp_path / "last" / "model_1.json").write_text("{}")
    assert step_in(tmp_path / "last") == 1
