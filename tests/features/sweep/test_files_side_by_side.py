"""Runs of a sweep that write one file side by side: the sweep says so, and does not keep what they computed."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import nbaccel
from nbaccel import Accelerator
from nbaccel.features.sweep.shared_files import FileList, SharedFiles
from nbaccel.launching.libraries.one_file import is_private_file


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def meets(fold: int) -> None:
    """Wait until the other run is here; each run calls this with its own number."""
    Path(f"here-{fold}").touch()
    deadline = time.monotonic() + 30
    while not (Path("here-0").exists() and Path("here-1").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)


def with_torch(fold: int) -> float:
    torch.save(torch.tensor(float(fold)), "best.pt")
    meets(fold)
    return float(torch.load("best.pt"))


def with_open(fold: int) -> str:
    Path("best.txt").write_text(str(fold))
    meets(fold)
    return Path("best.txt").read_text()


def by_moving(fold: int) -> str:
    Path(f"part-{fold}").write_text(str(fold))
    Path(f"part-{fold}").rename("best.txt")
    meets(fold)
    return Path("best.txt").read_text()


def with_safetensors(fold: int) -> float:
    from safetensors.torch import load_file, save_file

    save_file({"x": torch.tensor(float(fold))}, "best.safetensors")
    meets(fold)
    return float(load_file("best.safetensors")["x"])


@pytest.mark.parametrize("function", [with_torch, with_open, by_moving, with_safetensors])
def test_two_runs_that_save_one_file_are_named_and_not_kept(
    function: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = nbaccel.sweep(function, fold=[0, 1], slots=2, cpu=True)
    assert runs[0].value == runs[1].value, "each has read what the later one wrote"
    said = capsys.readouterr().out
    name = next(tmp_path.glob("best*")).name
    assert said.count("side by side") == 1
    assert f"runs 1 and 2 both write {name}, side by side" in said
    assert 'as in f"best-{fold}.' in said
    assert not list(tmp_path.glob(".nbaccel/sweeps/*/run.json"))


def own_and_added(fold: int) -> int:
    torch.save(fold, f"best-{fold}.pt")
    with open("all.csv", "a") as file:
        file.write(f"{fold}\n")
    meets(fold)
    return int(torch.load(f"best-{fold}.pt"))


def test_files_of_their_own_and_added_lines_are_nobodys_business(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert [run.value for run in nbaccel.sweep(own_and_added, fold=[0, 1], slots=2, cpu=True)] == [0, 1]
    assert "side by side" not in capsys.readouterr().out
    assert len(list(tmp_path.glob(".nbaccel/sweeps/*/run.json"))) == 2


def in_two_ranks(lr: float, accelerator: Accelerator) -> float:
    """Both ranks save one file, rank 1 later; rank 0's is the one that is left, as without a sweep."""
    warnings.simplefilter("ignore")  # that rank 1 has skipped its own
    time.sleep(0.5 * accelerator.process_index)
    torch.save(accelerator.process_index, f"rank-{lr}.pt")
    accelerator.wait_for_everyone()
    return float(torch.load(f"rank-{lr}.pt"))


def test_of_several_ranks_of_a_run_rank_0_alone_writes_a_file() -> None:
    runs = nbaccel.sweep(in_two_ranks, lr=[0.1, 0.2], gpus_per_run=2, slots=1, cpu=True)
    assert [run.error or run.value for run in runs] == [0.0, 0.0]


def elsewhere(fold: int) -> float:
    Path(f"of-{fold}").mkdir()
    os.chdir(f"of-{fold}")
    torch.save(torch.tensor(float(fold)), "../best.pt")
    os.chdir("..")
    meets(fold)
    return float(torch.load("best.pt"))


def test_a_run_that_changes_the_folder_is_seen_too(capsys: pytest.CaptureFixture[str]) -> None:
    nbaccel.sweep(elsewhere, fold=[0, 1], slots=2, cpu=True)
    said = capsys.readouterr().out
    assert "runs 1 and 2 both write best.pt, side by side" in said
    assert "2 runs will be done again by the same sweep, as fold=" in said  # the first one that ended, either
    assert ": it wrote a file that a run beside it wrote, too\n" in said


def test_equal_configurations_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = nbaccel.sweep(meets_nobody, lr=[0.1, 0.1], slots=2, cpu=True)
    assert len({run.log_path for run in runs}) == 2
    assert [Path(run.log_path).read_text() for run in runs] == ["[rank 0] hello\n"] * 2


def meets_nobody(lr: float) -> float:
    print("hello")
    return lr


def test_a_folder_that_goes_away_fails_its_runs_alone(tmp_path: Path) -> None:
    runs = nbaccel.sweep(breaks_the_folder, fold=[0, 1, 2], folder="kept", slots=1, cpu=True)
    assert [type(run.error).__name__ for run in runs[1:]] == ["LaunchRefused"] * 2


def breaks_the_folder(fold: int) -> int:
    shutil.rmtree("kept")
    Path("kept").touch()
    return fold


def one_after_the_other(fold: int) -> float:
    torch.save(torch.tensor(float(fold)), "best.pt")
    return float(torch.load("best.pt"))


def test_runs_one_after_the_other_may_write_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    runs = nbaccel.sweep(one_after_the_other, fold=[0, 1, 2], slots=1, cpu=True)
    assert [run.value for run in runs] == [0.0, 1.0, 2.0]
    assert "side by side" not in capsys.readouterr().out


def test_only_runs_at_the_same_time_are_compared_and_each_file_is_found_once(tmp_path: Path) -> None:
    runs = SharedFiles()
    runs.begin(0, str(tmp_path / "0"))
    runs.begin(1, str(tmp_path / "1"))
    (tmp_path / "0").write_text("/content/best.pt\n")
    assert list(runs.found()) == []
    runs.end(0)
    runs.begin(2, str(tmp_path / "2"))
    (tmp_path / "2").write_text("/content/best.pt\n")
    assert list(runs.found()) == [], "run 0 was over when run 2 began"
    (tmp_path / "1").write_text("/content/other.pt\n/content/best.pt\n")
    assert list(runs.found()) == [("/content/best.pt", 0, 1)]
    assert list(runs.found()) == []
    for number in (1, 2):
        runs.end(number)
    assert [runs.is_alone(number) for number in (0, 1, 2)] == [False, False, False]


def test_a_list_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "files"
    files = FileList(str(path))
    path.write_bytes(b"/a\n/b\n/un")
    assert files.added() == {"/a", "/b"}
    with path.open("ab") as file:
        file.write(b"finished\n")
    assert files.added() == {"/unfinished"}
    assert files.added() == set()


def test_caches_and_temporary_files_are_private_but_not_those_of_the_working_folder(tmp_path: Path) -> None:
    assert is_private_file(str(tmp_path / "best.pt"))
    assert not is_private_file(str(tmp_path / "best.pt"), str(tmp_path))
    assert is_private_file(str(tmp_path / ".cache" / "x"), str(tmp_path))
    assert is_private_file("/content/pkg/__pycache__/m.cpython-311.pyc", "/content")
    assert not is_private_file("/drive/.shortcuts/content/best.pt", "/drive/.shortcuts/content")
