"""Prepared optimizers and schedulers beside the ones they wrap."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.testing import run_ranks


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.5)


def test_a_prepared_optimizer_is_an_optimizer_and_shows_its_own() -> None:
    plain = _optimizer()
    prepared = Accelerator().prepare(plain)
    assert isinstance(prepared, torch.optim.Optimizer)
    assert prepared.param_groups is plain.param_groups
    assert prepared.state is plain.state
    assert prepared.defaults is plain.defaults
    assert prepared.state_dict() == plain.state_dict()
    prepared.load_state_dict(copy.deepcopy(plain.state_dict()))
    torch.optim.lr_scheduler.StepLR(prepared, 1)


def test_a_prepared_optimizer_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Accelerator().prepare(_optimizer())))
    assert again.param_groups[0]["lr"] == 1.0
    again.step()


def test_a_closure_reaches_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.tensor([4.0]))
    prepared = Accelerator().prepare(torch.optim.LBFGS([parameter]))

    def closure() -> torch.Tensor:
        prepared.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert prepared.step(closure).item() == 16.0
    assert abs(parameter.item()) < 1.0


def test_fp16_refuses_a_closure_and_says_what_takes_one() -> None:
    prepared = Accelerator(mixed_precision="fp16").prepare(_optimizer())
    with pytest.raises(ValueError, match="use mixed_precision='bf16' or 'no'"):
        prepared.step(lambda: 0)


def _moves(split_batches: bool, with_optimizer: bool, kind: str) -> int:
    accelerator = Accelerator(split_batches=split_batches, step_scheduler_with_optimizer=with_optimizer)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers: dict[str, Any] = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5),
    }
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedulers[kind]())
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    return int(scheduler.last_epoch)


@pytest.mark.parametrize(
    ("split_batches", "with_optimizer", "kind", "moves"),
    [(False, True, "step", 6), (True, True, "step", 3), (False, False, "step", 3), (False, True, "cycle", 5)],
)
def test_a_scheduler_moves_once_per_rank_and_step(
    split_batches: bool, with_optimizer: bool, kind: str, moves: int
) -> None:
    assert run_ranks(2, _moves, split_batches, with_optimizer, kind) == [moves, moves]
