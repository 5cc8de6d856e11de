"""A prepared schedule that ends too early, because every step moves it once for each rank, says so once."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.prepare.schedule_length import ScheduleLength, schedule_length_of


def get_cosine_lambda(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """A schedule as transformers makes it."""
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup_steps) / num_training_steps))


def get_linear_lambda(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


MAKES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=40),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=40),
    "falling": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)],
        milestones=[10],
    ),
    "transformers, cosine": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, functools.partial(get_cosine_lambda, num_warmup_steps=0, num_training_steps=40)
    ),
    "transformers, linear": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, functools.partial(get_linear_lambda, num_training_steps=40)
    ),
}
WITHOUT: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=40),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=40),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40),
    "own function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    "other function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, functools.partial(pow, 0.9)),
}


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.1)


@pytest.mark.parametrize("kind", MAKES)
def test_the_horizon_of_a_schedule_is_read_from_it(kind: str) -> None:
    schedule_length = schedule_length_of(MAKES[kind](an_optimizer()))
    assert schedule_length is not None
    assert schedule_length.moves == 40
    assert ("rises again" in schedule_length.then) is (kind in ("cosine", "sequence", "transformers, cosine"))


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_schedule_that_may_go_on_for_ever_has_none(kind: str) -> None:
    assert schedule_length_of(WITHOUT[kind](an_optimizer())) is None


def test_a_padded_last_round_passes_no_horizon() -> None:
    schedule_length = ScheduleLength(1_000, "T_max", "")
    assert [schedule_length.is_passed(moves, 2) for moves in (1_000, 1_050, 1_052)] == [False, False, True]
    assert [ScheduleLength(10, "T_max", "").is_passed(moves, 4) for moves in (12, 14, 16)] == [False, False, True]


def trained(kind: str, steps: int, **choices: Any) -> list[str]:
    """The warnings about the schedule in this rank, in a loop of so many steps."""
    accelerator = Accelerator(cpu=True, **choices)
    model = torch.nn.Linear(2, 1, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, MAKES[kind](optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            accelerator.backward(model(torch.ones(2, 2, device="cpu")).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "the prepared" in str(each.message)]


def of_two_ranks() -> list[list[str]]:
    return [
        trained("cosine", 40),
        trained("cycle", 40),
        trained("cosine", 20),
        trained("cosine", 60, step_scheduler_with_optimizer=False),
        trained("cosine", 60, split_batches=True),
    ]


@pytest.mark.slow
def test_two_ranks_are_told_once_by_the_main_process() -> None:
    first, other = run_ranks(2, of_two_ranks)
    assert other == [[]] * 5
    assert first[0] == [
        "the prepared CosineAnnealingLR was made for T_max=40 and has passed that after 22 optimizer steps: each moves "
        "it 2 times on 2 ranks, as in Accelerate. From here on its rate rises again. Give it T_max=80, or make the "
        "Accelerator with step_scheduler_with_optimizer=False, where it moves by the program's own calls, or with "
        "split_batches=True, where each step moves it once."
    ]
    assert len(first[1]) == 1
    assert "the prepared OneCycleLR was made for total_steps=40 and has passed that after 22 optimizer" in first[1][0]
    assert first[2:] == [[], [], []]


def test_one_process_follows_the_program_and_says_nothing() -> None:
    assert trained("cosine", 60) == []
