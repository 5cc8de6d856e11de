"""Bytes of sharded models: each rank counts the rows that it holds, and what is gathered for as long as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nbaccel import Accelerator
from nbaccel.testing import MemLimit, run_ranks
from nbaccel.train.oom.memory.holdings import holdings
from nbaccel.utils import FullyShardedDataParallelPlugin, find_executable_batch_size

DIM, BLOCKS = 64, 8
BLOCK_BYTES = 4 * (DIM * DIM + DIM)
WEIGHT_BYTES = BLOCKS * BLOCK_BYTES
MESH_BYTES = 8
"""The numbers of both ranks, in the device mesh that a sharded model has."""
TRANSIT_BYTES = 2 * BLOCK_BYTES
"""At most this is counted too while gloo's threads hold what they have sent and received last."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    """Blocks of a list, which are the groups, and nothing that the root has to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _prepared() -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(strategy="fsdp")
    net = Net()
    return accelerator, *accelerator.prepare(net, AdamW(net.parameters()))


def _step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, DIM)).square().mean())
    optimizer.step()


def test_rows_gradients_and_optimizer_state_count_as_half() -> None:
    def count() -> tuple[int, int, int, dict[str, int]]:
        with MemLimit() as limit:
            accelerator, model, optimizer = _prepared()
            prepared = limit.live_bytes
            _step(accelerator, model, optimizer)
            trained = limit.live_bytes
        afterwards = MemLimit()
        afterwards.count(model, optimizer.optimizer)
        named = {name: count for name, count, _ in holdings({"model": model, "optimizer": optimizer})}
        return prepared, trained, afterwards.live_bytes, named

    counters = 2 * BLOCKS * 4  # AdamW's steps, one of each parameter
    for prepared, trained, afterwards, named in run_ranks(2, count):
        assert 0 <= prepared - WEIGHT_BYTES // 2 - MESH_BYTES <= TRANSIT_BYTES
        assert 0 <= trained - 4 * WEIGHT_BYTES // 2 - counters - MESH_BYTES <= TRANSIT_BYTES
        assert afterwards == 4 * WEIGHT_BYTES // 2 + counters
        assert named["optimizer.state"] == WEIGHT_BYTES + counters
        assert named["model.grad"] == WEIGHT_BYTES // 2
        assert named["model"] == WEIGHT_BYTES // 2 + MESH_BYTES


def test_a_gathered_block_counts_until_it_is_freed() -> None:
    def peaks() -> list[tuple[int, int]]:
        _, model, _ = _prepared()
        seen = []
        with MemLimit() as limit, torch.no_grad():
            limit.count(model)
            for _ in range(3):  # in the first one the tensors are made, in the others their memory is given back
                limit.reset_peak()
                model(torch.ones(1, DIM))
                seen.append((limit.live_bytes, limit.peak_bytes))
        return seen

    for seen in run_ranks(2, peaks):
        assert all(0 <= live - WEIGHT_BYTES // 2 <= TRANSIT_BYTES for live, _ in seen)
        extra_blocks = [(peak - WEIGHT_BYTES // 2) / BLOCK_BYTES for _, peak in seen]
        assert all(1 < extra < BLOCKS - 2 for extra in extra_blocks), extra_blocks  # with what is sent and received


@pytest.mark.parametrize("keeps", [True, False])
def test_what_an_evaluation_has_gathered_and_keeps_is_freed_by_free_memory(keeps: bool) -> None:
    def held() -> list[list[tuple[str, int]]]:
        plugin = FullyShardedDataParallelPlugin(reshard_after_forward=not keeps)
        accelerator = Accelerator(strategy="fsdp", fsdp_plugin=plugin)
        model = accelerator.prepare(nn.Linear(DIM, DIM))
        with torch.no_grad():
            model(torch.ones(1, DIM))
        found = [[(name, count) for name, count, _ in holdings({"model": model})]]
        accelerator.free_memory()
        return [*found, [(name, count) for name, count, _ in holdings({"model": model})]]

    rows = BLOCK_BYTES // 2 + MESH_BYTES
    for evaluated, freed in run_ranks(2, held):
        assert evaluated == [("model", rows + BLOCK_BYTES * keeps)]  # its rows, and all of them if those are kept
        assert freed == [("model", rows)]


def test_a_rank_that_runs_out_in_a_gather_or_later_ends_the_attempt_on_all_ranks() -> None:
    """The limit of rank 1 is set where it is hit: in the gather of its first block, and by the activations."""

    def train(free_bytes: int) -> tuple[list[int], int]:
        sizes: list[int] = []
        refusals: list[int] = []

        @find_executable_batch_size(starting_batch_size=64)
        def attempt(batch_size: int) -> None:
            accelerator, model, optimizer = _prepared()
            sizes.append(batch_size)
            limit = MemLimit()
            with limit:
                limit.count(model)
                if accelerator.process_index and batch_size > 8:
                    limit.limit_bytes = limit.live_bytes + free_bytes
                try:
                    accelerator.backward(model(torch.ones(batch_size, DIM)).square().mean())
                    optimizer.step()
                finally:
                    refusals.append(limit.refusals)

        attempt()
        return sizes, sum(refusals)

    for free_bytes in (BLOCK_BYTES, WEIGHT_BYTES):
        own, short = run_ranks(2, train, free_bytes)
        assert own[0] == short[0], "all ranks shrink together"
        assert own[0][0] == 64 > own[0][-1]
        assert (own[1], short[1] > 0) == (0, True)
