"""How many of our frames stand between a user's line and torch: no more than today, whatever module they are in.

Each costs time in every step and a line in every traceback. A number that can be made smaller is made smaller here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from frames import our_frames
from nbaccel import Accelerator
from nbaccel.testing import run_ranks

Found = dict[str, list[str]]

TESTS = Path(__file__).resolve().parent.parent


class _Samples(Dataset[Any]):
    def __init__(self, found: Found) -> None:
        self.found = found

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.found.setdefault("for batch in loader", our_frames("user"))
        return torch.ones(3, device="cpu")


class _Model(torch.nn.Module):
    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, batch: Any) -> Any:
        self.found.setdefault("model(batch)", our_frames("user"))
        return self.linear(batch)


class _Optimizer(torch.optim.SGD):
    found: Found

    def step(self, closure: Any = None) -> Any:
        self.found.setdefault("optimizer.step()", our_frames("user"))
        return super().step(closure)


class _Scheduler(torch.optim.lr_scheduler.StepLR):
    found: Found

    def step(self, *args: Any) -> None:
        if hasattr(self, "found"):  # a schedule takes a step when it is made
            self.found.setdefault("scheduler.step()", our_frames("user"))
        super().step(*args)


def _trained(mixed_precision: str, accumulation: int) -> Found:
    """What stood on the stack of a training whose every line is in a function `user`."""
    found: Found = {}
    accelerator = Accelerator(mixed_precision, accumulation, cpu=True)
    model = _Model(found)
    optimizer = _Optimizer(model.parameters(), lr=0.1)
    scheduler = _Scheduler(optimizer, 1)
    optimizer.found = scheduler.found = found
    backward = torch.Tensor.backward

    def recording(self: torch.Tensor, *args: Any, **options: Any) -> None:
        found.setdefault("accelerator.backward(loss)", our_frames("user"))
        backward(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", recording)

        def user() -> None:
            prepared = accelerator.prepare(model, optimizer, scheduler, DataLoader(_Samples(found), 2))
            for batch in prepared[3]:
                with accelerator.accumulate(prepared[0]):
                    loss = prepared[0](batch).sum()
                    accelerator.backward(loss)
                    prepared[1].step()
                    prepared[2].step()
                    prepared[1].zero_grad()

        user()
    accelerator.end_training()
    return found


MOST = {
    "for batch in loader": 1,
    "model(batch)": 1,
    "accelerator.backward(loss)": 2,
    "optimizer.step()": 3,
    "scheduler.step()": 1,
}
"""Frames of ours between a user's line and what it asks for: the dataset, the module, torch's own methods."""


def _assert_at_most(found: Found, most: dict[str, int]) -> None:
    assert found.keys() == most.keys()
    more = {line: frames for line, frames in found.items() if len(frames) > most[line]}
    assert not more, f"at most { ({line: most[line] for line in more}) }"


CASES = [("no", 1, 0), ("bf16", 2, 1), ("fp16", 1, 1)]
"""Precision, batches of a step, and our frames around the model."""


@pytest.fixture(scope="module")
def founds() -> Any:
    """What stood on the stack of the trainings of `CASES`, and of one in two ranks.

    In a process of their own: where a cell has run, torch's iterators and optimizers ask whether its loop is prepared.
    """
    code = "import json; from train import test_frames; print(json.dumps(test_frames.all_found()))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def all_found() -> dict[str, Any]:
    return {
        "alone": [_trained(precision, accumulation) for precision, accumulation, _ in CASES],
        "ranks": run_ranks(2, _trained, "no", 2),
    }


@pytest.mark.parametrize("case", range(len(CASES)), ids=[precision for precision, *_ in CASES])
def test_a_line_of_a_training_is_few_frames_from_torch(founds: Any, case: int) -> None:
    _assert_at_most(founds["alone"][case], MOST | {"model(batch)": CASES[case][2]})


@pytest.mark.slow
def test_in_two_ranks_it_is_no_further(founds: Any) -> None:
    for found in founds["ranks"]:
        _assert_at_most(found, MOST)
