"""What watches the program of a rank in a dry run: its last records come also where the program has failed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.features.check.dry_run.rank_records import read_records
from nbaccel.features.check.dry_run.rank_run import RankDryRun


class FailingParts:
    """Parts of a dry run that cannot end: the device refuses everything."""

    cuts = SimpleNamespace()

    def __init__(self, *arguments: Any) -> None:
        """Take what parts get."""

    def begin(self) -> None:
        """Begin nothing."""

    def end(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def dry_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RankDryRun:
    monkeypatch.setattr("nbaccel.features.check.dry_run.rank_run.provide", lambda log, reached: None)
    return RankDryRun(folder, 0, FailingParts, lambda actions: nullcontext())


def test_the_error_of_the_program_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry_run(tmp_path, monkeypatch)
    with pytest.raises(IndexError, match="label 10"), run:
        run.reached.add(3)
        raise IndexError("label 10 of 10 classes")
    records = read_records(tmp_path, 0)
    assert [record["kind"] for record in records] == ["whole", "root", "end"]
    assert (records[-1]["error"], records[-1]["reached"]) == ("IndexError", [3])


def test_where_the_program_has_not_failed_the_error_of_a_part_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="device-side assert"), dry_run(tmp_path, monkeypatch):
        pass
