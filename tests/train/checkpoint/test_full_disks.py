"""Real disks that are full, or become read-only, under a training of two ranks: it goes on, and the past loads."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import pytest

from mounts import make_read_only, on_small_disk
from nbaccel.errors import CannotSave
from nbaccel.testing import run_ranks
from trainings import Trained

DISK_BYTES = 4 << 20


def _warned(training: Trained, folder: Path, blocking: bool) -> list[str]:
    """What one more epoch and its save warn of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training.epoch()
        training.accelerator.save_state(folder, blocking=blocking)
        training.accelerator._checkpoints.writer.join()
    return [str(warning.message) for warning in said]


def _train_through(folder: Path, trouble: str, blocking: bool) -> tuple[list[str], int, bool]:
    """On each rank: what was warned of, the steps that were done, and whether the checkpoint before still loads."""
    training = Trained.start(on_save_error="warn")
    training.epoch()
    saved = training.weights()
    training.accelerator.save_state(folder)
    training.accelerator.wait_for_everyone()
    if training.accelerator.is_main_process and trouble == "full":
        fill(folder.parent)
    elif training.accelerator.is_main_process:
        make_read_only(folder.parent)
    training.accelerator.wait_for_everyone()
    said = _warned(training, folder, blocking)
    training.epoch()
    steps = training.accelerator._lifecycle.training().step
    training.accelerator.load_state(folder)
    return said, steps, training.weights() == saved


def fill(disk: Path) -> None:
    try:
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
    except OSError:
        return


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize(("trouble", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
def test_training_goes_on_and_the_checkpoint_before_loads(
    tmp_path: Path, trouble: str, reason: str, blocking: bool
) -> None:
    per_rank = on_small_disk(tmp_path, DISK_BYTES, run_ranks, 2, _train_through, tmp_path / "last", trouble, blocking)
    for rank, (said, steps, is_as_before) in enumerate(per_rank):
        assert len(said) == 1, f"rank {rank} is warned once: {said}"
        assert reason in said[0]
        assert "goes on without this checkpoint" in said[0]
        assert (steps, is_as_before) == (6, True)


def _save_until_full(folder: Path) -> tuple[str, int, list[str]]:
    training = Trained.start()
    for number in itertools.count():
        training.epoch()
        try:
            training.accelerator.save_state(folder / str(number))
        except CannotSave as error:
            training.accelerator.load_state(folder / str(number - 1))
            return str(error), number, os.listdir(folder)
    raise AssertionError("the disk never fills")


def test_a_disk_that_fills_up_with_checkpoints_says_so_and_keeps_the_last_one(tmp_path: Path) -> None:
    said, number, names = on_small_disk(tmp_path, DISK_BYTES, _save_until_full, tmp_path)
    assert f"cannot write the checkpoint {tmp_path}/{number}: No space left on device. It needs " in said
    assert number > 3
    assert sorted(names, key=int) == [str(kept) for kept in range(number)], "no half folder stays"
