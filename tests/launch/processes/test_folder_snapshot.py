"""Files of a folder that have changed are found, and put back where the snapshot keeps them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nbaccel.launch.processes import folder_snapshot
from nbaccel.launch.processes.folder_snapshot import FolderSnapshot


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "old.txt").write_text("old\n")
    (home / "folder" / "kept.txt").write_text("kept\n")
    return home


def test_files_that_were_made_changed_and_removed_are_listed(home: Path) -> None:
    (home / ".git").mkdir()
    (home / "__pycache__").mkdir()
    (home / "link").symlink_to("/usr")
    snapshot = FolderSnapshot.of(home)
    assert snapshot.changed() == []
    (home / ".git" / "index").touch()
    (home / "__pycache__" / "x.pyc").touch()
    (home / "new.txt").touch()
    (home / "old.txt").write_text("NEW\n")
    (home / "folder" / "kept.txt").unlink()
    expected = [home / "folder" / "kept.txt", home / "new.txt", home / "old.txt"]
    assert snapshot.changed() == [str(path) for path in expected]


def test_a_folder_with_too_many_files_is_said_to_be_one(home: Path) -> None:
    for number in range(5):
        (home / f"{number}").touch()
    snapshot = FolderSnapshot.of(home, most=4)
    assert not snapshot.is_whole
    (home / "0").write_text("changed")
    (home / "1").unlink()
    assert snapshot.changed() == [
        str(home / "0"),
        str(home / "1"),
        f"{home} holds more than 4 files; new ones are not listed",
    ]


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    keep = tmp_path / "keep"
    keep.mkdir()
    return keep


def test_small_files_are_put_back_however_they_were_changed(home: Path, keep: Path) -> None:
    snapshot = FolderSnapshot.of(home, keep=keep)
    times = {path: path.stat().st_mtime_ns for path in (home / "old.txt", home / "folder" / "kept.txt")}
    (home / "old.txt").write_text("changed in its place")
    shutil.rmtree(home / "folder")
    (home / "new.txt").touch()
    assert snapshot.put_back() == [str(home / "folder" / "kept.txt"), str(home / "old.txt")]
    assert (home / "old.txt").read_text() == "old\n"
    assert (home / "folder" / "kept.txt").read_text() == "kept\n"
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert snapshot.changed() == [str(home / "new.txt")]


def test_large_files_are_put_back_if_they_were_removed_or_replaced(
    home: Path, keep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_snapshot, "_SMALL_BYTES", 0)
    (home / "third.txt").write_text("third\n")
    snapshot = FolderSnapshot.of(home, keep=keep)
    (home / "folder" / "kept.txt").unlink()
    (home / "another.txt").write_text("replaces it")
    os.replace(home / "another.txt", home / "old.txt")
    (home / "third.txt").write_text("changed in its place")
    assert snapshot.put_back() == [str(home / "folder" / "kept.txt"), str(home / "old.txt")]
    assert (home / "old.txt").read_text() == "old\n"
    assert (home / "folder" / "kept.txt").read_text() == "kept\n"
    assert snapshot.changed() == [str(home / "third.txt")]


def test_without_a_place_to_keep_files_nothing_is_put_back(home: Path) -> None:
    snapshot = FolderSnapshot.of(home)
    (home / "old.txt").unlink()
    assert snapshot.put_back() == []
    assert snapshot.changed() == [str(home / "old.txt")]
