"""Checkpoints that are written while the training goes on, and those that cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.task_end import finish_task, forget_task
from nbaccel.errors import CannotSave
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.writer import Writer
from nbaccel.utils import ProjectConfiguration
from trainings import Tally, Trained


def weights_in(folder: Path) -> list[float]:
    training = Trained.start()
    training.accelerator.load_state(folder)
    return training.weights()


def save_and_wait(
    training: Trained, folder: Path, blocking: bool, meanwhile: Callable[[], object] = lambda: None
) -> None:
    training.accelerator.save_state(folder, blocking=blocking)
    meanwhile()
    training.accelerator._checkpoints.writer.join()


def test_a_save_in_the_background_holds_the_moment_of_the_call(tmp_path: Path) -> None:
    training = Trained.start()
    training.epoch()
    saved = training.weights()
    training.accelerator.save_state(tmp_path / "last", blocking=False)
    training.epoch()
    assert training.weights() != saved
    training.accelerator.end_training()
    assert weights_in(tmp_path / "last") == saved


def test_the_next_save_waits_for_the_one_before_and_uses_its_memory_again(tmp_path: Path) -> None:
    training = Trained.start()
    accelerator = training.accelerator
    training.epoch()
    accelerator.save_state(tmp_path / "a", blocking=False)
    sizes = {accelerator._checkpoints.staging.nbytes}
    at_b = training.epoch() and training.weights()
    accelerator.save_state(tmp_path / "b", blocking=False)
    assert Manifest.read(tmp_path / "a").step == 4
    sizes.add(accelerator._checkpoints.staging.nbytes)
    assert len(sizes) == 1
    accelerator.load_state(tmp_path / "b")
    assert training.weights() == at_b


def _save_on_every_rank(folder: str) -> None:
    training = Trained.start()
    training.epoch()
    training.accelerator.save_state(folder, blocking=False)
    training.accelerator.end_training()


def test_every_rank_adds_its_random_numbers_to_a_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(2, _save_on_every_rank, str(tmp_path / "last"))
    assert sorted(path.name for path in (tmp_path / "last").glob("generators_*")) == [
        "generators_0.json",
        "generators_1.json",
    ]


def test_what_a_save_in_the_background_met_is_raised_by_whoever_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Trained.start()
    _fill_the_disk(monkeypatch)
    training.accelerator.save_state(tmp_path / "last", blocking=False)
    with pytest.raises(CannotSave, match="No space left on device"):
        training.accelerator.load_state(tmp_path / "last")


@pytest.mark.parametrize("blocking", [True, False])
def test_with_on_save_error_warn_the_training_goes_on_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    training = Trained.start(on_save_error="warn")
    training.epoch()
    saved = training.weights()
    training.accelerator.save_state(tmp_path / "last")
    training.epoch()
    with monkeypatch.context() as patch:
        _fill_the_disk(patch)
        with pytest.warns(UserWarning, match=r"No space left on device.*goes on without this checkpoint"):
            save_and_wait(training, tmp_path / "last", blocking)
    training.epoch()
    assert weights_in(tmp_path / "last") == saved


def test_on_save_error_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="on_save_error must be 'raise' or 'warn', got 'ignore'"):
        Accelerator(on_save_error="ignore")


def test_hooks_and_a_save_in_the_background_exclude_each_other(tmp_path: Path) -> None:
    training = Trained.start()
    training.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(ValueError, match="leave blocking=True"):
        training.accelerator.save_state(tmp_path / "last", blocking=False)


def test_numbered_checkpoints_beyond_the_limit_go_after_the_background_save_is_complete(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    training = Trained.start(project_config=project)
    for _ in range(4):
        training.epoch()
        training.accelerator.save_state(blocking=False)
    training.accelerator.end_training()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]


def test_a_pickled_part_is_of_the_moment_of_the_call_too(tmp_path: Path) -> None:
    training = Trained.start()
    tally = Tally(values=[1], own=torch.Size([1]), odd=range(3))
    training.accelerator.register_for_checkpointing(tally)
    with pytest.warns(UserWarning, match="saved as a pickle"):
        save_and_wait(training, tmp_path / "last", False, lambda: tally.state["values"].append(2))
    other = Trained.start()
    loaded = Tally()
    other.accelerator.register_for_checkpointing(loaded)
    other.accelerator.load_state(tmp_path / "last", trust=True)
    assert loaded.state["values"] == [1]


_ENDS_BEFORE_ITS_SAVE = """
import sys, threading, time
import torch
from nbaccel import Accelerator
from nbaccel.train.checkpoint.manifest import Manifest

whole = Manifest.seal

def seal(*args, **options):
    begun.set()
    time.sleep(0.2)  # the program is at its end meanwhile
    if sys.argv[2] == "fails":
        raise OSError(28, "No space left on device")
    return whole(*args, **options)

begun, Manifest.seal = threading.Event(), seal
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(sys.argv[1], blocking=False)
begun.wait()
"""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("fate", ["is written", "fails"])
def test_a_process_that_ends_waits_for_its_last_checkpoint_and_says_what_that_met(tmp_path: Path, fate: str) -> None:
    program = [sys.executable, "-c", _ENDS_BEFORE_ITS_SAVE, str(tmp_path / "last"), fate]
    ended = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)
    if fate == "fails":
        assert "the last checkpoint of this process was not written: cannot write the checkpoint" in ended.stderr
        assert not (tmp_path / "last").exists()
    else:
        assert ended.stderr == ""
        Manifest.read(tmp_path / "last").verify(tmp_path / "last")


def test_work_is_not_begun_when_the_work_before_failed() -> None:
    writer = Writer()
    done: list[int] = []

    def fail() -> None:
        raise KeyError("first")

    writer.start(fail)
    with pytest.raises(KeyError, match="first"):
        writer.start(lambda: done.append(2))
    writer.start(lambda: done.append(3))
    writer.join()
    assert done == [3]


def _fill_the_disk(patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", full)


def test_the_results_of_each_task_wait_for_a_save_that_is_under_way() -> None:
    writer, written = Writer(), list[int]()
    for task in range(2):
        may_end = threading.Event()
        writer.start(lambda: may_end.wait(10) and written.append(task))  # noqa: B023  # it ends in this round
        threading.Timer(0.1, may_end.set).start()
        finish_task()
        assert written == [*range(task + 1)]


def test_the_results_of_a_task_come_although_its_last_save_failed() -> None:
    writer = Writer()

    def fails() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.start(fails)
    with pytest.warns(UserWarning, match="was not written.*No space left"):
        finish_task()


def test_a_task_that_failed_waits_for_a_save_of_its_own() -> None:
    writer, may_end, written = Writer(), threading.Event(), list[str]()
    writer.start(lambda: may_end.wait(10) and written.append("first"))
    threading.Timer(0.1, may_end.set).start()
    forget_task()
    assert written == ["first"]


def test_a_task_that_failed_does_not_wait_for_a_save_of_all_ranks_and_the_next_one_does_again() -> None:
    writer, may_end, written = Writer(), threading.Event(), list[str]()
    writer.start(lambda: may_end.wait(10) and written.append("first"), is_lone=False)
    forget_task()
    assert written == []
    may_end.set()
    writer.start(lambda: written.append("second"), is_lone=False)
    finish_task()
    assert written == ["first", "second"]
