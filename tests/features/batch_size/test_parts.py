"""``micro_batch_size="auto"``: where `forward_backward` starts. Criterion 13 of recovery, with the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hungry import GPT
from nbaccel import Accelerator
from nbaccel.errors import CannotSplit, PeerFailed
from nbaccel.testing import MemLimit, run_ranks


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _settled(limits_bytes: list[int]) -> tuple[int, int, int]:
    """On this rank: the size it settles at, and how often memory runs out in a step with it, and with 3 % more."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*GPT.make_seeded())

    def refusals(samples: int, size: Any) -> int:
        before = memory.refusals
        accelerator.forward_backward(lambda part: GPT.loss(model, part), GPT.batch(samples), micro_batch_size=size)
        optimizer.step()
        optimizer.zero_grad()
        return memory.refusals - before

    with MemLimit(limits_bytes[accelerator.process_index]) as memory:
        memory.count(model)
        refusals(400, "auto")  # with the trials
        settled = accelerator._recovery.sizes.ceiling or 0
        more = max(math.ceil(settled / 0.97), settled + 3)
        return settled, refusals(settled, "auto"), refusals(more, more)


@pytest.mark.slow
def test_c13_each_rank_settles_at_what_fits_on_it_and_stays_there() -> None:
    (few, in_a_step, with_more), (many, in_a_step_here, with_more_here) = run_ranks(
        2, _settled, [6_000_000, 12_000_000]
    )
    assert 1.5 * few < many < 400
    assert (in_a_step, in_a_step_here) == (0, 0)
    assert min(with_more, with_more_here) > 0


def test_a_batch_that_fits_is_run_as_a_whole() -> None:
    sizes: list[int] = []
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*GPT.make_seeded())

    def loss_fn(part: Any) -> Tensor:
        sizes.append(len(part))
        return GPT.loss(model, part)

    accelerator.forward_backward(loss_fn, GPT.batch(5), micro_batch_size="auto")
    assert sizes[-1] == 5
    trials = len(sizes)
    accelerator.forward_backward(loss_fn, GPT.batch(5), micro_batch_size="auto")
    assert sizes[trials:] == [5]  # planned once


@pytest.mark.slow
def test_steps_after_planning_are_those_without_it() -> None:
    def train(size: Any) -> list[bytes]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        model, optimizer = accelerator.prepare(*GPT.make_seeded())
        for _ in range(2):
            accelerator.forward_backward(lambda part: GPT.loss(model, part), GPT.batch(4), micro_batch_size=size)
            optimizer.step()
            optimizer.zero_grad()
        return [value.numpy(force=True).tobytes() for value in model.state_dict().values()]

    assert train("auto") == train(None)
    assert run_ranks(2, train, "auto") == run_ranks(2, train, None)


def test_a_mistake_on_one_rank_is_raised_by_the_step_on_all() -> None:
    def train() -> str:
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(*GPT.make_seeded())

        def loss_fn(part: Any) -> Tensor:
            if accelerator.process_index == 1:
                raise KeyError("labels")
            return GPT.loss(model, part)

        try:
            accelerator.forward_backward(loss_fn, GPT.batch(4), micro_batch_size="auto")
        except (KeyError, PeerFailed) as error:
            return type(error).__name__
        return "nothing"

    assert run_ranks(2, train) == ["PeerFailed", "KeyError"]


def test_a_batch_that_cannot_be_cut_is_refused_by_the_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*GPT.make_seeded())
    with pytest.raises(CannotSplit, match="disagree"):
        accelerator.forward_backward(
            lambda part: GPT.loss(model, part[0]), (GPT.batch(4), torch.ones(3)), micro_batch_size="auto"
        )


def test_one_sample_that_does_not_fit_is_out_of_memory_on_all_ranks() -> None:
    def train() -> str:
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(*GPT.make_seeded())
        with MemLimit(None) as memory:
            memory.count(model)
            memory.limit_bytes = 1_000_000 if accelerator.process_index == 1 else None
            try:
                accelerator.forward_backward(lambda part: GPT.loss(model, part), GPT.batch(4), micro_batch_size="auto")
            except torch.OutOfMemoryError as error:
                return str(error)
        return "nothing"

    first, second = run_ranks(2, train)
    assert "rank 1 of 2 cannot run" in first
    assert "rank 1 of 2 cannot run" in second
