"""Checkpoints continue a training where it was, and are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint import write_checkpoint


class Tied(torch.nn.Module):
    """Two layers that are one, and dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.first(x)))


def _prepared(precision: str = "no") -> tuple[Accelerator, Any, Any, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), 2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def _epoch(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[float]:
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_training_continues_bit_for_bit(tmp_path: Path, precision: str) -> None:
    training = _prepared(precision)
    _epoch(*training)
    training[0].save_state(tmp_path / "a" / "last")
    expected = _epoch(*training)
    again = _prepared(precision)
    again[0].load_state(tmp_path / "a" / "last")
    assert _epoch(*again) == expected
    assert again[0]._accumulation.clock.step == 16


def _saved_by_main_only(folder: str) -> tuple[list[float], int]:
    training = _prepared()
    accelerator = training[0]
    _epoch(*training)
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    again = _prepared()
    again[0].load_state(folder)
    return [value for parameter in again[1].parameters() for value in parameter.flatten().tolist()], again[4].iteration


def test_the_main_process_alone_may_save_and_all_ranks_load(tmp_path: Path) -> None:
    first, second = run_ranks(2, _saved_by_main_only, str(tmp_path / "checkpoint_epoch_0"))
    assert first == second
    assert first[1] == 1
    alone = _prepared()
    alone[0].load_state(tmp_path / "checkpoint_epoch_0")
    assert [value for parameter in alone[1].parameters() for value in parameter.flatten().tolist()] == first[0]


def test_a_newer_checkpoint_replaces_the_older_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    training = _prepared()
    for _ in range(2):
        _epoch(*training)
        assert training[0].save_state(tmp_path / "last") == str(tmp_path / "last")
    assert os.listdir(tmp_path) == ["last"]
    assert sorted(os.listdir(tmp_path / "last")) == [
        *("model.json", "model.safetensors"),
        *("state.json", "state.safetensors"),
    ]
    again = _prepared()
    again[0].load_state(tmp_path / "last")
    assert again[4].iteration == 2


def test_a_checkpoint_that_cannot_be_finished_leaves_the_older_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "last", [], {"step": 1})
    with pytest.raises(TypeError, match=r"a checkpoint holds tensors.*; extra\.thing is object"):
        write_checkpoint(tmp_path / "last", [], {"extra": {"thing": object()}})
    assert os.listdir(tmp_path) == ["last"]
    assert (tmp_path / "last" / "state.json").read_text() == '{"dict": [["step", 1]]}'


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*nowhere: state.json is missing"):
        Accelerator().load_state(tmp_path / "nowhere")


def test_other_prepared_objects_are_refused_with_the_numbers(tmp_path: Path) -> None:
    _prepared()[0].save_state(tmp_path / "last")
    with pytest.raises(ValueError, match=r"holds 1 model\(s\), and 0 are prepared"):
        Accelerator().load_state(tmp_path / "last")
    accelerator = Accelerator()
    accelerator.prepare(Tied())
    with pytest.raises(ValueError, match="holds 1 optimizers, and 0 are prepared"):
        accelerator.load_state(tmp_path / "last")
