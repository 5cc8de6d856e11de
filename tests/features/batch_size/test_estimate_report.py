"""`%accelerate estimate`: reads names of the notebook, and says what is wrong with a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from torch import nn

from nbaccel.base.hardware import Gpu, MemoryInfo, Survey
from nbaccel.features.batch_size.command import estimate_report
from nbaccel.options.run_options import RunOptions

CARDS = Survey(gpus=tuple(Gpu(index, f"GPU-{index}", "T4", 15 * 10**9, compute_capability=(7, 5)) for index in (0, 1)))


def names() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batch": torch.ones(4, 100),
        "loss": lambda model, batch: model(batch).mean(),
        "number": 3,
    }


def report(line: str, survey: Survey = CARDS, config: RunOptions | None = None) -> str:
    return estimate_report(line, names(), survey, config or RunOptions())


def test_a_model_is_enough() -> None:
    said = report("model")
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["single", "1"], ["ddp", "2"]]
    assert said.endswith("and there is 2 x 15.0 GB (T4).")
    assert "with 0.80 GB for the driver" in said


@pytest.mark.parametrize("line", ["model optimizer batch", "model batch optimizer --loss_fn loss"])
def test_optimizer_and_batch_stand_in_any_order(line: str) -> None:
    said = report(line)
    assert "Each sample of a batch takes" in said
    assert "0 bytes" in said.splitlines()[1]  # SGD has no state


def test_ranks_and_strategy_are_chosen() -> None:
    said = report("model -n 4 --strategy ddp", Survey(ram=MemoryInfo(10**10, 10**10)))
    assert said.splitlines()[1].split()[:2] == ["ddp", "4"]
    assert "(without the driver's share), and there is 10.0 GB of host memory" in said


def test_the_notebooks_choices_hold() -> None:
    assert report("model", config=RunOptions(num_processes=3)).splitlines()[2].split()[:2] == ["ddp", "3"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "needs the name of a model"),
        ("modell", "the notebook has no variable modell"),
        ("number", "estimate needs a torch.nn.Module, and this is a int"),
        ("model -n two", "invalid int value: 'two'"),
        ("model --strategy zero", "invalid choice: 'zero'"),
        ("model -n 0", "a number of ranks is at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said(line: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        report(line)
