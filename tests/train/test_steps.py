"""Step boundaries: where a run can be stopped at the same step on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, RunStopped
from nbaccel.base.events import Event, Metric, StepEntered, StepsEnded, outlet
from nbaccel.testing import run_ranks


def _trained(steps: int = 1, batches: int = 4) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(batches * accelerator.num_processes, 1)), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()


def _boundaries(events: list[Event]) -> list[tuple[int, int] | str]:
    return [
        (event.step, event.substep) if isinstance(event, StepEntered) else "ended"
        for event in events
        if isinstance(event, (StepEntered, StepsEnded))
    ]


def test_each_batch_enters_a_step_and_the_end_of_the_loader_leaves_it() -> None:
    events: list[Event] = []
    with outlet(events.append):
        _epoch(*_trained(1, 3))
    assert _boundaries(events) == [(0, 0), (1, 0), (2, 0), "ended"]


def test_a_batch_that_continues_a_window_is_no_boundary() -> None:
    events: list[Event] = []
    with outlet(events.append):
        training = _trained(2, 5)
        _epoch(*training)
        _epoch(*training)
    assert _boundaries(events) == [(0, 0), (1, 0), (2, 0), "ended", (3, 0), (4, 0), (5, 0), "ended"]


def test_evaluation_counts_substeps_and_training_repairs_them() -> None:
    events: list[Event] = []
    with outlet(events.append):
        training = _trained(1, 2)
        evaluation = training[0].prepare(DataLoader(TensorDataset(torch.ones(3, 1))))
        _epoch(*training)
        list(evaluation)
        _epoch(*training)
    assert _boundaries(events) == [
        *[(0, 0), (1, 0), "ended"],
        *[(2, 0), (2, 1), (2, 2), "ended"],
        *[(2, 3), (3, 0), "ended"],
    ]


def test_only_the_outermost_loader_ends_the_steps() -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, _, _, loader = _trained(1, 2)
        inner = accelerator.prepare(DataLoader(TensorDataset(torch.ones(1, 1))))
        for _ in loader:
            list(inner)
    assert _boundaries(events) == [(0, 0), (0, 1), (0, 2), (0, 3), "ended"]


def test_a_plain_loop_enters_a_step_where_a_window_opens() -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, model, optimizer, _ = _trained(2)
        _epoch(accelerator, model, optimizer, [(torch.ones(1, 1),)] * 4)
    assert _boundaries(events) == [(0, 0), (1, 0)]


def test_a_bare_backward_enters_a_step_too() -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, model, _, _ = _trained()
        for synchronised in (False, True, True):
            if synchronised:
                accelerator.backward(model(torch.ones(1, 1)).sum())
            else:
                with accelerator.no_sync(model):
                    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert _boundaries(events) == [(0, 0), (1, 0)]


def test_two_losses_of_one_batch_are_one_step() -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, model, _, loader = _trained(1, 2)
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            accelerator.backward(model(x).square().sum())
    assert _boundaries(events) == [(0, 0), (1, 0), "ended"]


def test_a_metric_belongs_to_the_step_under_way_and_stays_a_detached_tensor() -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, model, _, loader = _trained(1, 2)
        for (x,) in loader:
            loss = model(x).sum()
            accelerator.backward(loss)
            accelerator.log({"loss": loss, "size": 1})
        accelerator.log({"accuracy": 0.5}, step=7)
    metrics = [event for event in events if isinstance(event, Metric)]
    assert [metric.step for metric in metrics] == [0, 1, 7]
    assert isinstance(metrics[0].values["loss"], torch.Tensor)
    assert not metrics[0].values["loss"].requires_grad


def test_a_stop_at_a_boundary_leaves_loader_and_windows_clean() -> None:
    training = _trained(2, 6)
    events: list[Event] = []

    def stop_at_one(event: Event) -> None:
        events.append(event)
        if event == StepEntered(1, 0):
            raise RunStopped

    with outlet(stop_at_one), pytest.raises(RunStopped):
        _epoch(*training)
    assert _boundaries(events) == [(0, 0), (1, 0), "ended"]
    accelerator = training[0]
    assert accelerator.sync_gradients
    assert accelerator._context.accumulation.depth == 0
    events.clear()
    with outlet(events.append):
        _epoch(*training)
    assert _boundaries(events) == [(1, 1), (2, 0), (3, 0), "ended"]


def _stopped_rank(stop: tuple[int, int]) -> tuple[list[Any], bool, list[Any]]:
    """Train in two ranks until the outlet raises; then whether DDP would synchronise, and one more epoch."""
    accelerator, model, optimizer, loader = _trained(3, 6)
    events: list[Event] = []

    def sink(event: Event) -> None:
        events.append(event)
        if event == StepEntered(*stop):
            raise RunStopped

    with outlet(sink), pytest.raises(RunStopped):
        while True:
            _epoch(accelerator, model, optimizer, loader)
    seen = _boundaries(events)
    synchronises = model.require_backward_grad_sync
    _epoch(accelerator, model, optimizer, loader)
    return seen, synchronises, [parameter.tolist() for parameter in model.parameters()]


def test_two_ranks_count_the_same_steps_and_can_go_on_after_a_stop() -> None:
    first, second = run_ranks(2, _stopped_rank, (3, 0))
    assert first == second
    boundaries, synchronises, _ = first
    assert boundaries == [(0, 0), (1, 0), "ended", (2, 0), (3, 0), "ended"]
    assert synchronises
