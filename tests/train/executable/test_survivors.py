"""What was there before a search goes on working after an attempt that failed: Accelerators, models, optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.testing import Faults, run_ranks
from searches import digest


def _model_made_outside(kind: str, point: str) -> dict[str, Any]:
    """Trains across a shortage on rank 1, in which rank 0 has taken one step more than rank 1."""
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    optimizer: Any = torch.optim.Adam(model.parameters())
    if kind == "prepared":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = DistributedDataParallel(model)
    plain = getattr(optimizer, "optimizer", optimizer)

    def step(batch_size: int) -> None:
        loss = model(torch.randn(batch_size, 4)).square().mean()
        if kind == "prepared":
            accelerator.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(4)
    faults = Faults().oom_at(point, rank=1)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        step(batch_size)
        with faults.in_optimizer(plain):
            step(batch_size)
        faults.at("end")
        for _ in range(3):
            step(batch_size)
        return batch_size

    with faults:
        size = train()
    return {
        "size": size,
        "weights": digest(model.module),
        "state": [float(entry["exp_avg"].sum()) for entry in plain.state.values()],
        "group": model.process_group is dist.group.WORLD,
        "sum": int(accelerator.reduce(torch.ones(()))),
        "step": accelerator._step_under_way(),
    }


@pytest.mark.parametrize("kind", ["prepared", "the program's own DDP"])
@pytest.mark.parametrize("point", ["optimizer", "end"])
def test_a_model_made_outside_joins_the_new_group_and_stays_one_model(kind: str, point: str) -> None:
    first, second = run_ranks(2, _model_made_outside, kind, point)
    assert first == second
    assert first["size"] < 8
    assert first["group"]
    assert first["sum"] == 2


def _prepared_inside_without_freeing() -> tuple[int, int]:
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        if batch_size == 8 and accelerator.process_index == 0:
            raise MemoryError
        accelerator.backward(model(torch.ones(batch_size, 2)).mean())
        return batch_size

    return train(), len(accelerator._prepared.models)


def test_what_a_failed_attempt_prepared_is_forgotten_also_without_free_memory() -> None:
    assert run_ranks(2, _prepared_inside_without_freeing) == [(4, 1)] * 2


def _in_the_middle_of_a_window() -> list[bool]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    syncs: list[bool] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        for number in range(2):
            with accelerator.accumulate(model):
                if batch_size == 8 and number == 1 and accelerator.process_index == 1:
                    raise MemoryError
                accelerator.backward(model(torch.ones(batch_size, 2)).mean())
                if batch_size < 8:
                    syncs.append(accelerator.sync_gradients)

    train()
    return syncs


def test_an_accumulation_window_of_a_failed_attempt_is_not_continued() -> None:
    assert run_ranks(2, _in_the_middle_of_a_window) == [[False, True]] * 2


def test_fsdp_is_recognised_by_its_classes() -> None:
    from torch.distributed.fsdp import FSDPModule

    from nbaccel.train.executable.survivors import _is_sharding

    assert _is_sharding(FSDPModule)
    assert not _is_sharding(DistributedDataParallel)
