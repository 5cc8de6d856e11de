"""What an older version wrote to a disk is read as it was meant: tests/old_files, which its README describes.

Numbers that were stored are equal, bit by bit; numbers that are computed from them are close.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nbaccel.cli import main
from nbaccel.errors import UntrustedPickle
from old_trainings import (
    FOLDER,
    SETTINGS,
    Program,
    autosaved,
    continued_in,
    found_size,
    load_exported,
    load_more_than_data,
    load_scaled,
    log_numbers,
    numbered,
)

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))

MOST_BYTES = 200_000
"""Of the folder: every clone holds it, for ever."""


@pytest.fixture(scope="module", autouse=True)
def files_stay_as_they_are() -> Iterator[None]:
    """Fail where a test has written into the folder."""
    yield
    assert _checksums() == EXPECTED["files"]


def _checksums() -> dict[str, str]:
    others = {"README.md", "write.py", "expected.json"}
    paths = [path for path in FOLDER.rglob("*") if path.is_file() and path.name not in others]
    return {path.relative_to(FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of all of them."""
    return Path(shutil.copytree(FOLDER, tmp_path / "files"))


def test_the_files_are_those_that_were_written() -> None:
    assert _checksums() == EXPECTED["files"]


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < MOST_BYTES


def _assert_as_expected(record: dict[str, Any], expected: dict[str, Any]) -> None:
    stored, computed = ("state", "draws", "batches"), ("losses", "weights at the end")
    assert {name: record[name] for name in stored} == {name: expected[name] for name in stored}
    for name in computed:
        assert _numbers(record[name]) == pytest.approx(_numbers(expected[name]), rel=1e-5, abs=1e-7)


def _numbers(value: Any) -> list[float]:
    """All numbers in lists and dicts, in their order."""
    if isinstance(value, dict):
        return _numbers(list(value.values()))
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("written_by", ["one_rank", "two_ranks"])
def test_a_checkpoint_of_one_or_two_ranks_goes_on_in_one_or_two(
    files: Path, written_by: str, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights, moments, the schedule, an object of the program's, random numbers, the position in the epoch."""
    folder = str(files / written_by)
    records = continued_in(ranks, *((folder, None) if written_by == "one_rank" else (None, folder)))
    for record, expected in zip(records, EXPECTED[f"{written_by} in {ranks}"], strict=True):
        _assert_as_expected(record, expected)


@pytest.mark.slow
def test_random_states_of_a_rank_that_came_too_late_are_found_beside_the_checkpoint(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = json.loads((files / "two_ranks" / "manifest.json").read_text())["step"]
    (files / "two_ranks" / "generators_1.json").rename(files / f".two_ranks.rank1.step{step}")
    records = continued_in(2, None, str(files / "two_ranks"))
    _assert_as_expected(records[1], EXPECTED["two_ranks in 2"][1])


def test_numbered_checkpoints_go_on_behind_the_old_one(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    accelerator = Program.start(project_config=numbered(str(files / "one_rank"))).accelerator
    accelerator.load_state()
    assert accelerator.save_state() == str(files / "one_rank" / "checkpoints" / "checkpoint_1")
    assert "checkpoint_0: step 8, epoch 2, batch 4/12" in capfd.readouterr().out


def test_a_training_that_saved_itself_resumes(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record, expected = autosaved(str(files / "autosaved"), None, resume=True), EXPECTED["autosaved"]["after"]
    exact = ("epochs", "batches", "history", "weights")
    assert {name: record[name] for name in exact} == {name: expected[name] for name in exact}
    assert record["best"] == pytest.approx(expected["best"], rel=1e-5)
    assert _numbers(record["weights at the end"]) == pytest.approx(
        _numbers(expected["weights at the end"]), rel=1e-5, abs=1e-7
    )


def test_a_state_that_is_more_than_data_is_read_where_it_is_trusted(files: Path) -> None:
    with pytest.raises(UntrustedPickle):
        load_more_than_data(str(files / "more_than_data"))
    assert load_more_than_data(str(files / "more_than_data"), trust=True) == {"took": timedelta(seconds=90)}


def test_the_gradient_scaler_of_fp16_goes_on(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert EXPECTED["scaler"]["scale"] == 128.0  # it has grown from 64
    with pytest.warns(UserWarning, match="begin new random numbers"):
        assert load_scaled(str(files / "scaled")) == EXPECTED["scaler"]


@pytest.mark.parametrize("way", ["whole", "shards", "pickled"])
def test_an_exported_model_is_read(way: str) -> None:
    assert load_exported(FOLDER / "exported" / way) == EXPECTED["exported"]


def test_every_setting_of_nbaccel_toml_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(FOLDER):
        assert main(["config"]) == 0
    assert capsys.readouterr().out == EXPECTED["config"]
    assert all(f"{key}=" in EXPECTED["config"] for key in SETTINGS)


def test_numbers_of_trackers_go_on_below_the_old_ones(files: Path) -> None:
    log_numbers(files / "numbers", speed=9.0)
    run = files / "numbers" / "run"
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["accuracy"], row["speed"]) for row in rows] == [
        ("1", "0.5", "", ""),
        ("2", "0.25", "0.75", ""),
        ("1", "0.5", "", ""),
        ("2", "0.25", "0.75", "9.0"),
    ]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "accuracy": 0.75}]
    assert len(lines) == 4


@pytest.mark.slow
def test_a_batch_size_that_was_found_is_not_searched_for(files: Path) -> None:
    """It is kept by the version of torch and by what torch calls its modules and options: so by this torch's name."""
    expected, cache = EXPECTED["found size"], files / "sizes" / "batch_sizes.json"
    assert found_size(str(files / "new"))[0] == expected["size"]
    (name,) = json.loads((files / "new" / "batch_sizes.json").read_text())
    (entry,) = json.loads(cache.read_text()).values()
    cache.write_text(json.dumps({name: entry}))
    assert found_size(str(files / "sizes")) == (expected["size"], expected["passes when found"])


def test_a_batch_size_is_kept_by_the_same_name(files: Path) -> None:
    import torch

    if torch.__version__ != EXPECTED["written by"]["torch"]:
        pytest.skip(f"written with torch {EXPECTED['written by']['torch']}; this is {torch.__version__}")
    expected = EXPECTED["found size"]
    assert found_size(str(files / "sizes")) == (expected["size"], expected["passes when found"])
