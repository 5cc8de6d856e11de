"""A rank that saves itself, after its kernel has died: it is stopped before a step, and has time for a checkpoint."""

from __future__ import annotations

import itertools
import os
import subprocess
import time

import pytest

from nbaccel.base.events import SavesItself, StepEntered
from nbaccel.errors import RunStopped
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import ControlPage, StepGate
from nbaccel.launching.rank import lifetime
from nbaccel.launching.rank.lifetime import DeathWatch, SaveGrace
from nbaccel.testing import run_ranks


def _steps_until_it_is_stopped() -> int:
    kernel = subprocess.Popen(["sleep", "60"])
    page, (_here, channel) = ControlPage.create(1), Channel.pair()
    watch, gate = DeathWatch(os.pidfd_open(kernel.pid), channel.fileno()), StepGate(page, 0)
    watch.start()
    SaveGrace(page, 0, watch)(SavesItself())
    gate(StepEntered(0))
    kernel.kill()
    kernel.wait()
    for step in itertools.count(1):
        try:
            gate(StepEntered(step))
        except RunStopped:
            return step
        time.sleep(0.01)
    raise AssertionError


def test_a_rank_alone_that_saves_itself_is_stopped_when_its_kernel_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "SAVE_GRACE_S", 5.0)
    (steps,) = run_ranks(1, _steps_until_it_is_stopped)
    assert steps >= 1
