"""The place of a run whose files are thrown away: it leaves the working folder as it was, or says what has changed."""

from __future__ import annotations

import shutil
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from nbaccel.features.check import folder_snapshot
from nbaccel.features.check.dry_run_ranks import DryRunRanks, free_bytes, interrupted


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


def change(place: DryRunRanks, home: Path) -> None:
    """Do as ranks do."""
    kept = Path(f"{place.records.with_name('originals')}{home}", "old.txt")
    kept.parent.mkdir(parents=True)
    shutil.copy2("old.txt", kept)
    Path("old.txt").write_text("changed")
    Path("gone.txt").unlink()
    Path("new.txt").touch()


def test_changes_are_undone_and_others_are_listed(home: Path, launcher: Any) -> None:
    with DryRunRanks.start(launcher) as place:
        change(place, home)
        (home / "saved.ipynb").touch()  # by Jupyter
        changed = place.changed_files()
    assert changed == [f"{home}/new.txt"]
    assert not place.records.exists()
    assert {path.name: path.read_text() for path in home.iterdir()} == {
        "old.txt": "old",
        "gone.txt": "gone",
        "new.txt": "",
        "saved.ipynb": "",
    }


def test_a_new_file_is_listed_although_it_was_removed_and_put_back(home: Path, launcher: Any) -> None:
    """A library has written it without Python, so that its maker is not known."""
    with DryRunRanks.start(launcher) as place:
        Path("x.pt").touch()
        kept = Path(f"{place.records.with_name('originals')}{home}", "x.pt")
        kept.parent.mkdir(parents=True)
        shutil.move("x.pt", kept)
        assert place.changed_files() == [f"{home}/x.pt"]


def test_an_original_that_cannot_be_put_back_stays_and_is_named(home: Path, launcher: Any) -> None:
    with DryRunRanks.start(launcher) as place:
        change(place, home)
        Path("old.txt").unlink()
        Path("old.txt").mkdir()
        Path("old.txt/below").touch()
        kept = Path(f"{place.records.with_name('originals')}{home}", "old.txt")
        assert f"{home}/old.txt (not put back; the original is {kept})" in place.changed_files()
    assert kept.read_text() == "old"
    assert not place.records.exists()
    shutil.rmtree(place.records.parents[1])


def test_an_interrupted_run_puts_files_back(home: Path, launcher: Any) -> None:
    with pytest.raises(KeyboardInterrupt), DryRunRanks.start(launcher) as place:
        change(place, home)
        raise KeyboardInterrupt
    assert (home / "old.txt").read_text() == "old"
    assert (home / "gone.txt").read_text() == "gone"


def test_interrupts_while_files_are_put_back_wait_until_they_are(
    home: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folder_snapshot._put_into_place

    def put_into_place(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(*args)

    monkeypatch.setattr(folder_snapshot, "_put_into_place", put_into_place)
    with pytest.raises(KeyboardInterrupt), DryRunRanks.start(launcher) as place:
        change(place, home)
        place.changed_files()  # and once more when the place is left
    assert (home / "old.txt").read_text() == "old"
    assert sorted(path.name for path in home.iterdir()) == ["gone.txt", "new.txt", "old.txt"]
    assert not place.records.exists()


def test_an_interrupt_names_what_has_changed() -> None:
    assert str(interrupted("the check was", [])) == "the check was interrupted; nothing was changed."
    assert str(interrupted("the trials were", ["/a", "/b"])) == "the trials were interrupted; changed: /a, /b."


def test_free_bytes_are_those_of_the_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    assert abs(free_bytes(tmp_path / "none" / "such") - usage.free) < 1e9
