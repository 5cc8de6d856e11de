"""The files through which the ranks of one save agree, with each of them played in one process."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import CannotSave
from nbaccel.train.checkpoint import save_agreement as module
from nbaccel.train.checkpoint.manifest import FileRecord
from nbaccel.train.checkpoint.save_agreement import SaveAgreement, Share, delete_dead_agreements


def agreement(
    place: Path, rank: int, committed: Callable[[], Path | None] = lambda: None, stamp: str = "save 1"
) -> SaveAgreement:
    return SaveAgreement(place / "last", stamp, rank, 2, committed, lambda line: None)


def share(rank: int, rows: int = 1, dtype: str = "torch.float32") -> Share:
    """Row `rank` of two, in a file of that rank."""
    boxes = [[f"model-rank{rank:05d}-of-00002.safetensors", [rank, 0], [rows, 3]]]
    record = FileRecord(2, "0")
    return Share({boxes[0][0]: record}, {"model": {"weight": {"shape": [2, 3], "dtype": dtype, "boxes": boxes}}})


def ended_process() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def put(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).touch()


def report(other: SaveAgreement, given: Share) -> None:
    other.begin()
    for name in given.records:
        (other.folder / name).write_text("ok")
    other.report(given, [])


def test_all_that_reported_is_moved_in_and_nothing_stays(tmp_path: Path) -> None:
    first, second = agreement(tmp_path, 0), agreement(tmp_path, 1)
    first.begin()
    report(second, share(1))
    (tmp_path / "unfinished").mkdir()
    with first.decided(tmp_path / "committed"):
        joined = first.collect(tmp_path / "unfinished", share(0))
    assert [box[1] for box in joined.places["model"]["weight"]["boxes"]] == [[0, 0], [1, 0]]
    assert second.outcome() == tmp_path / "committed"
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished"]
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["model-rank00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (share(1, dtype="torch.bfloat16"), r"rank 1 holds rows of model: weight, bfloat16 of shape \[2, 3\]"),
        (share(1, rows=0), "weight has 6 elements, and the ranks that save it hold 3"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(tmp_path: Path, theirs: Share, message: str) -> None:
    first, second = agreement(tmp_path, 0), agreement(tmp_path, 1)
    first.begin()
    report(second, theirs)
    (tmp_path / "unfinished").mkdir()
    with pytest.raises(CannotSave, match=message), first.decided(tmp_path / "last"):
        first.collect(tmp_path / "unfinished", share(0))
    with pytest.raises(CannotSave, match=message):
        second.outcome()


def test_rank_0_does_not_wait_for_a_process_that_is_gone(tmp_path: Path) -> None:
    first = agreement(tmp_path, 0)
    first.begin()
    put(first.folder, f"rank00001@{socket.gethostname()}.{ended_process()}.here")
    began = time.monotonic()
    with pytest.raises(CannotSave, match=r"rank 1 \(process \d+ on .*\) ended"), first.decided(tmp_path / "last"):
        first.collect(tmp_path, share(0))
    assert time.monotonic() - began < 5


def test_a_rank_does_not_wait_for_rank_0_that_is_gone(tmp_path: Path) -> None:
    second = agreement(tmp_path, 1)
    put(second.folder, f"rank00000@{socket.gethostname()}.{ended_process()}.here")
    report(second, share(1))
    with pytest.raises(CannotSave, match=r"rank 0 \(process \d+ on .*\) ended"):
        second.outcome()


def test_what_rank_0_committed_before_it_died_counts(tmp_path: Path) -> None:
    second = agreement(tmp_path, 1, committed=lambda: tmp_path / "other")
    put(second.folder, f"rank00000@{socket.gethostname()}.{ended_process()}.here")
    report(second, share(1))
    assert second.outcome() == tmp_path / "other"


def test_a_rank_of_another_machine_is_waited_for_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FOREIGN_S", 0.2)
    first = agreement(tmp_path, 0)
    first.begin()
    put(first.folder, "rank00001@elsewhere.1.here")
    with pytest.raises(CannotSave, match=r"rank 1 .* on elsewhere"), first.decided(tmp_path / "last"):
        first.collect(tmp_path, share(0))


def test_a_rank_that_comes_after_the_others_failed_reads_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ABSENT_S", 0.1)
    first, second = agreement(tmp_path, 0), agreement(tmp_path, 1)
    first.begin()
    with pytest.raises(CannotSave, match=r"rank\(s\) 1 of 2 did not come"), first.decided(tmp_path / "last"):
        first.collect(tmp_path, share(0))
    report(second, share(1))
    with pytest.raises(CannotSave, match=r"rank\(s\) 1 of 2 did not come"):
        second.outcome()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_has_no_room_for_the_error_is_no_reason_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    sides = agreement(tmp_path, 0), agreement(tmp_path, 1)
    for side in sides:
        side.begin()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_sealed", full)
        sides[rank].fail(CannotSave("no room"))
    with pytest.raises(CannotSave, match=f"rank {rank} could not"), sides[0].decided(tmp_path / "last"):
        sides[1].outcome() if rank == 0 else sides[0].collect(tmp_path, share(0))


def test_an_error_that_is_none_of_ours_is_told_with_its_kind(tmp_path: Path) -> None:
    first, second = agreement(tmp_path, 0), agreement(tmp_path, 1)
    first.begin()
    second.begin()
    second.fail(KeyError("weight"))
    with pytest.raises(CannotSave, match=r"rank 1 could not write its part: KeyError: 'weight'"):
        first.collect(tmp_path, share(0))


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    first, second = agreement(tmp_path, 0), agreement(tmp_path, 1)
    first.begin()
    second.begin()
    (tmp_path / "unfinished").mkdir()
    with ThreadPoolExecutor(1) as thread:
        collected = thread.submit(first.collect, tmp_path / "unfinished", share(0))
        assert not collected.done()
        report(second, share(1))
        assert collected.result().places["model"]["weight"]["boxes"][1][1] == [1, 0]


def test_dead_agreements_are_deleted_and_living_ones_stay(tmp_path: Path) -> None:
    host, dead = socket.gethostname(), ended_process()
    for name, members in {
        "killed": [f"rank00000@{host}.{dead}.here", f"rank00001@{host}.{dead}.here"],
        "under-way": [f"rank00000@{host}.{dead}.here", f"rank00001@{host}.{os.getppid()}.here"],
        "own": [f"rank00001@{host}.{os.getpid()}.here"],
        "elsewhere": ["rank00001@elsewhere.1.here"],
        "begun": [],
    }.items():
        for member in members or [""]:
            put(tmp_path / f".nbaccel_shards.{name}", member or "x")
    delete_dead_agreements(tmp_path)
    left = {path.name.rpartition(".")[2] for path in tmp_path.iterdir()}
    assert left == {"under-way", "own", "elsewhere", "begun"}
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    delete_dead_agreements(tmp_path)
    assert {path.name.rpartition(".")[2] for path in tmp_path.iterdir()} == {"under-way", "own"}
