"""Damage to any file of the newest checkpoint, wherever in it, is found, and an older checkpoint is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nbaccel.errors import CheckpointCorrupt
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.utils import ProjectConfiguration
from trainings import Trained


def project(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True)


def _save_twice(folder: Path) -> None:
    training = Trained.start(project_config=project(folder))
    for _ in range(2):
        training.epoch()
        training.accelerator.save_state()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks, of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(2, _save_twice, folder)
    return folder


def flip_a_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


DAMAGES = (flip_a_bit, truncate, remove)


def chosen_step(folder: Path) -> tuple[int, list[str]]:
    choice = CheckpointDirectory(project(folder)).choose(None)
    assert choice.manifest is not None
    return choice.manifest.step, choice.passed_over


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_anywhere_in_the_newest_checkpoint_is_named_and_the_older_one_is_used(
    pristine: Path, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    names = sorted(path.name for path in (pristine / "checkpoints" / "checkpoint_1").iterdir())
    listed = [name for name in names if not name.startswith("generators")]
    assert len(listed) >= 7
    for number, name in enumerate(listed * 5):
        folder = tmp_path / str(number)
        shutil.copytree(pristine, folder)
        damage(folder / "checkpoints" / "checkpoint_1" / name, random.Random(number))
        step, (passed_over,) = chosen_step(folder)
        assert step == 2
        assert f"checkpoint_1/{name} is " in passed_over


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_rank_s_damaged_random_states_are_derived_and_said_and_nothing_else_is_lost(
    pristine: Path, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    shutil.copytree(pristine, tmp_path / "copy")
    damage(tmp_path / "copy" / "checkpoints" / "checkpoint_1" / "generators_0.json", random.Random(1))
    again = Trained.start(project_config=project(tmp_path / "copy"))
    with pytest.warns(UserWarning, match=r"rank\(s\) 0 of 1 begin new .*generators_0.json is"):
        again.accelerator.load_state()
    assert again.accelerator._lifecycle.training().step == 4


def test_when_both_are_damaged_no_weight_is_loaded(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine, tmp_path / "copy")
    for number in range(2):
        flip_a_bit(tmp_path / "copy" / "checkpoints" / f"checkpoint_{number}" / "model.safetensors", random.Random(2))
    again = Trained.start(project_config=project(tmp_path / "copy"))
    before = again.weights()
    with pytest.raises(CheckpointCorrupt, match=r"none of the 2 checkpoint\(s\) in .*checkpoints is whole"):
        again.accelerator.load_state()
    assert again.weights() == before
