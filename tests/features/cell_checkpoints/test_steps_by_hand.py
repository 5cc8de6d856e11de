"""Steps of loops without an optimizer are counted, and what counts them stands once in the way of the losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nbaccel.base.events import Event, Loss, reports
from nbaccel.features.cell_checkpoints.loss_tap import LossTap
from nbaccel.features.cell_checkpoints.steps_by_hand import StepsByHand


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What comes to the outlet behind all taps."""
    seen: list[Event] = []
    monkeypatch.setattr(reports, "sink", seen.append)
    return seen


def data_plus(weight: torch.Tensor) -> None:
    weight.data += 0.5


def other_data(weight: torch.Tensor) -> None:
    weight.data = weight.data + 0.5


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight += 0.5


@pytest.mark.parametrize("update", [data_plus, other_data, in_place])
def test_each_backward_after_a_change_is_a_step(losses: list[Event], update: Callable[[torch.Tensor], None]) -> None:
    weight, steps = torch.zeros(3, requires_grad=True), []
    StepsByHand(lambda: [weight], lambda: True, lambda: steps.append(1))
    for step in range(6):
        reports.sink(Loss(1.0, step))
        update(weight)
    assert (len(losses), len(steps)) == (6, 5)


def test_backwards_that_change_nothing_are_no_steps(losses: list[Event]) -> None:
    weight, constant, steps = torch.zeros(3, requires_grad=True), torch.zeros(3), []
    StepsByHand(lambda: [weight, constant], lambda: True, lambda: steps.append(1))
    for step in range(40):
        reports.sink(Loss(1.0, step))
        constant += 1
    assert not steps


def test_a_first_step_after_many_backwards_is_found(losses: list[Event]) -> None:
    weight, steps = torch.zeros(3, requires_grad=True), []
    StepsByHand(lambda: [weight], lambda: True, lambda: steps.append(1))
    for step in range(40):
        reports.sink(Loss(1.0, step))
        if step == 20:
            data_plus(weight)
    assert steps


def test_an_optimizer_ends_the_watch(losses: list[Event]) -> None:
    outlet = reports.sink
    StepsByHand(list, lambda: False, lambda: None)
    reports.sink(Loss(1.0, 0))
    assert reports.sink == outlet


def test_taps_that_have_their_loss_are_out_of_the_way(losses: list[Event]) -> None:
    """Hundreds of saves would end by a `RecursionError` otherwise."""
    outlet, taken = reports.sink, []
    StepsByHand(list, lambda: len(taken) < 9, lambda: None)
    for step in range(5):
        LossTap(lambda loss: taken.append(loss))
        LossTap(lambda loss: taken.append(loss))
        reports.sink(Loss(float(step), step))
    reports.sink(Loss(5.0, 5))
    reports.sink(Loss(6.0, 6))
    assert reports.sink == outlet
    assert len(losses) == 7
    assert taken == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
