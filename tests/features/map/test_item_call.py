"""One call of the function of a map: copies of its items, answers that cannot be written, exits."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel import Accelerator
from nbaccel.features.map import Answers
from nbaccel.features.map.item_call import own_copy


def mapped(function: Any, items: Any, **options: Any) -> Answers:
    return Accelerator(cpu=True).map(function, items, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda number: [number],
        lambda number: {"x": number},
        lambda number: {"in": [[number]]},
        lambda number: OrderedDict(x=number),
        lambda number: np.array([number]),
        lambda number: {"in": torch.tensor([number], device="cpu")},
        lambda number: (np.array([number]), "text"),
    ],
)
def test_what_a_function_did_to_an_item_before_it_failed_is_undone(make: Any) -> None:
    times = 0

    def add_one(value: Any) -> Any:
        if isinstance(value, dict):
            name = next(iter(value))
            value[name] = add_one(value[name])
        elif isinstance(value, list):
            value[0] = add_one(value[0])
        elif isinstance(value, tuple):
            return add_one(value[0])
        else:
            value += 1
        return value

    def number_in(value: Any) -> int:
        while isinstance(value, dict | list | tuple):
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        return int(value.item() if hasattr(value, "item") else value)

    def function(items: list[Any]) -> list[int]:
        nonlocal times
        changed = [add_one(item) for item in items]
        times += 1
        if times in (3, 4, 5):  # a call of several, its half, and that half again
            raise ConnectionError("try again")
        return [number_in(item) for item in changed]

    items = [make(number) for number in range(20)]
    assert mapped(function, items, batch_size=4) == list(range(1, 21))
    assert [number_in(item) for item in items] == list(range(20))


def test_what_is_not_copied() -> None:
    parameter, objects, path = torch.nn.Parameter(torch.ones(2)), np.array([object()]), Path("x")
    for value in (parameter, objects, path, "text", 7, None):
        assert own_copy(value) is value
    item: list[Any] = []
    item.append(item)  # it contains itself: copied as deep as it is worth
    assert own_copy(item) is not item


def lines(calls: list[int], bad: set[int]) -> Any:
    def function(items: list[int]) -> list[Any]:
        calls.append(len(items))
        return [object() if item in bad else item for item in items]

    return function


def test_only_the_answer_that_cannot_be_written_fails_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    calls: list[int] = []
    answers = mapped(lines(calls, {50}), list(range(100)), out=tmp_path / "a.jsonl", batch_size=25)
    assert [failed.index for failed in answers.failed] == [50]
    assert "an answer holds a builtins.object, which JSON cannot hold" in answers[50].error
    assert [answer for number, answer in enumerate(answers) if number != 50] == [*range(50), *range(51, 100)]
    assert sum(calls) == 100


def test_in_memory_too() -> None:
    answers = mapped(lambda items: [(lambda: 1) if item == 5 else item for item in items], list(range(12)))
    assert [failed.index for failed in answers.failed] == [5]


def test_where_the_first_answers_cannot_be_written_others_are_looked_at_before_it_goes_on(tmp_path: Path) -> None:
    calls: list[int] = []
    answers = mapped(lines(calls, {0, 1}), list(range(100)), out=tmp_path / "a.jsonl", batch_size=2)
    assert [failed.index for failed in answers.failed] == [0, 1]
    assert sum(calls) <= 100 + 3


def test_where_no_answer_can_be_written_the_call_ends_with_that_error_early(tmp_path: Path) -> None:
    calls: list[int] = []
    with pytest.raises(TypeError, match="which JSON cannot hold"):
        mapped(lines(calls, set(range(100))), list(range(100)), out=tmp_path / "a.jsonl", batch_size=2)
    assert sum(calls) <= 5


def test_an_exit_is_a_failure_of_its_item() -> None:
    def function(items: list[int]) -> list[int]:
        if 5 in items:
            sys.exit("no argument")
        return items

    answers = mapped(function, list(range(12)), batch_size=4)
    assert [failed.index for failed in answers.failed] == [5]
    assert answers[5].error == "RuntimeError: the function has called sys.exit(no argument)"


def test_a_function_that_always_exits_ends_the_map_with_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the function has called sys.exit\(2\)"):
        mapped(lambda items: sys.exit(2), list(range(12)))


class Unwritable(Exception):
    """One whose text needs what it has not."""

    def __str__(self) -> str:
        raise LookupError("no code")


def test_an_error_without_a_text_is_a_failure_of_its_item() -> None:
    def function(items: list[int]) -> list[int]:
        if 5 in items:
            raise Unwritable
        return items

    answers = mapped(function, list(range(12)))
    assert [failed.index for failed in answers.failed] == [5]
    assert answers[5].error == "RuntimeError: the function has raised a Unwritable, whose text fails"


def test_an_interrupt_in_the_function_is_none_of_its_items() -> None:
    def function(items: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped(function, list(range(12)))
