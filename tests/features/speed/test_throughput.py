"""The speed of a training: which steps are measured, what does not count, and how a trial ends."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from features.check.dry_run.fakes_of_devices import FakeDevice
from nbaccel.base.world import World
from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.speed.throughput import Throughput, TrialEnded
from nbaccel.testing import run_ranks


def training(steps: int, step_s: float = 0.0, rows: int = 4, evaluate_s: float = 0.0) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.Identity()(torch.ones(99, 2))  # has no parameters, so it is no model
        model(torch.ones(rows, 2)).mean().backward()
        time.sleep(step_s)
        optimizer.step()
        if evaluate_s:
            model.eval()
            time.sleep(evaluate_s)
            model.train()


def measured(wanted_s: float, *args: Any, **options: Any) -> tuple[Throughput, bool]:
    with tempfile.TemporaryDirectory() as folder:
        speed = Throughput(wanted_s, SharedDecisions(Path(folder), 0, 1))
        speed.begin()
        try:
            training(*args, **options)
        except TrialEnded:
            return speed, True
        finally:
            speed.end()
    return speed, False


def test_a_trial_ends_once_the_wanted_time_was_measured() -> None:
    speed, has_ended = measured(0.5, 10_000, 0.001)
    assert has_ended
    assert 20 <= speed.steps <= 500
    assert speed.seconds / speed.steps >= 0.001


def test_a_program_that_catches_everything_does_not_go_on() -> None:
    with tempfile.TemporaryDirectory() as folder:
        speed = Throughput(0.02, SharedDecisions(Path(folder), 0, 1))
        speed.begin()
        ended = 0
        for _ in range(20):
            try:
                training(10_000)
            except:  # noqa: E722
                ended += 1
                steps = speed.steps
        speed.end()
    assert ended == 20
    assert speed.steps == steps < 10_000


def test_slow_steps_end_a_trial_with_fewer_of_them() -> None:
    speed, has_ended = measured(0.02, 100, 0.01)
    assert has_ended
    assert 1 <= speed.steps < 20


def test_a_program_that_ends_earlier_is_measured_all_the_same() -> None:
    speed, has_ended = measured(60.0, 10)
    assert not has_ended
    assert speed.steps == 6  # the first four are warm-up


def test_samples_are_those_of_the_model() -> None:
    speed, _ = measured(60.0, 10, rows=7)
    assert speed.samples_per_step == 7.0


def test_losses_are_those_of_the_first_backwards() -> None:
    speed, _ = measured(60.0, 10)
    assert len(speed.losses) == 5
    assert speed.losses[1] < speed.losses[0]


def test_a_loss_that_a_scaler_has_scaled_is_the_loss() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.ones(1, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        speed = Throughput(60.0, SharedDecisions(Path(folder), 0, 1))
        speed.begin()
        scaler.scale((weight * 3).sum()).backward()
        torch.amp.GradScaler.scale(scaler, (weight * 4).sum()).backward()
        (weight * 5).sum().backward()
        speed.end()
    assert speed.losses == [3.0, 4.0, 5.0]


def test_work_that_the_device_has_left_counts_for_the_step_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", device)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tempfile.TemporaryDirectory() as folder:
        speed = Throughput(1000.0, SharedDecisions(Path(folder), 0, 1))
        speed.begin()
        for number in range(12):
            model(torch.ones(1, 2)).mean().backward()
            device.host(1)
            device.give(10)
            optimizer.step()
            if number in (5, 7):
                model.eval()
                device.give(500)
                model.train()
        speed.end()
    assert speed.steps == 6, "of the eight after the warm-up, two come after an evaluation"
    assert 54 <= speed.seconds + device.until - device.now <= 64, "those of six steps: no evaluation is in them"


def test_evaluations_do_not_count() -> None:
    speed, _ = measured(60.0, 8, evaluate_s=0.01)
    assert speed.steps == 0  # one follows each step
    assert speed.seconds < 0.001


def test_afterwards_torch_is_as_before() -> None:
    before = nn.Module.eval, torch.autograd.backward
    measured(60.0, 3)
    assert (nn.Module.eval, torch.autograd.backward) == before


def end_of_rank(folder: Path) -> int:
    rank = World.from_env().rank
    speed = Throughput(0.02, SharedDecisions(folder, rank, 2))
    speed.begin()
    with pytest.raises(TrialEnded):
        training(10_000, 0.001 * (1 + rank))
    speed.end()
    return speed.steps


def test_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, end_of_rank, tmp_path)
    assert first == second
