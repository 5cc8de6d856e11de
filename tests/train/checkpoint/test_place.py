"""A checkpoint never takes anything with it that is not its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainings import Trained


@pytest.mark.parametrize("others", [["notes.txt"], ["epoch_0/model.safetensors", "run.log"], [".git/config"]])
def test_what_else_is_in_the_folder_stays_and_the_checkpoint_is_beside_it(tmp_path: Path, others: list[str]) -> None:
    for other in others:
        (tmp_path / "checkpoints" / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints" / other).write_text("mine")
    training = Trained.start()
    for _ in range(2):
        training.epoch()
        with pytest.warns(
            UserWarning, match=r"checkpoints holds other things too, so the checkpoint is .*/checkpoints/nb"
        ):
            place = training.accelerator.save_state(f"{tmp_path}/checkpoints/")
    assert place == str(tmp_path / "checkpoints" / "nbaccel_checkpoint")
    assert all((tmp_path / "checkpoints" / other).read_text() == "mine" for other in others)
    again = Trained.start()
    again.accelerator.load_state(tmp_path / "checkpoints")
    assert again.weights() == training.weights()


@pytest.mark.filterwarnings("ignore:.*holds other things too")
def test_checkpoints_inside_a_checkpoint_survive_its_next_save(tmp_path: Path) -> None:
    training = Trained.start()
    training.accelerator.save_state(tmp_path / "checkpoints")
    training.accelerator.save_state(tmp_path / "checkpoints" / "epoch_0")
    training.epoch()
    training.accelerator.save_state(tmp_path / "checkpoints")
    for name, step in (("checkpoints", 4), ("checkpoints/epoch_0", 0)):
        again = Trained.start()
        again.accelerator.load_state(tmp_path / name)
        assert again.accelerator._lifecycle.training().step == step


@pytest.mark.filterwarnings("ignore:.*holds other things too")
def test_the_working_folder_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text("{}")
    training = Trained.start()
    training.accelerator.save_state(".")
    training.accelerator.load_state(".")
    assert sorted(os.listdir(".")) == ["nbaccel_checkpoint", "train.ipynb"]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "disk")
    training = Trained.start()
    for _ in range(2):
        training.accelerator.save_state(tmp_path / "last")
    assert (tmp_path / "last").is_symlink()
    assert "manifest.json" in os.listdir(tmp_path / "disk")
    training.accelerator.load_state(tmp_path / "last")


def test_what_jupyter_leaves_in_a_folder_changes_nothing(tmp_path: Path) -> None:
    training = Trained.start()
    training.accelerator.save_state(tmp_path / "last")
    (tmp_path / "last" / ".ipynb_checkpoints").mkdir()
    assert training.accelerator.save_state(tmp_path / "last") == str(tmp_path / "last")


def test_a_damaged_checkpoint_is_replaced_in_its_own_place(tmp_path: Path) -> None:
    training = Trained.start()
    training.accelerator.save_state(tmp_path / "last")
    (tmp_path / "last" / "manifest.json").write_text("{")
    assert training.accelerator.save_state(tmp_path / "last") == str(tmp_path / "last")
    training.accelerator.load_state(tmp_path / "last")


def test_the_home_folder_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    training = Trained.start()
    assert training.accelerator.save_state("~/last") == str(tmp_path / "last")
    training.accelerator.load_state("~/last")
