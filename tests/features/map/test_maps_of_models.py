"""Models in `accelerator.map`: replicated ones are used by each rank alone; what needs all ranks is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.errors import CollectiveMismatch
from nbaccel.testing import run_ranks

DATA = torch.linspace(-1.0, 1.0, 32 * 4, device="cpu").reshape(32, 4)


def trainer(**options: Any) -> tuple[Accelerator, nn.Module, Callable[[], None]]:
    """Return an accelerator, a prepared model with buffers, and what trains it for an epoch."""
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(DATA), batch_size=4))

    def train() -> None:
        model.train()
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()

    return accelerator, model, train


def scores(model: nn.Module, items: list[float], grad: bool = False) -> list[float]:
    model.eval()
    with torch.set_grad_enabled(grad):
        return [float(model(torch.full((1, 4), item, device="cpu")).detach().sum()) for item in items]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batches", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 5])
def test_a_replicated_model_is_used_by_one_rank_as_often_as_it_likes(count: int, batches: int, grad: bool) -> None:
    def rank() -> Any:
        accelerator, model, train = trainer()
        for step in range(batches):  # after one backward DDP would exchange its buckets in the next forward
            accelerator.backward(model(DATA[step : step + 4 + accelerator.process_index]).square().mean())
        items = [float(number) for number in range(count)]
        answers = list(accelerator.map(lambda some: scores(model, some, grad), items, batch_size=1))
        alone = scores(accelerator.unwrap_model(model), items)
        train()
        rest = float(accelerator.unwrap_model(model)[0].weight.detach().sum())
        return answers, alone, accelerator.gather(torch.tensor([rest])).tolist()

    (first, of_first, rest), (second, of_second, _) = run_ranks(2, rank)
    assert first == second
    assert first == pytest.approx(of_first)  # each rank has the buffers of rank 0
    assert of_first == of_second
    assert rest[0] == rest[1]


def test_an_evaluation_in_each_epoch_of_a_training() -> None:
    def rank() -> list[Any]:
        accelerator, model, train = trainer()
        found = []
        for epoch in range(3):
            train()
            with torch.no_grad():
                answers = accelerator.map(lambda some: scores(model, some), [float(epoch), 1.0, 2.0])
            found += [*answers, *accelerator.gather(torch.tensor(list(answers))[:1]).tolist()]
        return found

    first, second = run_ranks(2, rank)
    assert first == second


def test_maps_one_after_another_with_other_functions() -> None:
    def rank() -> list[Any]:
        accelerator = Accelerator(cpu=True)
        doubled = accelerator.map(lambda items: [2 * item for item in items], range(20))
        return [*accelerator.map(lambda items: [item + 1 for item in items], doubled), *doubled]

    expected = [*(2 * n + 1 for n in range(20)), *(2 * n for n in range(20))]
    assert run_ranks(2, rank) == [expected] * 2


@pytest.mark.parametrize("count", [1, 3])  # of one item one rank alone calls the model
def test_after_forward_backward(count: int) -> None:
    def rank() -> list[Any]:
        accelerator, model, train = trainer()
        accelerator.forward_backward(lambda batch: model(batch).square().mean(), DATA[:4])
        items = [1.0, 2.0, 3.0][:count]
        answers = list(accelerator.map(lambda some: scores(model, some, grad=True), items, batch_size=1))
        accelerator.forward_backward(lambda batch: model(batch).square().mean(), DATA[:4])
        train()
        return answers

    first, second = run_ranks(2, rank)
    assert first == second


def refusal(function: Callable[[Accelerator, nn.Module], Callable[[list[Any]], Any]], **options: Any) -> list[str]:
    def rank() -> str:
        accelerator, model, _ = trainer(**options)
        try:
            accelerator.map(function(accelerator, model), range(1))
        except CollectiveMismatch as error:
            return str(error)
        return ""

    return run_ranks(2, rank)


def test_a_collective_in_the_function_is_refused_before_it_waits() -> None:
    def gathers(accelerator: Accelerator, _: nn.Module) -> Any:
        return lambda items: accelerator.gather(torch.tensor(items, device="cpu")).tolist()

    assert all("waits for other ranks, and this rank alone has these items" in words for words in refusal(gathers))


def test_a_sharded_model_is_refused_before_it_waits() -> None:
    words = refusal(lambda _, model: lambda items: scores(model, items), strategy="fsdp")
    assert all("A model in shards (FSDP), a training, prepare and gather do that" in each for each in words)
