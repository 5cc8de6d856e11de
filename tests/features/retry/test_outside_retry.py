"""What was there before a search goes on working after an attempt that failed: Accelerators, models, optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.base.events import Event, Metric, OutOfMemory, outlet
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

    return train(), len(accelerator._context.prepared.models)


def test_what_a_failed_attempt_prepared_is_forgotten_also_without_free_memory() -> None:
    assert run_ranks(2, _prepared_inside_without_freeing) == [(4, 1)] * 2


def test_an_optimizer_that_had_no_state_begins_each_attempt_without_any() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    states: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        states.append(len(optimizer.state))
        model(torch.ones(batch_size, 2)).mean().backward()
        optimizer.step()
        if batch_size == 8:
            raise MemoryError

    train()
    assert states == [0, 0]


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


def _beside_an_older_accelerator() -> tuple[list[int], list[int], list[int]]:
    """Rank 1 runs out of memory at its fourth step; each Accelerator that was made before has steps of its own."""
    older, accelerator = Accelerator(), Accelerator()
    events: list[Event] = []

    def train_some(accelerator: Accelerator, short_at: int | None = None) -> None:
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        for step in range(5):
            with accelerator.accumulate(model):
                if step == short_at and accelerator.process_index == 1:
                    raise MemoryError
                accelerator.backward(model(torch.ones(1, 2)).mean())
            accelerator.log({"step": step})

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        train_some(accelerator, 3 if batch_size == 8 else None)

    train_some(older)
    train_some(older)
    with outlet(events.append):
        train()
    train_some(older)
    logged = [event.step for event in events if isinstance(event, Metric)]
    short = [event.step for event in events if isinstance(event, OutOfMemory)]
    return logged[-5:], short, [each._step_under_way() for each in (older, accelerator)]


def test_the_steps_of_an_older_accelerator_are_not_those_of_the_training_that_ran_out_of_memory() -> None:
    first, second = run_ranks(2, _beside_an_older_accelerator)
    assert first[0] == second[0] == [3, 4, 5, 6, 7]
    assert [first[1], second[1]] == [[], [3]]
    assert first[2] == second[2] == [14, 7]


def _fsdp(is_outside: bool) -> tuple[str, str, Any]:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator()
    kept = fully_shard(torch.nn.Linear(4, 4)) if is_outside else None

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        model = fully_shard(torch.nn.Linear(4, 4)) if kept is None else kept
        loss = model(torch.ones(batch_size, 4)).sum()
        if batch_size == 4 and accelerator.process_index == 1:
            raise MemoryError("no room")
        loss.backward()
        return batch_size

    try:
        return "", "", train()
    except Exception as error:
        return type(error).__name__, str(error), None


_HAS_FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
_needs_fsdp = pytest.mark.skipif(not _HAS_FSDP_ON_CPU, reason="FSDP of torch 2.6 runs on devices with streams only")


@_needs_fsdp
def test_a_model_sharded_inside_of_the_function_is_sharded_again() -> None:
    assert run_ranks(2, _fsdp, False) == [("", "", 2)] * 2


@_needs_fsdp
def test_a_model_sharded_outside_of_the_function_cannot_go_on_and_the_error_says_so() -> None:
    peer, short = run_ranks(2, _fsdp, True)
    assert [peer[0], short[0]] == ["PeerFailed", "OutOfMemoryError"]
    for _, text, _ in (peer, short):
        assert "FSDPLinear was sharded (FSDP) outside of the function; shard it inside" in text


class _RunsOut(torch.optim.SGD):
    """Has no memory for its first step on the ranks of `short`."""

    short: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> Any:
        short, type(self).short = self.short, ()
        if Accelerator().process_index in short:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().step(closure)


def _fp16_made_outside() -> tuple[float, float, int]:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, _RunsOut(model.parameters(), lr=1.0))
    last = accelerator.num_processes - 1
    _RunsOut.short = (last,)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        if batch_size == 4 and accelerator.process_index < last:
            accelerator._lifecycle.scale_like(
                accelerator._lifecycle.scaling | {"scale": 2.0**10}
            )  # as if steps had been skipped
        accelerator.backward(model(torch.full((batch_size, 1), 2.0**-7)).mean())
        optimizer.step()
        optimizer.zero_grad()
        return batch_size

    size = train()
    return accelerator.unwrap_model(model).weight.item(), accelerator.scaler.get_scale(), size


def test_fp16_gradients_are_of_true_size_after_an_optimizer_ran_out_of_memory() -> None:
    moved, scale, size = _fp16_made_outside()
    assert (moved, scale) == (-(2.0**-7), 2.0**16)
    assert size < 4


def test_ranks_scale_alike_after_a_recovery() -> None:
    first, second = run_ranks(2, _fp16_made_outside)
    assert first == second
    assert first[2] < 4
