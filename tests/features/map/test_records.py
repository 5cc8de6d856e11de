"""Records of answers: a torn end is not read, and of several answers to an item one counts."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nbaccel.features.map.records import AnswerIndex, AnswerRecord, RecordFile

RECORDS = [AnswerRecord(item, f"answer {item}".encode()) for item in range(5)]


def written(path: Path, records: list[AnswerRecord]) -> Path:
    file = RecordFile(path)
    file.append(records)
    file.close()
    return path


def read(*paths: Path, total: int = 5) -> AnswerIndex:
    index = AnswerIndex(total)
    for path in paths:
        index.read(path)
    return index


def test_records_come_back_in_the_order_of_items(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", RECORDS[:1:-1]), written(tmp_path / "two", RECORDS[:2])
    assert list(read(one, two).records()) == RECORDS


@pytest.mark.parametrize("cut", range(1, len(RECORDS[0].packed())))
def test_a_torn_end_is_not_read(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "one", RECORDS[:3])
    os.truncate(path, path.stat().st_size - cut)
    assert list(read(path).records()) == RECORDS[:2]


def test_reading_stops_at_a_byte_that_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "one", RECORDS)
    data = bytearray(path.read_bytes())
    data[len(RECORDS[0].packed()) + 22] ^= 1
    path.write_bytes(data)
    assert list(read(path).records()) == RECORDS[:1]


def test_the_first_answer_counts_and_an_answer_replaces_an_error(tmp_path: Path) -> None:
    failed = AnswerRecord(0, b"error", is_failed=True)
    again = AnswerRecord(0, b"again")
    index = read(written(tmp_path / "one", [failed, RECORDS[0], again, failed]))
    assert list(index.records()) == RECORDS[:1]
    assert (index.answered, index.failed) == (1, 0)


def test_an_error_of_an_earlier_round_is_not_done(tmp_path: Path) -> None:
    index = read(written(tmp_path / "one", [AnswerRecord(0, b"error", is_failed=True, round=1)]))
    assert index.is_done(0, least_round=1)
    assert not index.is_done(0, least_round=2)
    assert index.failures() == [0]


def test_items_beyond_the_known_ones_belong_to_a_stream(tmp_path: Path) -> None:
    path = written(tmp_path / "one", RECORDS)
    index = AnswerIndex(0)
    index.read(path, grows=True)
    assert len(index) == 5
    assert len(read(path, total=2)) == 2


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "one", os.write

    def half(fd: int, data: Any) -> int:
        if len(data) > 100:
            return write(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    file = RecordFile(path)
    file.append(RECORDS[:2])
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        file.append([AnswerRecord(2, bytes(80))])
    monkeypatch.undo()
    file.append(RECORDS[3:])
    file.close()
    assert [record.item for record in read(path).records()] == [0, 1, 3, 4]


def test_many_files_need_few_descriptors(tmp_path: Path) -> None:
    paths = [written(tmp_path / str(item), [AnswerRecord(item, b"x")]) for item in range(200)]
    before = len(os.listdir("/proc/self/fd"))
    records = read(*paths, total=200).records()
    most = 0
    for _ in records:
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert most <= 64
