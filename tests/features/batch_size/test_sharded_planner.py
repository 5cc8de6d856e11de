"""`find_batch_size` of sharded models: all ranks run each trial together, and none is to run out of memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbaccel import Accelerator
from nbaccel.features.batch_size.planner import CarefulSearch, Trial, sure_size
from nbaccel.features.batch_size.trial import TrialResult, TrialRun
from nbaccel.testing import MemLimit, run_ranks
from nbaccel.utils import find_executable_batch_size

DIM = 32


class Net(nn.Module):
    """Blocks to gather one after the other, with statistics and random numbers in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _prepared() -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(strategy="fsdp")
    net = Net()
    return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters()))


def _train(accelerator: Accelerator, model: Any, optimizer: Any) -> torch.Tensor:
    loss = model(torch.randn(4, DIM)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _find(limits_bytes: tuple[int, int]) -> tuple[int, int, list[int], int]:
    """What is found where ranks have these limits, with the refusals, the sizes tried, and the peak of a real step."""
    accelerator, model, optimizer = _prepared()
    tried: list[int] = []
    run = TrialRun.run

    def noted(self: TrialRun, size: int) -> TrialResult:
        tried.append(size)
        return run(self, size)

    with pytest.MonkeyPatch.context() as patch, MemLimit(limits_bytes[accelerator.process_index]) as limit:
        patch.setattr(TrialRun, "run", noted)
        limit.count(model)
        size = accelerator.find_batch_size(lambda x: model(x).square().mean(), torch.ones(2, DIM))
        limit.reset_peak()
        for _ in range(2):
            accelerator.backward(model(torch.ones(size, DIM)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return size, limit.refusals, tried, limit.peak_bytes


def test_all_ranks_find_what_fits_on_the_smallest_and_none_runs_out_of_memory() -> None:
    (size, refusals, tried, _), (other, refusals_there, tried_there, peak) = run_ranks(2, _find, (4_000_000, 1_500_000))
    assert (size, tried) == (other, tried_there)
    assert refusals == refusals_there == 0
    assert tried[:2] == [2, 3]
    assert size == tried[-1]
    assert 0.85 * 1_500_000 <= peak <= 1_500_000


def _state(model: Any, optimizer: Any) -> list[Any]:
    rows = [parameter.to_local().clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    entries = [
        value.to_local().clone() if hasattr(value, "to_local") else value.clone()
        for entry in optimizer.optimizer.state.values()
        for value in entry.values()
    ]
    return [*rows, *buffers, *entries, torch.get_rng_state()]


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_search_leaves_no_trace(has_trained: bool) -> None:
    def search(searches: bool) -> tuple[bool, int, torch.Tensor]:
        accelerator, model, optimizer = _prepared()
        if has_trained:
            _train(accelerator, model, optimizer)
        before, generators = _state(model, optimizer), (random.getstate(), numpy.random.get_state()[1].tolist())
        if searches:
            accelerator.find_batch_size(lambda x: model(x).square().mean(), torch.ones(2, DIM), max_batch_size=16)
        after = _state(model, optimizer)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        same = same and generators == (random.getstate(), numpy.random.get_state()[1].tolist())
        gradients = sum(parameter.grad is not None for parameter in model.parameters())
        losses = torch.stack([_train(accelerator, model, optimizer) for _ in range(2)])
        return same, gradients, losses

    with_search, without = run_ranks(2, search, True), run_ranks(2, search, False)
    for (same, gradients, losses), (_, _, expected) in zip(with_search, without, strict=True):
        assert same
        assert gradients == 0
        assert torch.equal(losses, expected)


def test_a_rank_without_a_limit_is_named_on_all_ranks() -> None:
    def search() -> str:
        accelerator, model, _ = _prepared()
        with MemLimit(None if accelerator.process_index else 1_500_000) as limit:
            limit.count(model)
            with pytest.raises(NotImplementedError) as caught:
                accelerator.find_batch_size(lambda x: model(x).square().mean(), torch.ones(2, DIM), meter=limit)
        accelerator.wait_for_everyone()
        return str(caught.value)

    for said in run_ranks(2, search):
        assert "there is no limit to keep to (rank 1: of the meter that was given)" in said
        assert "find_executable_batch_size" in said


def test_a_search_that_runs_out_on_one_rank_ends_the_attempt_on_all() -> None:
    """Not even two samples fit on rank 1 at first: it cannot be called back alone, so all ranks begin again."""

    def train() -> tuple[int, list[int], int]:
        attempts: list[int] = []

        @find_executable_batch_size(starting_batch_size=8)
        def attempt(batch_size: int) -> int:
            accelerator, model, _ = _prepared()
            attempts.append(batch_size)
            with MemLimit(2_000_000) as limit:
                limit.count(model)
                if accelerator.process_index and len(attempts) == 1:
                    limit.limit_bytes = limit.live_bytes + 100
                try:
                    return accelerator.find_batch_size(
                        lambda x: model(x).square().mean(), torch.ones(2, DIM), max_batch_size=batch_size
                    )
                finally:
                    refusals.append(limit.refusals)

        refusals: list[int] = []
        return attempt(), attempts, sum(refusals)

    own, short = run_ranks(2, train)
    assert own == (4, [8, 4], 0)
    assert short == (4, [8, 4], 1)


@pytest.mark.parametrize(
    "used",
    [
        lambda n: 0.1 + 0.002 * n,
        lambda n: 0.9 + 1e-4 * n,
        lambda n: max(0.3, 0.1 + 0.01 * n),  # gathered parameters hide what small batches take
        lambda n: max(0.5, 0.1 + 0.0003 * n),
    ],
)
def test_a_careful_search_tries_nothing_that_exceeds(used: Callable[[int], float]) -> None:
    plan = CarefulSearch(cap=4096)
    while (size := plan.next_size()) is not None:
        assert used(size) <= 1
        plan.note(Trial(size, True, used(size), 0.5, sure_size(size, used(size), held=0.1)))
    assert plan.best == plan.trials[-1].size
    assert used(plan.best) >= 0.9


def test_the_step_of_the_optimizer_ends_a_careful_search_too() -> None:
    plan = CarefulSearch(cap=4096)
    while (size := plan.next_size()) is not None:
        used, whole = 0.1 + 0.001 * size, 0.4 + 0.01 * size
        assert whole <= 1
        plan.note(Trial(size, True, used, whole, sure_size(size, used, held=0.1)))
    assert 0.4 + 0.01 * plan.best == pytest.approx(0.95, abs=0.05)


def test_a_step_of_the_optimizer_that_does_not_grow_is_no_obstacle() -> None:
    plan = CarefulSearch(cap=64)
    while (size := plan.next_size()) is not None:
        used = 0.1 + 0.001 * size
        plan.note(Trial(size, True, used, 0.99, sure_size(size, used, held=0.1)))
    assert plan.best == 64
