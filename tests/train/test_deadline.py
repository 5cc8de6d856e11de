"""A time limit that the program sets itself: what a process without a launcher makes of it, and what it refuses."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.events import TimeLimit, outlet
from nbaccel.errors import RunStopped
from nbaccel.testing import run_ranks


def steps_until_the_end(folder: Path, most: int = 1_000_000, **options: Any) -> int:
    """A training of one sample per step, until somebody ends it; how many steps it did if nobody does."""
    accelerator = Accelerator(cpu=True, checkpoint_dir=folder, **options)
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(most, 1), 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
    done = 0
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        done += 1
    return done


def test_a_process_that_is_alone_saves_leaves_at_a_step_and_says_what_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RunStopped) as stopped:
        steps_until_the_end(tmp_path, checkpoint_every=10**9, time_limit="0.2s")
    (step,) = re.findall(
        rf"stopped before step (\d+): the time limit of 0.2 s is over. The training is saved in {tmp_path}: "
        "resume=True goes on from there.",
        str(stopped.value),
    )
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint_{step}"]
    with pytest.raises(RunStopped, match=r"the time limit of 0\.2 s is over"):
        steps_until_the_end(tmp_path, checkpoint_every=10**9, time_limit=0.2, resume=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_limit_shorter_than_a_step_ends_the_run_at_the_next_one_and_what_is_not_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="Nothing was saved: with checkpoint_every a training is, also when it is st"):
        steps_until_the_end(tmp_path, time_limit=timedelta(microseconds=1))
    assert not list(tmp_path.iterdir())


def test_an_evaluation_ends_at_the_limit_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, time_limit=1e-6)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4, 1), 1))
    with pytest.raises(RunStopped, match="stopped before step 0"):
        list(loader)


def test_a_limit_that_is_not_over_changes_nothing(tmp_path: Path) -> None:
    assert steps_until_the_end(tmp_path, most=3, time_limit="11h30m") == 3


def test_a_training_with_a_limit_saves_itself_on_the_way_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, checkpoint_every="2steps", checkpoint_dir=tmp_path, time_limit="11h30m")
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(torch.ones(3, 1), 1)
    )
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def test_a_launcher_that_sees_to_it_is_told_at_once_and_again_at_the_end(tmp_path: Path) -> None:
    heard: list[TimeLimit] = []

    def launcher(event: Any) -> None:
        if isinstance(event, TimeLimit):
            heard.append(event)
            event.take()

    with outlet(launcher):
        assert steps_until_the_end(tmp_path, most=3, time_limit=1e-6) == 3
    assert [event.seconds for event in heard] == [1e-6] * 4
    assert len({event.at for event in heard}) == 1


def test_ranks_that_nobody_could_stop_at_the_same_step_are_refused_in_one_sentence() -> None:
    def rank() -> str:
        with pytest.raises(ValueError, match="time_limit") as refused:
            Accelerator(cpu=True, time_limit="1h")
        return str(refused.value)

    for said in run_ranks(2, rank):
        assert said.startswith("time_limit: nobody could stop these 2 ranks before the same step, since torchrun ")
        assert "start them from a notebook's cell or by the function nbaccel.launch" in said


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("soon", "a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got 'soon'"),
        (0, "a time is above 0 and finite, as in 11h30m, 90s or 5400 (seconds); got 0"),
        (float("nan"), "a time is above 0 and finite, as in 11h30m, 90s or 5400 (seconds); got nan"),
        (timedelta(-1), "a time is above 0 and finite, as in 11h30m, 90s or 5400 (seconds); got datetime.timedelta(da"),
    ],
)
def test_what_is_no_time_is_said_in_one_sentence(limit: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Accelerator(time_limit=limit)
