"""Time limits of a run: which is the earliest, and what becomes of a run whose program has set one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, launch
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.spec import ProgramLimit
from nbaccel.launching.processes.keep_running import TimeLimits


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(2)
    yield page
    page.close()


def test_the_earliest_limit_ends_a_run_whoever_set_it(page: ControlPage) -> None:
    limits = TimeLimits(page, began=100.0, launch_s=30.0)
    assert (limits.ends_at, limits.is_programs) == (130.0, False)
    page.limit_time(1, at=125.0, seconds=20.0)
    page.limit_time(1, at=127.0, seconds=1.0)  # of another Accelerator
    page.limit_time(0, at=131.0, seconds=30.0)
    assert limits.program == ProgramLimit(125.0, 20.0)
    assert (limits.ends_at, limits.is_programs) == (125.0, True)
    limits.excuse(2.0)
    assert limits.ends_at == 127.0


def test_a_run_without_limits_has_no_end(page: ControlPage) -> None:
    limits = TimeLimits(page, began=100.0)
    assert (limits.ends_at, limits.program, limits.is_programs) == (None, None, False)


def test_what_an_earlier_attempt_had_set_holds_and_a_new_run_has_none(page: ControlPage) -> None:
    page.limit_time(0, at=50.0, seconds=5.0)
    page.begin()
    assert TimeLimits(page, began=0.0).ends_at is None
    page.limit_time(0, at=50.0, seconds=40.0)  # the second attempt counts anew
    assert TimeLimits(page, 0.0, program=ProgramLimit(45.0, 40.0)).program == ProgramLimit(45.0, 40.0)


def prepared(folder: str, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """40 MB of a model, and data for as long as one likes."""
    accelerator = Accelerator(cpu=True, checkpoint_every=10**9, checkpoint_dir=folder, **options)
    model = torch.nn.Linear(1, 5 * 2**20)
    data = torch.utils.data.DataLoader(torch.ones(10**6, 1), 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def train_for_ever(folder: str) -> None:
    accelerator, model, optimizer, loader = prepared(folder, time_limit="11h30m")
    for step, x in enumerate(loader):
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            Accelerator(time_limit="0.5s")  # the earlier limit ends the run, whoever set it


@pytest.mark.slow
def test_the_limit_of_an_accelerator_ends_two_ranks_well_with_a_checkpoint_of_that_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SIGTERM does. That nothing is alive after `launch` is watched over by conftest."""
    run = launch(train_for_ever, 2, args=(str(tmp_path),), cpu=True)
    (steps,) = re.findall(
        r"stopped after (\d+) steps at the time limit of 0\.5 s; resume=True goes on from its checkpoint", run.stopped
    )
    assert int(steps) >= 3
    assert (run.error, run.values) == (None, [None, None])
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint_{steps}"]
    prepared(str(tmp_path), resume=True)
    said = capsys.readouterr().out
    assert run.stopped in said
    assert f"checkpoint_{steps}: step {steps}, epoch 1" in said


def wait_outside_of_steps(limit: str) -> None:
    Accelerator(time_limit=limit, checkpoint_every=1, checkpoint_dir="never")
    time.sleep(60)


@pytest.mark.slow
def test_a_program_that_makes_no_steps_is_interrupted_at_its_limit() -> None:
    run = launch(wait_outside_of_steps, 2, args=("0.1s",), cpu=True)
    assert run.stopped == "stopped at the time limit of 0.1 s; it has saved nothing new"
    assert run.seconds < 30


def evaluate_behind_two_steps(folder: str) -> None:
    accelerator, model, optimizer, loader = prepared(folder)
    for x in accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4, 1), 1)):
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    Accelerator(time_limit="0.1s")
    for _ in loader:
        pass


@pytest.mark.slow
def test_steps_are_those_that_were_trained_also_where_an_evaluation_is_stopped(tmp_path: Path) -> None:
    run = launch(evaluate_behind_two_steps, 2, args=(str(tmp_path),), cpu=True)
    assert run.stopped.startswith("stopped after 2 steps at the time limit of 0.1 s; resume=True goes on")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def evaluate_for_ever() -> None:
    for _ in Accelerator(cpu=True, time_limit=0.2).prepare(torch.utils.data.DataLoader(torch.ones(10**9))):
        pass


def test_a_function_in_this_process_ends_well_at_its_limit_too(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch(evaluate_for_ever, 1, cpu=True, start_method="inline")
    assert (run.error, run.value) == (None, None)
    assert run.stopped.startswith("stopped before step 0: the time limit of 0.2 s is over. Nothing was saved")
    assert run.stopped in capsys.readouterr().out


@pytest.mark.slow
def test_the_limit_of_the_launch_is_an_error_also_where_a_program_has_a_later_one() -> None:
    with pytest.raises(TimeoutError, match="the run was stopped after its time limit"):
        launch(wait_outside_of_steps, 2, args=("1h",), cpu=True, timeout_s=0.3)
