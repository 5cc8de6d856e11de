"""Which part of their time ranks of a prepared loop are said to exchange and wait."""

from __future__ import annotations

import time

import torch

from nbaccel import Accelerator
from nbaccel.base.exchange_time import exchange_clock
from nbaccel.testing import run_ranks

STEPS = 20


def _share(slow_rank: int) -> tuple[float, int]:
    """Return the share that this rank reports, while `slow_rank` computes before each of its backwards."""
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in range(1 + STEPS):
        if step == 1:
            exchange_clock.begin()  # the first backward waits for ranks that have started later
        ends_at = time.perf_counter() + 0.1 * (accelerator.process_index == slow_rank)
        while time.perf_counter() < ends_at:
            pass
        accelerator.backward(model(torch.ones(4, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
    told = exchange_clock.read()
    return told.seconds / told.of_s, exchange_clock.backwards


def test_a_rank_that_waits_in_its_backwards_says_so_and_the_one_that_computes_does_not() -> None:
    (waits, counted), (computes, _) = run_ranks(2, _share, 1)
    assert counted == STEPS
    assert waits > 0.5
    assert computes < 0.3
