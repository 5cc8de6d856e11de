"""A rank that runs out of memory on a device: its peers are woken by an abort, and use nothing of what that leaves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs, find_executable_batch_size
from nbaccel.base.aborting import is_aborted
from nbaccel.base.events import Waiting, outlet
from nbaccel.features.retry import coordinate, disconnect
from nbaccel.testing import Faults, run_ranks
from nbaccel.train.distributed.process_group import process_group
from searches import START, digest, training


def _accelerator() -> Accelerator:
    devicelike.install()
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=devicelike.NAME)])


def _finite_steps() -> list[bool]:
    """A list that says of each step of any optimizer from now on whether its gradients were numbers."""
    steps: list[bool] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        steps.append(all(bool(gradient.isfinite().all()) for gradient in gradients))

    register_optimizer_step_post_hook(note)
    return steps


def _out_of_memory_at(point: str) -> tuple[Any, list[bool], bool]:
    accelerator = _accelerator()
    steps = _finite_steps()
    faults = Faults().oom_at(point, rank=1, **({} if point in ("beginning", "end") else {"step": 2}))
    with faults:
        landed = training(accelerator, faults)()
    return landed, steps, is_aborted()


@pytest.mark.parametrize("point", ["beginning", "forward", "backward", "optimizer", "after optimizer", "end"])
def test_wherever_memory_runs_out_no_rank_steps_on_half_a_sum_and_all_end_alike(point: str) -> None:
    peer, failed = run_ranks(2, _out_of_memory_at, point)
    assert peer[0] == failed[0]
    assert peer[0][0] < START
    assert all([*peer[1], *failed[1]])
    assert [peer[2], failed[2]] == [False, False]


def _train_with_torch_alone(left: str) -> tuple[int, list[bool], list[str], str]:
    _accelerator()
    steps = _finite_steps()
    raised: list[str] = []
    faults = Faults().oom_at("forward", rank=1, step=2)  # the second forward of DDP exchanges something itself

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> tuple[int, str]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        with faults.in_model(model):
            for faults.step in range(3):
                loss = model(torch.ones(batch_size, 4)).square().mean()
                loss.backward()
                if left == "ValueError" and any(
                    p.grad is not None and p.grad.isnan().any() for p in model.parameters()
                ):
                    raise ValueError("the gradients are not finite")
                try:
                    optimizer.step()
                except Exception as error:
                    raised.append(str(error))
                    raise
                optimizer.zero_grad()
        return batch_size, digest(model)

    with faults:
        return (train()[0], steps, raised, "")


def test_an_optimizer_that_the_program_steps_itself_is_held() -> None:
    peer, failed = run_ranks(2, _train_with_torch_alone, "")
    assert peer[0] == failed[0] == 4
    assert all([*peer[1], *failed[1]])
    assert peer[2] == [
        "this rank's exchange with its peers was cut short, since one failed, ran out of memory or was interrupted: a "
        "step of Adam would use sums that are not complete. The error of that rank says what happened."
    ]
    assert failed[2] == []


def test_an_error_of_the_program_over_half_a_sum_is_a_consequence() -> None:
    peer, failed = run_ranks(2, _train_with_torch_alone, "ValueError")
    assert peer[0] == failed[0] == 4
    assert peer[2] == failed[2] == []


def _model_made_outside(settles: bool) -> Any:
    accelerator = _accelerator()
    coordinate.SETTLE_S = 0.2
    torch.manual_seed(0)
    model, _ = accelerator.prepare(model := torch.nn.Linear(4, 1), torch.optim.Adam(model.parameters()))
    known = digest(accelerator.unwrap_model(model))
    faults = Faults().oom_at("forward", rank=1, step=0)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> tuple[str, str]:
        group = devicelike.world()
        if batch_size == 8 and not accelerator.is_main_process and not settles:
            group.later(group.wait_for_abort)  # this device is never done
        if batch_size == 8 and accelerator.is_main_process:
            # What a host that runs ahead has queued: a sum that cannot be complete, and a step upon it.
            total = torch.ones(4)
            dist.all_reduce(total, async_op=True)
            weight = accelerator.unwrap_model(model).weight
            group.later(lambda: weight.data.add_(total))
        with faults.in_model(model):
            for faults.step in range(1):
                loss = model(torch.ones(batch_size, 4)).square().mean()
                before = digest(accelerator.unwrap_model(model))  # the forward brought the ranks together
                accelerator.backward(loss)
        return before, digest(accelerator.unwrap_model(model))

    with faults:
        try:
            return known, *train()
        except Exception as error:
            return str(error)


def test_a_model_made_outside_is_as_the_rank_that_failed_has_it() -> None:
    """On the others a step may have been queued behind a sum that was cut short."""
    for known, before, after in run_ranks(2, _model_made_outside, True):
        assert known == before == after


def test_a_model_made_outside_that_may_be_spoilt_everywhere_is_not_trained_on() -> None:
    for text in run_ranks(2, _model_made_outside, False):
        assert (
            "a model that was made outside of the function may hold half a sum on every rank, for the device of no "
            "rank that ran out of memory was done with its work within 10 s; make the model inside"
        ) in text


def _computes_on_its_host_for_long() -> int:
    accelerator = _accelerator()
    coordinate._DEVICE_PATIENCE_S = 1.0
    store = process_group.meeting_place("long").store

    def look_up(event: Any) -> None:
        if type(event) is Waiting and "to be ready for the next attempt" in event.call and event.seconds > 2.2:
            store.set("has waited", "1")

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        if batch_size == 8:
            if not accelerator.is_main_process:
                raise MemoryError
            store.wait(["has waited"], timedelta(seconds=30))  # torch.compile, for one
            accelerator.wait_for_everyone()
        return batch_size

    with outlet(look_up):
        return train()  # type: ignore[no-any-return]


def test_a_rank_that_only_computes_on_its_host_is_waited_for() -> None:
    assert run_ranks(2, _computes_on_its_host_for_long) == [4, 4]


def _an_abort_that_does_not_come_back() -> str:
    accelerator = _accelerator()
    coordinate._DEVICE_PATIENCE_S, disconnect._ABORT_S = 0.5, 0.1
    devicelike.world().is_stuck = not accelerator.is_main_process
    faults = Faults().oom_at("forward", rank=1, step=1)
    with faults:
        try:
            training(accelerator, faults)()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_device_that_does_not_let_go_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(2, _an_abort_that_does_not_come_back):
        assert "its device did not let go of the process group within 0.5 s" in text
