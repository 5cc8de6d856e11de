"""Losses and gradients that are not finite: who says so, and who still steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.prepare.loss_watch import LossWatch
from nbaccel.train.step.accumulation import StepClock
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy

NAN, INF = float("nan"), float("inf")


def _losses(factors: list[float], bad_rank: int = 0, **options: Any) -> tuple[list[float], list[bool], list[str]]:
    """One step per factor, which is that of the loss on `bad_rank`: weights, skips and warnings."""
    accelerator = Accelerator(**options)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights, skips = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in factors:
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    loss = (model(torch.ones(1, 1)) + 1).sum() / 4
                    accelerator.backward(loss * (factor if accelerator.process_index == bad_rank else 1.0))
                    optimizer.step()
                    optimizer.zero_grad()
            skips.append(accelerator.optimizer_step_was_skipped)
            weights.append(next(model.parameters()).item())
    assert all(warning.filename == __file__ for warning in caught)
    return weights, skips, [str(warning.message) for warning in caught]


def test_a_loss_that_is_nan_is_told_once_with_step_and_rank() -> None:
    _, skips, messages = _losses([1.0, NAN, NAN, 1.0])
    assert skips == [False] * 4
    assert len(messages) == 1
    assert messages[0].startswith("the loss is nan in step 1 on rank 0 of 1: weights that take it become NaN.")
    assert "Accelerator(on_nan='skip') leaves such steps out" in messages[0]


def test_the_rank_whose_loss_it_was_speaks_first() -> None:
    alone, faulty = run_ranks(2, _losses, [1.0, -INF], 1)
    assert alone[2] == []
    assert [message[:44] for message in faulty[2]] == ["the loss is -inf in step 1 on rank 1 of 2: w"]


def test_skipping_leaves_the_step_out_on_every_rank() -> None:
    first, second = run_ranks(2, lambda: _losses([1.0, NAN, 1.0], 1, on_nan="skip"))
    assert first[:2] == second[:2] == ([-0.25, -0.25, -0.5], [False, True, False])
    assert [message[:52] for message in first[2]] == ["gradients are not finite in step 1 on rank 0 of 2: t"]


def test_one_bad_batch_spoils_its_window_and_no_other() -> None:
    weights, skips, _ = _losses([1.0, INF, 1.0], on_nan="skip", gradient_accumulation_steps=3)
    assert weights == pytest.approx([-0.25, -0.25, -0.5])
    assert skips == [False, True, False]


def _stopped(**options: Any) -> tuple[str, bool]:
    accelerator = Accelerator(on_nan="stop", **options)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = next(model.parameters()).item()
    factor = NAN if accelerator.is_last_process else 1.0
    accelerator.backward(model(torch.ones(1, 1)).sum() * factor / 4)
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    return str(caught.value), next(model.parameters()).item() == before


def test_stopping_raises_on_every_rank_before_the_weights_change() -> None:
    (first, is_unchanged), (second, is_unchanged_too) = run_ranks(2, _stopped)
    assert is_unchanged
    assert is_unchanged_too
    assert first.startswith(
        "gradients are not finite in step 0 on rank 0 of 2, although the loss there is: another rank's"
    )
    assert second.startswith("the loss is nan in step 0 on rank 1 of 2. The weights are as before.")
    assert "torch.autograd.set_detect_anomaly(True) names the operation" in second


def test_fp16_stops_for_a_loss_and_not_for_an_overflow() -> None:
    assert _stopped(mixed_precision="fp16")[0].startswith("the loss is nan in step 0")
    weights, skips, messages = _losses([1.0, 1e5, 1.0], mixed_precision="fp16", on_nan="stop")
    assert (skips, messages) == ([False, True, False], [])
    assert weights[0] == weights[1]


def test_under_fp16_the_scaler_skips_and_the_warning_says_so() -> None:
    for on_nan in ("warn", "skip"):
        weights, skips, messages = _losses([1.0, NAN, 1.0], mixed_precision="fp16", on_nan=on_nan)
        assert (weights[0] == weights[1], skips) == (True, [False, True, False])
        assert messages[0].startswith("the loss is nan in step 1 on rank 0 of 1: the gradient scaler skips it.")


def test_fifty_skipped_steps_in_a_row_are_told_once() -> None:
    _, _, messages = _losses([1.0] + [NAN] * 120, on_nan="skip")
    assert len(messages) == 2
    assert messages[1].startswith("50 optimizer steps in a row were skipped on all 1 rank(s), the last one in step 50:")
    assert "their gradients were not finite. Lower the learning rate" in messages[1]


def test_an_unknown_choice_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="on_nan must be one of 'warn', 'skip', 'stop', got 'explode'"):
        Accelerator(on_nan="explode")


def test_a_loss_on_a_device_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("meta")
    watch = LossWatch(StepClock(), Precision(device), Strategy(World(), device))
    now_s = 100.0
    monkeypatch.setattr("nbaccel.train.prepare.loss_watch.time.monotonic", lambda: now_s)
    reads: list[int] = []

    class Loss:
        def numel(self) -> int:
            return 1

        def item(self) -> float:
            reads.append(1)
            return 1.0

        def detach(self) -> Loss:
            return self

    for _ in range(3):
        watch.see(Loss())  # type: ignore[arg-type]
    assert len(reads) == 1
    now_s += 1.0
    watch.see(Loss())  # type: ignore[arg-type]
    assert len(reads) == 2


def test_a_loss_of_several_elements_may_be_given_with_its_gradient() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 2))
    accelerator.backward(model(torch.ones(1, 1)), gradient=torch.ones(1, 2))
    assert model.bias.grad.tolist() == [1.0, 1.0]
