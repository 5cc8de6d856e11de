"""Answers in Parquet files: what was returned is read again, and other programs can read the folder as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest

from nbaccel import Accelerator
from nbaccel.features.map import Answers, Failed, formats


@pytest.fixture(autouse=True)
def of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write three rows into each file, so that ten items need several."""
    monkeypatch.setattr(formats, "_ROWS", 3)


def mapped(answers: list[Any], folder: Path) -> Answers:
    """Return what a map reads again from Parquet; an exception among the answers is an item that fails."""

    def answer(numbers: list[int]) -> list[Any]:
        for number in numbers:
            if isinstance(answers[number], Exception):
                raise answers[number]
        return [answers[number] for number in numbers]

    return Accelerator(cpu=True).map(answer, range(len(answers)), out=folder / "answers.parquet", tries=1)


@pytest.mark.parametrize(
    "answers",
    [
        list(range(10)),
        [f"text {number}" for number in range(10)],
        [{"label": "cat", "score": 0.25 * number} for number in range(10)],
        [[number] * number for number in range(10)],
        [{"tokens": [1, 2], "of": {"a": number}} for number in range(10)],
        [1, 2, 3, 0.5, 1.5, 2.5, 4],
        [None, None, None, "late", "later"],
        [None] * 5,
        [1, "one", [1], {"one": 1}, None, 2.5],
        [{} for _ in range(4)],
        [{"a": 1}, 2, {"a": 3}],
        [{"answer": 1}, {"answer": 2}],
        [{"index": 7}, {"index": 8}],
        [2**70, 1],
        ["half of a pair: \ud83d", "whole"],
        [],
    ],
    ids=str,
)
def test_answers_are_read_as_they_were_returned(answers: list[Any], tmp_path: Path) -> None:
    assert list(mapped(answers, tmp_path)) == answers
    assert list(mapped(answers, tmp_path)) == answers, "the same call finds them"


def test_a_key_that_some_answers_lack_is_none_in_them(tmp_path: Path) -> None:
    answers = mapped([{"a": 1}, {"b": 2}, {"a": 3}, {"a": 4, "c": "x"}], tmp_path)
    assert list(answers) == [
        {"a": 1, "b": None, "c": None},
        {"a": None, "b": 2, "c": None},
        {"a": 3, "b": None, "c": None},
        {"a": 4, "b": None, "c": "x"},
    ]


def test_so_it_is_within_an_answer(tmp_path: Path) -> None:
    answers = mapped([{"of": {"a": 1}}, {"of": {"a": 2}}, {"of": {"a": 3}}, {"of": {"b": 4}}], tmp_path)
    assert [answers[0], answers[3]] == [{"of": {"a": 1, "b": None}}, {"of": {"a": None, "b": 4}}]


@pytest.mark.parametrize("good", [{"label": "cat"}, 7, "text"])
def test_an_item_that_fails_in_a_late_file_keeps_its_place_and_its_words(good: Any, tmp_path: Path) -> None:
    answers = mapped([good, good, good, good, ValueError("no such \ud83d cat"), good], tmp_path)
    assert list(answers)[:4] == [good] * 4
    assert answers[5] == good
    assert isinstance(answers[4], Failed)
    assert "ValueError: no such" in answers[4].error


def test_pandas_and_pyarrow_read_the_folder_as_one_table(tmp_path: Path) -> None:
    mapped([{"label": "cat", "score": 1}] * 4 + [ValueError("no"), {"label": "dog", "score": 0.5}], tmp_path)
    table = pandas.read_parquet(tmp_path / "answers.parquet")
    assert list(table["index"]) == list(range(6))
    assert list(table["score"].dropna()) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert list(table["error"].dropna()) == ["ValueError: no"]
    assert pyarrow.parquet.read_table(tmp_path / "answers.parquet").num_rows == 6


def test_no_answer_is_a_table_without_rows(tmp_path: Path) -> None:
    assert list(mapped([], tmp_path)) == []
    table = pandas.read_parquet(tmp_path / "answers.parquet")
    assert (list(table.columns), len(table)) == (["index", "answer", "error"], 0)


def test_tuples_bytes_and_keys_are_what_json_makes_of_them(tmp_path: Path) -> None:
    assert list(mapped([(1, "x"), (2, "y")], tmp_path)) == [[1, "x"], [2, "y"]]
    (tmp_path / "more").mkdir()
    assert list(mapped([{1: b"a"}, {1: b"b"}], tmp_path / "more")) == [{"1": "YQ=="}, {"1": "Yg=="}]
