"""A frozen base is on the disk once, and every checkpoint has it whole."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mounts import on_small_disk
from nbaccel import Accelerator
from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.model_weights import load_model
from nbaccel.utils import ProjectConfiguration

FROZEN = "model.frozen.safetensors"


class Adapted(torch.nn.Module):
    """A base that stays as it is, tied to itself and larger than all else, and a layer that is trained."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width)
        self.again = torch.nn.Linear(width, width)
        self.again.weight = self.base.weight
        self.requires_grad_(False)
        self.adapter = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.again(self.base(x)))  # type: ignore[no-any-return]


class Run:
    """Trains the adapter, and saves into numbered folders."""

    def __init__(self, folder: Path, width: int = 32) -> None:
        torch.manual_seed(len(os.listdir(folder)))  # another start for each
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(project_config=project)
        self.module = Adapted(width)
        optimizer = torch.optim.AdamW(self.module.adapter.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        self.inputs = torch.randn(4, width)

    def save(self, blocking: bool = True) -> Path:
        loss = self.model(self.inputs).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        folder = Path(self.accelerator.save_state(blocking=blocking))
        self.accelerator._checkpoints.writer.join()
        return folder

    def state(self) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in self.module.state_dict().items()}


def loaded(folder: Path) -> dict[str, Any]:
    run = Run(folder.parent)
    run.accelerator.load_state(folder)
    return run.state()


def file_number(folder: Path) -> int:
    return (folder / FROZEN).stat().st_ino


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_the_base_is_one_file_in_all_checkpoints_and_each_of_them_is_whole(tmp_path: Path, blocking: bool) -> None:
    run = Run(tmp_path)
    folders, states = [], []
    for _ in range(3):
        folders.append(run.save(blocking))
        states.append(run.state())
    assert len({file_number(folder) for folder in folders}) == 1
    assert len({(folder / "model.safetensors").stat().st_ino for folder in folders}) == 3
    assert (folders[0] / FROZEN).stat().st_size > 32 * 32 * 4
    assert (folders[0] / "model.safetensors").stat().st_size < 1000
    assert [loaded(folder) for folder in folders] == states
    shutil.rmtree(folders[0])
    shutil.copytree(folders[1], tmp_path / "copy")
    shutil.rmtree(folders[1])
    assert [loaded(tmp_path / "copy"), loaded(folders[2])] == states[1:]


def test_a_base_that_was_changed_behind_autograd_s_back_is_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = run.save()
    state_before = run.state()
    run.module.base.weight.data[0, 0] += 1  # no version counter sees this
    after = run.save()
    assert file_number(before) != file_number(after)
    assert loaded(after) == run.state()
    assert loaded(before) == state_before
    assert file_number(after) == file_number(run.save())


def test_a_layer_that_is_unfrozen_moves_to_the_trained_ones(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.module.requires_grad_(True)
    assert not (run.save() / FROZEN).exists()
    run.module.requires_grad_(False)
    everything = run.accelerator.save_state()
    assert loaded(Path(everything)) == run.state()


def test_a_damaged_base_is_found_and_the_next_checkpoint_has_a_good_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.save()
    with open(first / FROZEN, "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointCorrupt, match=r"model\.frozen\.safetensors is damaged: its checksum is"):
        loaded(first)
    second = run.save()
    assert file_number(first) != file_number(second)
    assert loaded(second) == run.state()


def test_the_base_of_the_checkpoint_that_was_loaded_is_used_on(tmp_path: Path) -> None:
    first = Run(tmp_path).save()
    run = Run(tmp_path)
    run.accelerator.load_state()
    assert file_number(run.save()) == file_number(first)


def test_where_links_do_not_work_each_checkpoint_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    run = Run(tmp_path)
    first, second = run.save(), run.save()
    assert file_number(first) != file_number(second)
    assert loaded(second) == run.state()


def test_one_name_keeps_its_base_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    last = run.accelerator.save_state(tmp_path / "last")
    number = file_number(Path(last))
    run.accelerator.save_state(tmp_path / "last")
    assert file_number(Path(last)) == number
    assert loaded(Path(last)) == run.state()


def test_the_model_file_and_the_frozen_one_are_a_model_together(tmp_path: Path) -> None:
    run = Run(tmp_path)
    model = Adapted()
    assert load_model(model, run.save()) == []
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == run.state()


def _save_often(folder: Path, width: int) -> int:
    run = Run(folder, width)
    return len([run.save() for _ in range(4)])


def test_a_disk_that_has_room_for_one_base_is_large_enough(tmp_path: Path) -> None:
    assert on_small_disk(tmp_path, 6 << 20, _save_often, tmp_path, 1024) == 4, "a base of 4 MB on a disk of 6"
