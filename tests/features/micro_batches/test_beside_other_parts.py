"""`forward_backward` beside parts of the core: hooks, quantised models, retries, own averaging; its frames."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from frames import our_frames
from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.testing import run_ranks
from nbaccel.utils import DistributedDataParallelKwargs
from searches import digest
from train.test_plugins import hooked
from train.test_quantised import steps, training
from train.test_unaveraged import Net, Program, assert_right, plain_training, reduce_by_hand, rows_of, steps_of


def _lends(accelerator: Accelerator, model: Any) -> None:
    accelerator.forward_backward(lambda x: model(x).mean(), torch.ones(4, 32))


def test_a_hook_compresses_also_after_forward_backward_had_the_gradients() -> None:
    handler = DistributedDataParallelKwargs(comm_hook="fp16")
    assert run_ranks(2, hooked, handler, _lends) == run_ranks(2, hooked, handler)


def in_parts(batch_size: int) -> list[float]:
    accelerator, model, optimizer, data = training(batch_size)
    losses: list[float] = []
    for number, ids in enumerate(data):

        def loss_of(part: Tensor, number: int = number) -> Tensor:
            if number == 1 and accelerator.is_main_process and len(part) > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return model(part).square().mean()  # type: ignore[no-any-return]

        loss = accelerator.forward_backward(loss_of, ids)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss, "mean")))
    return losses


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_goes_on_in_parts_with_the_same_losses() -> None:
    first, second = run_ranks(2, in_parts, 4)
    assert first == second
    assert first == pytest.approx(steps(*training(8)), abs=1e-6)


def _led_in_micro_batches() -> dict[str, Any]:
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        for _ in range(2):
            accelerator.forward_backward(lambda rows: model(rows).square().mean(), torch.randn(batch_size, 4))
            if batch_size == 8 and accelerator.process_index == 1:
                raise MemoryError
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()  # DDP takes its gradients back
        return batch_size

    size = train()
    return {"size": size, "weights": digest(model.module), "gradient": float(model.module.bias.grad)}


def test_a_model_whose_gradients_are_lent_joins_the_new_group_too() -> None:
    first, second = run_ranks(2, _led_in_micro_batches)
    assert first == second
    assert first["size"] == 4
    assert first["gradient"] == 1.0


def lent_in_between() -> tuple[list[Tensor], list[Tensor]]:
    """A forward that has no backward, then `forward_backward`, then the model inside with an own reduce."""
    program = Program()

    def backward(step: int) -> None:
        program.model(program.rows(step))
        if step % 2:
            program.accelerator.backward(program.net.loss(program.rows(step)))
            reduce_by_hand(program)
        else:
            program.accelerator.forward_backward(lambda rows: program.model(rows).square().mean(), program.rows(step))
            program.end()
            program.accelerator.backward(program.net.loss(program.rows(step)))
            reduce_by_hand(program)

    found = steps_of(program, backward)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in (0, 0, 1, 2, 2):
        net.loss(rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, list(net.parameters())


def forward_and_backward() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()

    def backward(step: int) -> None:
        program.accelerator.forward_backward(lambda rows: program.model(rows).square().mean(), program.rows(step))

    return steps_of(program, backward), plain_training()


def test_programs_that_average_also_without_it_stay_right() -> None:
    assert_right({"alone": (forward_and_backward, 0), "in between": (lent_in_between, 2)})


def _in_microbatches() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(batch: torch.Tensor) -> Any:
        found.setdefault("accelerator.forward_backward(loss, batch)", our_frames("user"))
        return model(batch).sum()

    def user() -> None:
        accelerator.forward_backward(loss, torch.ones(2, 3))
        optimizer.step()

    user()
    accelerator.end_training()
    return found


def test_a_step_that_survives_a_lack_of_memory_is_few_frames_from_the_loss() -> None:
    (frames,) = _in_microbatches().values()
    assert len(frames) <= 8, frames


def _used_up() -> list[weakref.ref[Any]]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.forward_backward(lambda batch: model(batch).sum(), torch.ones(4, 2))
    optimizer.step()
    return [weakref.ref(thing) for thing in (accelerator, accelerator._lifecycle, accelerator._context, model)]


def test_an_accelerator_that_is_dropped_is_gone_at_once() -> None:
    _used_up()  # the first one of a process waits for the garbage collector, by what torch makes
    gc.collect()
    gc.disable()
    try:
        gone = _used_up()
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()
