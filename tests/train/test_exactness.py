"""Training with the Accelerator gives the numbers of plain PyTorch, in one process and in two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks

SAMPLES = 56  # per epoch: 14 batches of 4, so 4 does not divide them
STEPS = 20


def _problem(optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64)
    targets = torch.stack([inputs.sum(1), inputs.prod(1)], 1)
    return model, kinds[optimizer](model.parameters(), lr=0.05), TensorDataset(inputs, targets)


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def _plain(optimizer_name: str, batch_size: int, window: int) -> list[torch.Tensor]:
    """A step per `window` batches; a last window of fewer batches is the mean over those it has."""
    model, optimizer, dataset = _problem(optimizer_name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    steps = 0
    while steps < STEPS:
        batches = list(DataLoader(dataset, batch_size=batch_size))
        for start in range(0, len(batches), window):
            members = batches[start : start + window]
            for batch in members:
                (_loss(model, batch) / len(members)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if steps == STEPS:
                break
    return [parameter.detach() for parameter in model.parameters()]


def _prepared(
    optimizer_name: str, batch_size: int, accumulation: int, split_batches: bool = True
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """split_batches: the scheduler then moves once per step, as in one process."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, split_batches=split_batches)
    model, optimizer, dataset = _problem(optimizer_name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    scheduler, loader, model, optimizer = accelerator.prepare(
        scheduler, DataLoader(dataset, batch_size=batch_size), model, optimizer
    )
    steps, gradients = 0, []
    while steps < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, batch))
                if accelerator.sync_gradients:
                    steps += 1
                    gradients = [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if steps == STEPS:
                break
    parameters = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    accelerator.end_training()
    return parameters, gradients


def _assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_process_equals_plain_pytorch(optimizer: str, accumulation: int) -> None:
    _assert_equal(_prepared(optimizer, 4, accumulation)[0], _plain(optimizer, 4, accumulation))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_ranks_equal_one_process_on_the_whole_batch(optimizer: str, accumulation: int) -> None:
    ranks = run_ranks(2, _prepared, optimizer, 4, accumulation)
    whole = _plain(optimizer, 4, accumulation)
    for parameters, _ in ranks:
        _assert_equal(parameters, whole)
    _assert_equal(ranks[0][1], ranks[1][1])


def _last_gradients(steps: int) -> list[list[torch.Tensor]]:
    """What each optimizer step of one epoch of 7 batches per rank would have stepped with."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model, optimizer, dataset = _problem("sgd")
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
            if accelerator.sync_gradients:
                seen.append([parameter.grad.clone() for parameter in model.parameters()])
                model.zero_grad()
    return seen


def test_a_short_last_window_is_divided_by_its_own_length_in_two_ranks() -> None:
    first, last = run_ranks(2, _last_gradients, 4)[0]
    for gradients, samples in ((first, slice(0, 32)), (last, slice(32, 56))):
        model, _, dataset = _problem("sgd")
        _loss(model, dataset[samples]).backward()
        _assert_equal(gradients, [parameter.grad for parameter in model.parameters()])


class _Stream(IterableDataset[Any]):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return iter([self.dataset[index] for index in range(len(self.dataset))])


def test_a_short_last_window_of_a_loader_without_length_is_divided_by_its_own_length() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, _, dataset = _problem("sgd")
    model, loader = accelerator.prepare(model, DataLoader(_Stream(dataset), batch_size=8))  # 7 batches: 4 + 3
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
        if index == 3:
            model.zero_grad()
    plain, _, _ = _problem("sgd")
    _loss(plain, dataset[32:56]).backward()
    _assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_one_process_draws_the_same_random_numbers_as_plain_pytorch() -> None:
    dataset = TensorDataset(torch.arange(20))

    def epochs(loader: DataLoader[Any]) -> list[list[int]]:
        return [batch[0].tolist() for _ in range(2) for batch in loader]

    torch.manual_seed(3)
    plain = epochs(DataLoader(dataset, batch_size=4, shuffle=True))
    torch.manual_seed(3)
    assert epochs(Accelerator().prepare(DataLoader(dataset, batch_size=4, shuffle=True))) == plain


def test_a_division_by_one_makes_no_autograd_node() -> None:
    accelerator = Accelerator()
    weight = torch.ones((), requires_grad=True)
    seen: list[Any] = []
    accelerator.prepare()
    accelerator._context.strategy.backward = lambda loss: seen.append(loss)  # type: ignore[method-assign]
    loss = weight * 2
    accelerator.backward(loss)
    assert seen[0] is loss


def _gan(steps: int) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    torch.manual_seed(1)
    maker, judge = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 1).double()
    makers, judges = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.Adam(judge.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(24, 3, dtype=torch.float64)), batch_size=24 // 6)
    if accelerator.num_processes > 1:
        loader = DataLoader(loader.dataset, batch_size=2)
    maker, judge, makers, judges, loader = accelerator.prepare(maker, judge, makers, judges, loader)
    for (real,) in loader:
        with accelerator.accumulate(maker, judge):
            made = maker(real)
            accelerator.backward((judge(made.detach()) - judge(real)).square().mean())
            judges.step()
            judges.zero_grad()
            accelerator.backward(judge(made).square().mean())
            makers.step()
            makers.zero_grad()
            judges.zero_grad()
    return [p.detach() for model in (maker, judge) for p in accelerator.unwrap_model(model).parameters()]


def test_two_models_with_two_optimizers_train_as_in_one_process() -> None:
    whole = _gan(1)
    for rank in run_ranks(2, _gan, 1):
        _assert_equal(rank, whole)
