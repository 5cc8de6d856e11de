"""`Run`, and `nbaccel.last_run`: what is left of a run as numbers and words, and nothing else."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import nbaccel
from display.runs import a_run
from nbaccel.base.events import Loss, Metric, emit
from nbaccel.launching.api import launch
from nbaccel.launching.run import Run, light_value


def last_run() -> Run:
    assert nbaccel.last_run is not None
    return nbaccel.last_run


def test_launch_leaves_its_run_with_curves_words_and_plain_values() -> None:
    def train(scale: float) -> Any:
        for step in range(4):
            emit(Loss(scale / (step + 1), step))
            emit(Metric({"acc": step / 4}, step))
        return [scale, {"model": "small"}], torch.ones(2)

    run = launch(train, 2, (2.0,), cpu=True, start_method="fork")
    last = last_run()
    assert torch.equal(run.value[1], torch.ones(2))
    assert last.values == [None, None]  # there is a tensor in it
    assert last.history is run.history
    assert last.curves["loss"].mean == (2.0, 1.0, 2 / 3, 0.5)
    assert last.text.startswith("train(2.0): done in ")
    assert repr(last).startswith("<Run: train(2.0), done in ")
    assert Path(last.log_path).is_file()
    launch(lambda: ([1.5], {"name": "x"}), 1, cpu=True, start_method="fork")
    assert last_run().value == ([1.5], {"name": "x"})
    assert last_run() is not last


@pytest.mark.parametrize(
    ("start", "kind"),
    [("fork", ValueError), ("inline", ValueError), ("inline", KeyboardInterrupt)],
    ids=["fork", "here", "interrupt"],
)
def test_the_run_that_failed_is_left_without_frames_and_what_they_hold(start: str, kind: type[BaseException]) -> None:
    alive: list[weakref.ref[Any]] = []

    def fails() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alive.extend(map(weakref.ref, (model, optimizer, model.weight)))
        emit(Loss(torch.ones(()), 0))
        raise kind("11 classes")

    with pytest.raises(kind):
        launch(fails, 1, cpu=True, start_method=start)
    gc.collect()
    assert [ref() for ref in alive] == [None] * (3 if start == "inline" else 0)
    error = last_run().error
    assert type(error) is kind
    assert error.__traceback__ is error.__context__ is error.__cause__ is None
    assert last_run().start_method == start
    assert list(last_run().curves) == ["loss"]
    word = "failed" if kind is ValueError else "stopped"
    assert last_run().text.startswith(f"fails(): {word} after ")


class NeedsTwo(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


def test_an_error_that_words_cannot_rebuild_is_left_as_words() -> None:
    run = Run([None], a_run(1, 2), NeedsTwo(1, 2), "fork", "", "", 1.0).light()
    assert repr(run.error) == "RuntimeError('NeedsTwo: 1 is not 2')"


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ([1, "a", None, (2.5, {3})], [1, "a", None, (2.5, {3})]),
        ({"x": numpy.float32(0.5)}, {"x": numpy.float32(0.5)}),
        ("x" * 2_000_000, None),
        ({"loss": torch.ones(())}, None),
        (torch.nn.Linear(1, 1), None),
        (numpy.array([object()]), None),
        (lambda: 0, None),
    ],
)
def test_of_a_value_plain_data_up_to_a_megabyte_is_left(value: Any, left: Any) -> None:
    found = light_value(value)
    assert found == left
    assert found is not value or value is None


def test_a_list_that_holds_itself_is_not_left() -> None:
    value: list[Any] = []
    value.append(value)
    assert light_value(value) is None
