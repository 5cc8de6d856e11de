"""The place of a run whose files are thrown away: what it says, and that it leaves the working folder as it was."""

from __future__ import annotations

import shutil
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nbaccel.features.check.dry_run_ranks import DryRunRanks, interrupted
from nbaccel.features.check.shield.file_shield import FileShield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "old.txt").write_text("old")
    (home / "gone.txt").write_text("gone")
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def launcher() -> Any:
    return types.SimpleNamespace(resources=types.SimpleNamespace(guard=lambda line: None))


def with_shield(monkeypatch: pytest.MonkeyPatch, open_folders: Sequence[str] = (), why_not: str = "") -> None:
    def start(own: list[Path], folder: Path) -> FileShield:
        (folder / "runs").mkdir()
        answer: dict[str, Any] = {"why_not": why_not, "pid": 1, "namespace": "mnt:[1]", "covered": ["/"]}
        answer["open"] = [*open_folders, str(folder / "runs"), *map(str, own)]
        return FileShield(None, folder, answer | {"memory_bytes": 0})

    monkeypatch.setattr(FileShield, "start", start)


def change(place: DryRunRanks, home: Path) -> None:
    """Do as ranks do."""
    kept = Path(f"{place.records.with_name('originals')}{home}", "old.txt")
    kept.parent.mkdir(parents=True)
    shutil.copy2("old.txt", kept)
    Path("old.txt").write_text("changed")
    Path("gone.txt").unlink()
    Path("new.txt").touch()


def test_a_whole_shield_needs_no_words(home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shield(monkeypatch)
    said: list[str] = []
    with DryRunRanks.start(launcher) as place:
        place.watch_files(said.append)
        assert place.is_shielded
        assert place.changed_files() == []
    assert said == []
    assert not place.records.exists()


def test_without_a_shield_changes_are_undone_and_others_are_listed(
    home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shield(monkeypatch, why_not="it is a test")
    said: list[str] = []
    with DryRunRanks.start(launcher) as place:
        place.watch_files(said.append)
        change(place, home)
        changed = place.changed_files()
    assert said[0].startswith("files are not shielded here: it is a test. Saves of torch,")
    assert changed == [f"{home}/new.txt"]
    assert {path.name: path.read_text() for path in home.iterdir()} == {
        "old.txt": "old",
        "gone.txt": "gone",
        "new.txt": "",
    }


def test_a_folder_that_the_shield_leaves_open_is_watched_as_without_one(
    home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shield(monkeypatch, open_folders=[str(home)])
    said: list[str] = []
    with DryRunRanks.start(launcher) as place:
        assert not place.is_shielded
        place.watch_files(said.append)
        assert place.records.with_name("saves").is_dir()
        change(place, home)
        assert place.changed_files() == [f"{home}/new.txt"]
    assert said[0].startswith(f"files are not shielded in {home}. Saves of torch,")
    assert (home / "old.txt").read_text() == "old"


def test_what_others_write_to_a_file_that_the_shield_covers_is_theirs(
    home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shield(monkeypatch, open_folders=["/none"])
    with DryRunRanks.start(launcher) as place:
        place.watch_files()
        change(place, home)
        assert place.changed_files() == []
    assert (home / "old.txt").read_text() == "changed"


def test_an_interrupted_run_puts_files_back(home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shield(monkeypatch, why_not="it is a test")
    with pytest.raises(KeyboardInterrupt), DryRunRanks.start(launcher) as place:
        place.watch_files()
        change(place, home)
        raise KeyboardInterrupt
    assert (home / "old.txt").read_text() == "old"
    assert (home / "gone.txt").read_text() == "gone"


def test_an_interrupt_names_what_has_changed() -> None:
    assert str(interrupted("the check was", [])) == "the check was interrupted; nothing was changed."
    assert str(interrupted("the trials were", ["/a", "/b"])) == "the trials were interrupted; changed: /a, /b."
