"""LocalSGD: when parameters are averaged, and by whose numbers."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.features.local_sgd import averaged_models as local_sgd
from nbaccel.local_sgd import LocalSGD
from nbaccel.testing import run_ranks
from peers import toolkit
from shortages import Collected


def _weights(name: str, every: int | None, steps: int = 1, batches: int = 5) -> list[float]:
    """Rank r's weight after each batch and at the end; its gradients are r + 1 while nothing is exchanged."""
    tools = toolkit(name)
    accelerator = tools.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weight = next(model.parameters())
    seen = []
    with import_module(f"{name}.local_sgd").LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=every, enabled=every is not None
    ) as local_sgd:
        for _ in range(batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            seen.append(weight.item())
    return [*seen, weight.item()]


def test_ranks_train_for_themselves_and_meet_every_few_steps() -> None:
    first, second = run_ranks(2, _weights, "nbaccel", 2)
    assert first == [-1.0, -3.0, -4.0, -6.0, -7.0, -7.5]
    assert second == [-2.0, -3.0, -5.0, -6.0, -8.0, -7.5]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("every", [None, 2, 3])
def test_the_numbers_are_accelerates(every: int | None, steps: int) -> None:
    theirs, ours = (run_ranks(2, _weights, name, every, steps, 6) for name in ("accelerate", "nbaccel"))
    assert ours == theirs


def test_in_one_process_it_changes_nothing() -> None:
    assert _weights("nbaccel", 2) == [-1.0, -2.0, -3.0, -4.0, -5.0, -5.0]


def _after_an_error() -> tuple[bool, float]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    rank = accelerator.process_index
    if rank == 1:  # rank 0 never comes to an average
        with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 8):
            raise ZeroDivisionError
    accelerator.backward(model(torch.full((1, 1), 1.0 + rank)).sum())
    return model.require_backward_grad_sync, next(model.parameters()).grad.item()


def test_an_error_leaves_the_block_without_waiting_for_the_others() -> None:
    assert run_ranks(2, _after_an_error) == [(True, 1.5), (True, 1.5)]


def _steps_counted() -> int:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                local_sgd.step()
    clock = accelerator._context.accumulation.clock
    return clock.step + clock.trained


def test_local_steps_are_steps() -> None:
    assert run_ranks(2, _steps_counted) == [3, 3]


def test_a_distance_of_zero_steps_is_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="local_sgd_steps must be at least 1, got 0"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 0)


class Two(torch.nn.Module):
    """Parameters of two dtypes, of which one is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
        self.half = torch.nn.Linear(3, 3).to(torch.bfloat16)
        self.across = torch.nn.Parameter(torch.zeros(4, 2).t())
        self.unused = torch.nn.Parameter(torch.zeros(0, 2))


def _averaged(limit: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """A model's weights on this rank, their averages, and how many sums those took."""
    if limit is not None:
        local_sgd._GROUP_BYTES = limit
    accelerator = Accelerator()
    model = Two()  # not prepared: the ranks have weights of their own
    torch.manual_seed(accelerator.process_index)
    for parameter in model.parameters():
        parameter.data.normal_()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    averaging = LocalSGD(accelerator, model, 1)
    accelerator.reduce(torch.ones(1))
    with Collected() as collected:
        averaging._average()
    return before, [parameter.detach() for parameter in model.parameters()], collected.calls["allreduce_"]


@pytest.mark.parametrize(("limit", "sums"), [(None, 2), (1, 10), (100, 3)])
def test_an_average_takes_one_sum_for_each_dtype_and_some_megabytes(limit: int | None, sums: int) -> None:
    (first, one, calls), (second, other, _) = run_ranks(2, _averaged, limit)
    assert calls == sums
    for mine, theirs, average, again in zip(first, second, one, other, strict=True):
        assert torch.equal(average, (mine + theirs) / 2)
        assert torch.equal(average, again)
        assert average.stride() == mine.stride()
