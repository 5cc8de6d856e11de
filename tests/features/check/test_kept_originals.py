"""Originals of what ranks change are kept before it is changed, and the kernel puts them back."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from nbaccel.base.settings import RunSettings
from nbaccel.features.check import kept_originals
from nbaccel.features.check.folder_snapshot import FolderSnapshot, undo_changes
from nbaccel.features.check.kept_originals import KeptOriginals
from nbaccel.features.check.unrun_statements import UnrunStatements
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen

NAMES = ("again", "added", "array.npy", "copied", "cut", "linked", "moved", "removed", "replaced")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in NAMES:
        (home / name).write_text(f"{name} of the user")
    (home / "link").symlink_to("linked")
    return home


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    return tmp_path / "ranks" / "originals"


@pytest.fixture
def run(launcher: Launcher, originals: Path, start_method: str) -> Callable[[Callable[..., Any]], None]:
    """Two ranks whose saves are redirected."""
    for folder in (originals, originals.with_name("saves"), originals.with_name("records")):
        folder.mkdir(parents=True)

    def run(function: Callable[..., Any]) -> None:
        spec = LaunchSpec(
            FunctionTask(function),
            Devices(2),
            Start(start_method, "a test"),
            RunSettings(cpu=True),
            parts=(("nbaccel.features.check.protected_files:ProtectedFiles", str(originals.parent)),),
        )
        run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
        try:
            if run.error is not None:
                raise run.error
        finally:
            ended.close()

    return run


Run = Callable[[Callable[..., Any]], None]


def changes() -> None:
    for _ in range(2):
        Path("again").write_text(f"of rank {os.environ['RANK']}")
        with open("new", "a") as file:
            file.write("of a rank")
    os.makedirs("made/below", exist_ok=True)
    Path("made/below/file").touch()
    tempfile.tempdir = None
    tempfile.gettempdir()  # it writes a file while it holds a lock
    if os.environ["RANK"] != "0":
        return
    with open("added", "a") as file:
        file.write("more")
    np.save("array.npy", np.ones(3))
    torch.save(torch.ones(1), "model.pt")
    shutil.copyfile("added", "copied")
    os.truncate("cut", 0)
    Path("link").write_text("of rank 0")
    os.rename("moved", "elsewhere")
    os.remove("removed")
    Path("replaced.tmp").write_text("of rank 0")
    os.replace("replaced.tmp", "replaced")


def state_of(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.iterdir() if path.name in NAMES}


def test_what_ranks_have_changed_is_undone(run: Run, home: Path, originals: Path) -> None:
    before, names = state_of(home), sorted(os.listdir(home))
    run(changes)
    assert state_of(home) != before
    made = ["elsewhere", "new", "made/below/file"]
    assert sorted(undo_changes(originals).done) == sorted(str(home / name) for name in [*NAMES, *made])
    assert state_of(home) == before
    assert (home / "link").is_symlink()
    assert sorted(os.listdir(home)) == names


class WritesItems(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        with open("added", "a") as file:
            file.write(str(index))
        return index


def loads() -> None:
    assert len(list(DataLoader(WritesItems(), num_workers=2))) == 2


def test_the_workers_of_a_loader_keep_originals_too(run: Run, home: Path, originals: Path) -> None:
    run(loads)
    assert undo_changes(originals).done == [str(home / "added")]
    assert (home / "added").read_text() == "added of the user"


def reads() -> None:
    Path("added").read_text()
    os.close(os.open("cut", os.O_RDONLY))


def test_what_a_rank_only_reads_is_left_to_other_programs(run: Run, home: Path, originals: Path) -> None:
    run(reads)
    (home / "added").write_text("by an editor")
    assert undo_changes(originals).done == []
    assert (home / "added").read_text() == "by an editor"


@pytest.fixture
def told() -> list[Mapping[str, Any]]:
    """The records of lines that were not run."""
    return []


@pytest.fixture
def kept(home: Path, originals: Path, told: list[Mapping[str, Any]]) -> KeptOriginals:
    originals.mkdir(parents=True)
    return KeptOriginals(str(originals), UnrunStatements(told.append))


def test_a_file_that_a_rank_has_looked_for_in_vain_is_not_its_own(
    kept: KeptOriginals, home: Path, originals: Path
) -> None:
    kept.look("os.remove", ("by another", -1))
    kept.look("os.rename", ("by another", "made", -1, -1))
    kept.look("os.truncate", ("by another", 0))
    kept.look("open", ("by another", "r+", os.O_RDWR))
    for name in ("by another", "made"):
        (home / name).touch()
    assert undo_changes(originals).done == []
    assert (home / "by another").exists()


def test_a_file_that_is_too_large_for_a_copy_is_not_changed(
    kept: KeptOriginals, originals: Path, told: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_originals, "_MOST_BYTES", 3)
    with pytest.raises(
        OSError, match=r"a check does not change it: .*/added has 17 bytes, which is too large for a copy"
    ):
        kept.look("open", ("added", "w", os.O_WRONLY))
    kept.look("open", (3, "w", os.O_WRONLY))
    kept.look("os.remove", ("cut", 5))
    assert [path for path in originals.parent.rglob("*") if not path.is_dir()] == []
    (record,) = told
    assert record["file"] == __file__
    assert record["why"].startswith("it changes a file, and /")


def fail(number: int) -> Callable[..., None]:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fails


def test_a_file_of_which_no_copy_can_be_made_is_not_changed(
    kept: KeptOriginals, home: Path, originals: Path, told: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(path: str, copy: str) -> None:
        Path(copy).touch()
        Path(f"{originals}{path}").parent.mkdir(parents=True, exist_ok=True)
        Path(f"{originals}{path}").touch()

    monkeypatch.setattr(kept_originals, "copy_bytes", lose)
    kept.look("os.remove", ("cut", -1))  # another rank is faster
    monkeypatch.setattr(kept_originals, "copy_bytes", fail(errno.ENOSPC))
    for _ in range(2):
        with pytest.raises(OSError, match=r"does not change it: .*/added cannot be copied \(No space left on device\)"):
            kept.look("open", ("added", "w", os.O_WRONLY))
    (record,) = told
    assert record["why"] == f"it changes a file, and {home}/added cannot be copied (No space left on device)"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the change itself fails
    kept.look("os.remove", ("linked", -1))


def test_a_changed_file_is_put_back_as_the_same_file(kept: KeptOriginals, home: Path, originals: Path) -> None:
    with open("added", "a") as log:  # the notebook has it open
        kept.look("open", ("added", "w", os.O_WRONLY | os.O_CREAT))
        (home / "added").write_text("a longer text, by a rank")
        os.chmod("added", 0o600)
        assert undo_changes(originals).done == [str(home / "added")]
        log.write(", and more")
    assert (home / "added").read_text() == "added of the user, and more"
    assert (home / "added").stat().st_mode & 0o777 == (home / "cut").stat().st_mode & 0o777


def test_files_that_have_changed_places_get_their_own_content(
    kept: KeptOriginals, home: Path, originals: Path, tmp_path: Path
) -> None:
    before, second_names = state_of(home), tmp_path / "second names"
    second_names.mkdir()
    snapshot = FolderSnapshot.of(home, keep=second_names)
    for source, target in (("moved", "replaced"), ("added", "aside"), ("cut", "added"), ("aside", "cut")):
        kept.look("os.rename", (source, target, -1, -1))
        os.rename(source, target)
    assert snapshot.put_back() == [
        str(home / "moved")
    ]  # by its second name: now the same file as the one in `replaced`
    undo_changes(originals)
    assert state_of(home) == before


def test_on_a_full_disk_nothing_is_half_written(
    kept: KeptOriginals, home: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.look("open", ("added", "w", os.O_WRONLY))
    (home / "added").write_text("by a rank")
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.ENOSPC), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", fail(errno.ENOSPC))
        assert undo_changes(originals).done == []
        assert (home / "added").read_text() == "by a rank"
    assert undo_changes(originals).done == [str(home / "added")]
    assert (home / "added").read_text() == "added of the user"


def test_links_and_modes_are_undone(kept: KeptOriginals, home: Path, originals: Path) -> None:
    before, names, mode = state_of(home), sorted(os.listdir(home)), os.stat("cut").st_mode
    kept.look("os.symlink", ("added", "symbolic", -1))
    os.symlink("added", "symbolic")
    kept.look("os.link", ("removed", "hard", -1, -1))
    os.link("removed", "hard")
    for name in ("symbolic", "hard"):
        kept.look("open", (name, "w", os.O_WRONLY))
        (home / name).write_text("by a rank")
    kept.look("os.chmod", ("cut", 0o640, -1))
    os.chmod("cut", 0o640)
    kept.look("os.link", ("none", "by another", -1, -1))
    (home / "by another").touch()
    undo_changes(originals)
    assert state_of(home) == before
    assert os.stat("cut").st_mode == mode
    assert sorted(os.listdir(home)) == sorted([*names, "by another"])


def test_of_what_is_moved_only_that_is_removed_in_its_new_place(
    kept: KeptOriginals, home: Path, originals: Path
) -> None:
    names = sorted(os.listdir(home))
    kept.look("os.mkdir", ("made", 0o777, -1))
    (home / "made" / "below").mkdir(parents=True)  # and files of which Python has told nothing
    (home / "made" / "below" / "file").touch()
    kept.look("os.rename", ("made", "results", -1, -1))
    os.rename("made", "results")
    Path("results/of another program").touch()
    undo_changes(originals)
    assert sorted(os.listdir(home)) == sorted([*names, "results"])
    assert os.listdir("results") == ["of another program"]


def test_a_folder_of_the_users_that_a_library_moves_comes_back_with_its_files(
    kept: KeptOriginals, home: Path, originals: Path
) -> None:
    (home / "folder").mkdir()
    (home / "folder" / "file").write_text("of the user")
    kept.look("os.rename", ("folder", "away", -1, -1))
    os.rename("folder", "away")
    undo_changes(originals)
    assert (home / "folder" / "file").read_text() == "of the user"
    assert not (home / "away").exists()


@pytest.mark.parametrize(
    ("path", "home", "is_ours"),
    [
        ("/tmp/nbaccel-run-1/file", "/home", True),
        ("/tmp/nbaccel-check-1", "/home", True),
        ("/tmp/nbaccel-work/file", "/home", False),
        ("/tmp/work/nbaccel-run-1/file", "/home", False),
        ("/tmp/nbaccel-run-1/file", "/tmp/nbaccel-run-1", False),
        ("/tmp/nbaccel-run-1/file", "/tmp/nbaccel-run-1/below", False),
        ("/tmp/nbaccel-run-1/file", "/tmp/nbaccel-run-2", True),
    ],
)
def test_only_the_folders_of_this_project_are_its_own(path: str, home: str, is_ours: bool) -> None:
    assert kept_originals.is_of_this_project(path, "/tmp", home) is is_ours


def test_what_cannot_be_put_back_is_not_removed(
    kept: KeptOriginals, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "folder" / "below").mkdir(parents=True)
    (home / "folder" / "file").write_text("1234")
    (tmp_path / "beside").touch()
    why_not = kept.why_not_removed
    assert (why_not("added", False), why_not("added", True), why_not("folder", False), why_not("none", False)) == (
        "",
    ) * 4
    assert why_not("../beside", False) == f"it removes {tmp_path}/beside, which is outside of the working folder"
    assert why_not("folder", True) == f"it moves the folder {home}/folder"
    monkeypatch.setattr(kept_originals, "_MOST_BYTES", 3)
    assert why_not("folder", False) == f"it removes the folder {home}/folder, which is too large for a copy"


def test_what_a_rank_has_made_may_be_removed_anywhere(kept: KeptOriginals, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    kept.look("os.mkdir", (str(beside), 0o777, -1))
    kept.look("open", (f"{beside}.txt", "w", os.O_WRONLY | os.O_CREAT))
    beside.mkdir()
    beside.with_suffix(".txt").touch()
    (beside / "file").touch()
    assert [kept.why_not_removed(str(path), True) for path in (beside, beside / "file", f"{beside}.txt")] == [""] * 3


def test_folders_and_links_that_are_removed_are_put_back(kept: KeptOriginals, home: Path, originals: Path) -> None:
    (home / "folder" / "empty").mkdir(parents=True)
    (home / "folder" / "link").symlink_to("../added")
    (home / "folder" / "file").write_text("of the user")
    kept.look("shutil.rmtree", ("folder", None))
    shutil.rmtree("folder")
    undo_changes(originals)
    assert sorted(os.listdir("folder")) == ["empty", "file", "link"]
    assert os.readlink("folder/link") == "../added"
    assert Path("folder/file").read_text() == "of the user"


def test_a_folder_that_a_rank_has_made_and_moved_is_removed(kept: KeptOriginals, home: Path, originals: Path) -> None:
    names = sorted(os.listdir(home))
    kept.look("os.mkdir", ("made", 0o777, -1))
    os.mkdir("made")
    kept.look("open", ("made/file", "w", os.O_WRONLY | os.O_CREAT))
    Path("made/file").touch()
    kept.look("os.rename", ("made", "away", -1, -1))
    os.rename("made", "away")
    undo_changes(originals)
    assert sorted(os.listdir(home)) == names


def test_a_hidden_file_counts_where_a_line_of_the_users_changes_it(
    kept: KeptOriginals, home: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".mine").write_text("of the user")
    (home / ".cache").write_text("of a library")
    kept.look("open", (".mine", "w", os.O_WRONLY))
    monkeypatch.setattr(kept_originals, "line_of_user", lambda: None)
    kept.look("open", (".cache", "w", os.O_WRONLY))
    for name in (".mine", ".cache"):
        (home / name).write_text("changed")
    assert undo_changes(originals).done == [str(home / ".mine")]
    assert (home / ".mine").read_text() == "of the user"
