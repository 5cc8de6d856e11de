"""Files of a folder that have changed are found, and put back where the snapshot keeps them."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from nbaccel.features.check import folder_snapshot
from nbaccel.features.check.folder_snapshot import FolderSnapshot, undo_changes


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


def test_files_that_are_gone_are_put_back(home: Path, keep: Path) -> None:
    snapshot = FolderSnapshot.of(home, keep=keep)
    times = {path: path.stat().st_mtime_ns for path in (home / "old.txt", home / "folder" / "kept.txt")}
    (home / "old.txt").unlink()
    shutil.rmtree(home / "folder")
    (home / "new.txt").touch()
    assert snapshot.put_back() == [str(home / "folder" / "kept.txt"), str(home / "old.txt")]
    assert (home / "old.txt").read_text() == "old\n"
    assert (home / "folder" / "kept.txt").read_text() == "kept\n"
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert snapshot.changed() == [str(home / "new.txt")]


def test_what_another_program_may_have_written_is_not_put_back(home: Path, keep: Path) -> None:
    """An editor replaces the file that it saves, or writes it in its place."""
    snapshot = FolderSnapshot.of(home, keep=keep)
    (home / "another.txt").write_text("replaces it")
    os.replace(home / "another.txt", home / "old.txt")
    (home / "folder" / "kept.txt").write_text("changed in its place")
    assert snapshot.put_back() == []
    assert (home / "old.txt").read_text() == "replaces it"
    assert (home / "folder" / "kept.txt").read_text() == "changed in its place"
    assert snapshot.changed() == [str(home / "folder" / "kept.txt"), str(home / "old.txt")]


def test_a_file_that_was_changed_before_it_was_removed_is_not_put_back(home: Path, keep: Path) -> None:
    snapshot = FolderSnapshot.of(home, keep=keep)
    (home / "old.txt").write_text("changed in its place")
    (home / "old.txt").unlink()
    assert snapshot.put_back() == []
    assert snapshot.changed() == [str(home / "old.txt")]


def test_where_a_file_can_have_no_second_name_small_ones_are_copied(
    home: Path, keep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(folder_snapshot, "_SMALL_BYTES", len("kept\n"))
    (home / "large.txt").write_text("large\n")
    before = (home / "old.txt").stat()
    snapshot = FolderSnapshot.of(home, keep=keep)
    (home / "old.txt").unlink()
    (home / "large.txt").unlink()
    assert snapshot.put_back() == [str(home / "old.txt")]
    assert (home / "old.txt").read_text() == "old\n"
    assert (home / "old.txt").stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_place_to_keep_files_nothing_is_put_back(home: Path) -> None:
    snapshot = FolderSnapshot.of(home)
    (home / "old.txt").unlink()
    assert snapshot.put_back() == []
    assert snapshot.changed() == [str(home / "old.txt")]


def test_what_is_looked_at_is_a_number_of_files_and_folders_and_no_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.count(step=1e6)  # as on a machine whose cores are all busy
    monkeypatch.setattr(time, "monotonic", lambda: next(jumps))
    assert FolderSnapshot.of(home).changed() == []
    for number in range(4):
        (home / f"empty {number}").mkdir()
    assert not FolderSnapshot.of(home, most=4).is_whole


def test_file_systems_that_are_mounted_below_are_left_alone() -> None:
    """A mounted drive may be far away, and large."""
    below = Path("/dev/shm")
    if not below.is_dir() or below.stat().st_dev == below.parent.stat().st_dev:
        pytest.skip("no file system is mounted there")
    with tempfile.NamedTemporaryFile(dir=below) as file:
        assert file.name not in FolderSnapshot.of(below.parent)._files
        assert file.name in FolderSnapshot.of(below)._files


def test_originals_are_put_back_with_their_times_and_what_ranks_made_is_removed(home: Path, keep: Path) -> None:
    for name in ("old.txt", "folder/kept.txt"):
        place = Path(f"{keep}{home}", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(home / name, place)
    assert undo_changes(keep).done == []
    before = (home / "old.txt").stat()
    (home / "old.txt").write_text("changed\n")
    shutil.rmtree(home / "folder")
    (home / "new" / "below").mkdir(parents=True)
    (home / "new" / "file").touch()
    Path(f"{keep}{home}/new").mkdir()
    Path(f"{keep}{home}/new/file").symlink_to("there was none")
    keep.with_name("new-folders").write_text(f"{home}/new\n{home}/new/below\n{home}\n")
    (home / "of another program").touch()
    expected = [home / "old.txt", home / "folder" / "kept.txt", home / "new" / "file"]
    assert sorted(undo_changes(keep).done) == sorted(map(str, expected))
    assert (home / "old.txt").read_text() == "old\n"
    assert (home / "old.txt").stat().st_mtime_ns == before.st_mtime_ns
    assert (home / "folder" / "kept.txt").read_text() == "kept\n"
    assert sorted(path.name for path in home.iterdir()) == ["folder", "of another program", "old.txt"]
    assert undo_changes(keep).done == []
