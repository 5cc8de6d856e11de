"""Bytes at the peak of a step, counted by torch's own trackers: what sharding saves against DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

DIM, BLOCKS = 128, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak(strategy: str, reshards: bool = True) -> float:
    """Bytes at the peak of a step with AdamW, in bytes of the weights. Runs in ranks."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    options: dict[str, Any] = {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}
    if strategy == "fsdp":
        options = {"fsdp_plugin": FullyShardedDataParallelPlugin(reshard_after_forward=reshards)}
    accelerator = Accelerator(strategy=strategy, **options)
    net = Net()
    weights = sum(parameter.nbytes for parameter in net.parameters())
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), foreach=False))
    x = torch.randn(2, DIM)
    if strategy == "fsdp":
        tracker: Any = FSDPMemTracker(net, optimizer.optimizer)
        tracker.track_inputs((x,))
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer.optimizer)
    with tracker:
        for step in range(2):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    [counted] = tracker.get_tracker_snapshot("peak").values()
    return counted["Total"] / weights


@pytest.mark.parametrize(("ranks", "of_sharded", "of_zero2"), [(2, 0.55, 0.68), (4, 0.31, 0.5)])
def test_shards_take_a_fraction_of_the_memory_of_replicas(ranks: int, of_sharded: float, of_zero2: float) -> None:
    replicas = max(run_ranks(ranks, peak, "ddp", timeout_s=180))
    assert max(run_ranks(ranks, peak, "fsdp", timeout_s=180)) <= of_sharded * replicas
    assert max(run_ranks(ranks, peak, "fsdp", False, timeout_s=180)) <= of_zero2 * replicas
