"""Flags of a launched function reach its loop, which no setup of the launch knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nbaccel import launch
from nbaccel.launchers import notebook_launcher

pytestmark = pytest.mark.slow


def trained(by_hand: torch.dtype | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with torch.autocast("cpu", by_hand, enabled=by_hand is not None):
            loss = model(torch.ones(4, 8)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("start", ["fork", "inline"])
def test_the_precision_of_a_launch_holds_for_a_loop_that_prepares_nothing(start: str) -> None:
    expected, as_written = trained(torch.bfloat16), trained()
    ranks = 1 if start == "inline" else 2
    run = launch(trained, ranks, mixed_precision="bf16", cpu=True, independent=True, start_method=start)
    for found in run.values:
        assert all(map(torch.equal, found, expected))
        assert not all(map(torch.equal, found, as_written))
    assert all(map(torch.equal, trained(), as_written)), "nothing is left in this process"


def test_a_notebook_launcher_in_this_process_does_it_too() -> None:
    found = notebook_launcher(trained, num_processes=1, mixed_precision="bf16")
    assert all(map(torch.equal, found, trained(torch.bfloat16)))
