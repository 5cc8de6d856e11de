"""What decides by a loss decides alike on all ranks: optimizers with a closure, and schedulers that watch a metric."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbaccel import Accelerator
from nbaccel.testing import run_ranks


def _lbfgs(strategy: str, line_search: str | None) -> tuple[list[float], int, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(24, 4, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    accelerator = Accelerator(strategy=strategy)
    if accelerator.num_processes > 1:
        x, y = x.chunk(2)[accelerator.process_index], y.chunk(2)[accelerator.process_index]
    own = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search, tolerance_change=1e-3)
    model, optimizer = accelerator.prepare(model, own)
    losses, calls = [], 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        return loss

    for _ in range(4):
        losses.append(optimizer.step(closure).item())
    weights = torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
    return losses, calls, weights.tolist()


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
def test_ranks_decide_alike_by_the_losses_of_a_closure(line_search: str | None) -> None:
    """Else one would call it once more than the other, whose next gradients it would take for those of this step."""
    alone_losses, alone_calls, alone = _lbfgs("auto", line_search)
    first, second = run_ranks(2, _lbfgs, "ddp", line_search)
    assert first[1] == second[1] == alone_calls > 8
    assert first[2] == second[2]
    torch.testing.assert_close(first[2], alone, rtol=1e-9, atol=1e-9)
    assert first[0] != second[0]  # what `step` returns is the rank's own loss, as in Accelerate
    means = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
    torch.testing.assert_close(means, alone_losses, rtol=1e-9, atol=1e-9)


def test_a_closure_may_return_a_number_or_nothing() -> None:
    def losses() -> list[object]:
        weight = torch.nn.Linear(1, 1)
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.1))
        rank = accelerator.process_index

        def closure(result: object) -> object:
            accelerator.backward(model(torch.ones(1, 1)).sum())
            return result

        return [optimizer.step(lambda result=result: closure(result)) for result in (1.5 + rank, rank, None, "text")]

    assert run_ranks(2, losses) == [[1.5, 0, None, "text"], [2.5, 1, None, "text"]]


METRICS = [(4.0, 4.0), (3.0, 4.9), (3.5, 3.9), (3.0, 4.8), (2.0, 5.7), (1.0, 6.9), (0.5, 7.5)]
"""Of two ranks. Rank 0 sees a loss that falls, rank 1 one that rises; the mean falls twice, and then it does not."""


def _rates(way: str, metrics: list[float]) -> list[float]:
    """Return the rates of a run, with every number as its rank has it.  way: prepared, as it is, or of a Tensor."""
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = ReduceLROnPlateau(own, patience=1, factor=0.5)
    model, optimizer = accelerator.prepare(model, own)
    if way == "prepared":
        schedule = accelerator.prepare(schedule)
    elif way == "of the prepared":
        schedule = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    rates = []
    for metric in metrics:
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(torch.tensor(metric, requires_grad=True) if way == "tensor" else metric)
        rates.append(own.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("way", ["prepared", "as it is", "of the prepared", "tensor"])
def test_a_plateau_is_one_of_all_ranks(way: str) -> None:
    """Its patience counts the program's calls: moved once for each rank, a first bad number would end it."""

    def rates() -> list[float]:
        rank = Accelerator().process_index
        return _rates(way, [pair[rank] for pair in METRICS])

    one_process = _rates("prepared", [sum(pair) / 2 for pair in METRICS])
    assert one_process == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert run_ranks(2, rates) == [one_process, one_process]


def test_a_metric_that_the_ranks_share_stays_what_it_is() -> None:
    def best(metric: float) -> float:
        own = torch.optim.SGD((model := torch.nn.Linear(1, 1)).parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(own)
        Accelerator().prepare(model, own)
        schedule.step(metric)
        return float(schedule.best)

    assert run_ranks(3, best, 0.1) == [0.1] * 3  # whose mean, of three, has other bits


def test_a_plateau_of_an_optimizer_that_is_not_prepared_is_the_ranks_own() -> None:
    def rate() -> float:
        accelerator = Accelerator()
        accelerator.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=1.0))
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = ReduceLROnPlateau(own, patience=0, factor=0.5)
        for metric in (1.0, 2.0) if accelerator.is_main_process else (1.0, 0.5, 0.25):
            schedule.step(metric)
        return float(own.param_groups[0]["lr"])

    assert run_ranks(2, rate) == [0.5, 1.0]
