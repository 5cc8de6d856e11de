"""Answers as lines of JSON and in memory: what cannot be written is an error of its item, in one sentence."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

from nbaccel import Accelerator
from nbaccel.features.map import Failed, formats
from nbaccel.features.map.formats import InMemoryFormat, JsonLinesFormat


@dataclass
class Scores:
    by_class: dict[Any, float]


def test_keys_become_texts() -> None:
    answer = {1: "one", 0.5: [{None: {True: 1}}], "text": {}}
    line = JsonLinesFormat().pack(7, answer)
    assert json.loads(line) == {"index": 7, "answer": {"1": "one", "0.5": [{"null": {"true": 1}}], "text": {}}}


@pytest.mark.parametrize("around", [lambda answer: answer, lambda answer: [(answer,)], Scores])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            {1: "a", "1": "b"},
            'several keys that are "1" in JSON, where all keys are texts: use texts, or leave out= away',
        ),
        ({None: "a", "null": "b"}, 'several keys that are "null" in JSON'),
        ({(1, 2): "a"}, "a key of builtins.tuple, which JSON cannot hold: use texts or plain numbers as keys"),
        ({numpy.int64(1): "a"}, "a key of numpy.int64, which JSON cannot hold"),
    ],
)
def test_keys_that_json_cannot_keep_are_said(answer: Any, words: str, around: Any) -> None:
    with pytest.raises(TypeError, match=rf"^an answer holds a dict with {words}") as caught:
        JsonLinesFormat().pack(0, around(answer))
    assert "\n" not in str(caught.value)


def test_many_keys_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Key(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    load = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **more: [Key(key) for key in load(text, **more)])
    answer: dict[int | str, float] = dict.fromkeys(range(1000), 0.5)
    formats._check_keys(answer)
    assert compared < 10_000
    with pytest.raises(TypeError, match='several keys that are "7" in JSON'):
        formats._check_keys(answer | {"7": 0.5})


def test_numbers_that_json_does_not_know_stay_what_they_are(tmp_path: Path) -> None:
    answers = Accelerator(cpu=True).map(list, [math.nan, math.inf], out=tmp_path / "a.jsonl")
    assert math.isnan(answers[0])
    assert answers[1] == math.inf


@pytest.mark.parametrize("form", [JsonLinesFormat(), InMemoryFormat()], ids=["jsonl", "memory"])
def test_an_answer_that_is_too_large_is_said(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_ANSWER", 1_000_000)
    with pytest.raises(ValueError, match=r"^an answer of 1.3 MB; the limit is 1.0 MB: save it, and return its path$"):
        form.pack(0, "x" * 1_300_000)


def test_it_is_a_failure_of_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_ANSWER", 1000)
    answers = Accelerator(cpu=True).map(lambda items: ["x" * item for item in items], [1, 5000, 2])
    assert (answers[0], answers[2]) == ("x", "xx")
    assert isinstance(answers[1], Failed)
    assert answers[1].error.startswith("ValueError: an answer of ")
