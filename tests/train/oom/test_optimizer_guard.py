"""An optimizer that runs out of memory has stepped, or has not begun, or says that it was torn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.base.events import Event, OutOfMemory, outlet
from nbaccel.errors import StepCorrupted
from nbaccel.testing import MemLimit
from nbaccel.train.oom.microbatch.optimizer_guard import guarded_step


def _made(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn(32, 32)
    return parameters, kind(parameters, lr=0.1, **options)


def _step(optimizer: torch.optim.Optimizer) -> None:
    guarded_step(optimizer, optimizer.step, "rank 0 of 1", 7)


def test_c20_state_that_was_half_made_in_the_first_step_is_dropped_and_a_later_step_works() -> None:
    parameters, optimizer = _made(torch.optim.AdamW)
    before = [parameter.detach().clone() for parameter in parameters]
    with MemLimit(5 * 32 * 32 * 4), pytest.raises(torch.OutOfMemoryError):  # two moments for four parameters are eight
        _step(optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, parameters, before))
    _step(optimizer)
    expected, sound = _made(torch.optim.AdamW)
    sound.step()
    torch.testing.assert_close(parameters, expected)


def test_c20_an_update_that_had_not_begun_is_taken_one_tensor_after_the_other() -> None:
    parameters, optimizer = _made(torch.optim.SGD, momentum=0.9, foreach=True)
    calls: list[bool] = []
    seen: list[Event] = []

    def short(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        calls.append(optimizer.param_groups[0]["foreach"])
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    optimizer.register_step_pre_hook(short)
    with outlet(seen.append):
        _step(optimizer)
    assert calls == [True, False]
    assert optimizer.param_groups[0]["foreach"] is True
    assert seen == [OutOfMemory(7, "optimizer", message="CUDA out of memory.")]
    expected, sound = _made(torch.optim.SGD, momentum=0.9)
    sound.step()
    torch.testing.assert_close(parameters, expected)


def test_c20_an_update_that_was_torn_says_so_and_is_not_tried_again() -> None:
    parameters, optimizer = _made(torch.optim.SGD, momentum=0.9, foreach=False)
    optimizer.step()
    calls = []

    def torn() -> None:
        calls.append(1)
        with torch.no_grad():
            parameters[0].add_(1.0)
            parameters[1].add_(1.0)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.")

    with pytest.raises(StepCorrupted) as caught:
        guarded_step(optimizer, torn, "rank 1 of 2", 7)
    message = str(caught.value)
    assert calls == [1]
    assert "SGD ran out of memory in step 7 on rank 1 of 2" in message
    assert "2 of 4 parameters" in message
    assert "Tried to allocate 4.00 MiB" in message
    assert "load the last checkpoint" in message


def test_c20_state_that_moved_before_the_parameters_is_torn_too() -> None:
    _, optimizer = _made(torch.optim.AdamW, foreach=True)
    optimizer.step()
    # Adam's counters and moments are updated in place before the first temporary tensor is asked for.
    with MemLimit(100), pytest.raises(StepCorrupted, match="of 4 parameters, or their state"):
        _step(optimizer)


def test_other_errors_of_an_optimizer_pass_through() -> None:
    _, optimizer = _made(torch.optim.SGD)
    with pytest.raises(ZeroDivisionError):
        guarded_step(optimizer, lambda: 1 / 0, "rank 0 of 1", 0)
