"""Answers in a file: what they are read from, and for how long."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
from pathlib import Path

import pytest

from nbaccel.errors import CannotContinue
from nbaccel.features.map import Answers, answer_list
from nbaccel.features.map.answer_list import LinesOnDisk, read_line


def written(path: Path, *answers: str) -> Answers:
    rest = path.with_name("rest")
    rest.write_text("".join(f'{{"index": {number}, "answer": "{each}"}}\n' for number, each in enumerate(answers)))
    os.replace(rest, path)
    return Answers(LinesOnDisk(path, read_line), path)


def test_answers_stay_as_they_were_when_others_replace_their_file(tmp_path: Path) -> None:
    old = written(tmp_path / "a.jsonl", "one", "two")
    reading = iter(old)
    assert next(reading) == "one"
    new = written(tmp_path / "a.jsonl", "another", "one", "more")
    assert (list(old), old[-1], [*reading]) == (["one", "two"], "two", ["two"])
    assert new == ["another", "one", "more"]
    (tmp_path / "a.jsonl").unlink()
    assert (list(old), list(new)) == (["one", "two"], ["another", "one", "more"])


@pytest.mark.parametrize("read_bytes", [1, 40, 1 << 20])
def test_all_lines_are_read_in_any_number_of_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(answer_list, "_READ_BYTES", read_bytes)
    answers = [str(number) * number for number in range(50)]
    found = written(tmp_path / "a.jsonl", *answers)
    assert list(found) == answers
    assert [*zip(found, found, strict=True)] == [(each, each) for each in answers], "two loops at once"
    assert list(written(tmp_path / "b.jsonl")) == []


def test_a_pickle_is_read_again_from_the_same_file_alone(tmp_path: Path) -> None:
    answers = written(tmp_path / "a.jsonl", "one", "two")
    stored = pickle.dumps(answers)
    assert pickle.loads(stored) == ["one", "two"]
    written(tmp_path / "a.jsonl", "six", "two")
    with pytest.raises(
        CannotContinue, match=r"a.jsonl has other answers than when these were stored: nbaccel.map with"
    ):
        pickle.loads(stored)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(CannotContinue, match=r"a.jsonl, which has these answers, cannot be read: No such file"):
        pickle.loads(stored)


def test_a_copy_needs_no_file(tmp_path: Path) -> None:
    answers = written(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / "a.jsonl").unlink()
    assert copy.copy(answers) == copy.deepcopy(answers) == ["one", "two"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_a_file_is_closed_with_the_last_answers(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        pickle.loads(pickle.dumps(written(tmp_path / f"{number}.jsonl", "one")))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    shutil.rmtree(tmp_path)
