"""An optimizer's step in a rank runs two hooks of the project at most, whatever the number of tensors."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from nbaccel import launch


def _hooks_in_a_step() -> list[str]:
    parameters = [torch.nn.Parameter(torch.ones(2, device="cpu")) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(2, device="cpu")
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "nbaccel" in str(frame.f_globals.get("__name__")):
            called.append(frame.f_code.co_qualname)

    for _ in range(3):  # the first may be compared among ranks
        called.clear()
        sys.setprofile(note)
        optimizer.step()
        sys.setprofile(None)
    return called


def test_a_step_of_tensors_that_are_not_sharded_asks_nothing_of_each() -> None:
    (called,) = launch(_hooks_in_a_step, 1, cpu=True).values
    assert sorted(called) in ([], ["FlagWatch._before_step"], ["FlagWatch._before_step", "OneTraining._before_step"])
