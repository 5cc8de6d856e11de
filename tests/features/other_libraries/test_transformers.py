"""How far a trainer that is not ours has come, told without it: by the callbacks that it would call."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.base.events import Event, Gauge, Progress, outlet
from nbaccel.features.other_libraries.transformers import TransformersCallback

ARGS = SimpleNamespace(num_train_epochs=2.0, max_steps=-1, train_batch_size=4, gradient_accumulation_steps=1)


def looks_of(heard: list[Event]) -> list[Progress | None]:
    return [event.read() for event in heard if isinstance(event, Gauge)]  # type: ignore[misc]  # they show progress


@pytest.mark.parametrize(
    ("step", "place"), [(0, (0, 0)), (1, (0, 1)), (8, (0, 8)), (9, (1, 1)), (16, (1, 8))], ids=lambda value: str(value)
)
def test_an_epoch_is_at_its_end_until_the_next_one_has_a_step(step: int, place: tuple[int, int]) -> None:
    heard: list[Event] = []
    state: Any = SimpleNamespace(global_step=0, max_steps=16)
    with outlet(heard.append):
        TransformersCallback().on_train_begin(ARGS, state, None)
        state.global_step = step
        (progress,) = looks_of(heard)
    assert progress is not None
    assert (progress.epoch, progress.batch) == place


def test_evaluations_began_when_the_training_was_left_and_are_told_apart() -> None:
    """The first word on each comes when its first batch is done."""
    heard: list[Event] = []
    state: Any = SimpleNamespace(global_step=0, max_steps=16)
    control: Any = SimpleNamespace(should_training_stop=False, should_evaluate=True)
    reports = TransformersCallback()
    with outlet(heard.append):
        reports.on_train_begin(ARGS, state, control)
        state.global_step = 8
        reports.on_step_end(ARGS, state, control)
        left = time.monotonic()
        for _ in range(2):
            reports.on_prediction_step(ARGS, state, control, eval_dataloader=range(3))
            reports.on_evaluate(ARGS, state, control)
    first, second = [event for event in heard if isinstance(event, Progress)]
    assert 0.0 < first.began <= left < second.began
    assert (first.first, first.step, first.is_over, first.is_training) == (8, 8, True, False)
