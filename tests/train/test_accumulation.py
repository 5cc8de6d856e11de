"""When gradients synchronise, and that a window belongs to its loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator


def _setup(steps: int = 4, batches: int = 6) -> tuple[Accelerator, torch.nn.Module, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _syncs(accelerator: Accelerator, model: torch.nn.Module, loader: Any, stop_after: int | None = None) -> list[bool]:
    seen = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            seen.append(accelerator.sync_gradients)
        if len(seen) == stop_after:
            break
    return seen


def test_gradients_synchronise_every_n_batches_and_at_the_end_of_the_loader() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]


def test_a_break_leaves_no_state_behind() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    assert _syncs(accelerator, model, loader, stop_after=2) == [False, False]
    assert accelerator.sync_gradients
    assert _syncs(accelerator, model, loader)[:4] == [False, False, False, True]


def test_an_iterator_that_is_still_held_does_not_disturb_the_next_loop() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    held = iter(loader)
    next(held)
    with accelerator.accumulate(model):
        pass
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]
    del held


def test_an_evaluation_inside_a_window_does_not_disturb_it() -> None:
    accelerator, model, _, loader = _setup(2, 4)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1))
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            assert len(list(evaluation)) == 3
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]


def test_optimizer_and_scheduler_do_nothing_inside_a_window() -> None:
    accelerator, model, optimizer, loader = _setup(4, 4)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    with torch.no_grad():
        model.weight.fill_(3.0)
    weights, rates = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
        rates.append(scheduler.get_last_lr()[0])
    assert weights == [3.0, 3.0, 3.0, 2.0]
    assert rates == [1.0, 1.0, 1.0, 0.5]


def test_the_number_of_steps_may_change_between_windows() -> None:
    accelerator, model, _, loader = _setup(2, 6)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3
    assert _syncs(accelerator, model, loader) == [False, False, True, False, False, True]


def test_zero_steps_are_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        accelerator.gradient_accumulation_steps = 0


def test_a_second_accelerator_does_not_reset_the_first() -> None:
    accelerator, model, _, loader = _setup(3, 3)
    Accelerator(gradient_accumulation_steps=1)
    assert _syncs(accelerator, model, loader) == [False, False, True]


def test_a_plain_loop_accumulates_too() -> None:
    accelerator, model, _, _ = _setup(2, 1)
    assert _syncs(accelerator, model, [(torch.ones(1, 1),)] * 4) == [False, True, False, True]
    assert model.weight.grad.item() == pytest.approx(2.0)  # two windows of two halves


def test_accelerate_divides_by_n_outside_of_accumulate_and_so_do_we() -> None:
    accelerator, model, _, _ = _setup(4, 1)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == pytest.approx(0.25)


def test_an_exception_inside_accumulate_leaves_the_next_block_clean() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            with accelerator.accumulate(model):
                raise ZeroDivisionError
    assert accelerator._accumulation.depth == 0
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]
