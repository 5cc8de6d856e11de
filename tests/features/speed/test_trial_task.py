"""A cell that is tried with a change: what its rank is told before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbaccel.features.check import dry_run_task
from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.trial_task import TrialTask
from nbaccel.launching.tasks.cell_code import CellSource

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.mark.parametrize("compiled", ["", "/a/folder"])
def test_trials_share_what_compilers_make(compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run_task, "go_offline", lambda: None)
    for name in CACHES:
        monkeypatch.setenv(name, "/the/users")  # put back afterwards
    change = SpeedChange(compiles=bool(compiled))
    source = CellSource("a = 1", "Cell In[1]")
    task = TrialTask(source, {}, folder=str(tmp_path), change=change, wanted_s=1.0, compiled=compiled)
    task.begin(0)
    assert [os.environ[name] for name in CACHES] == (
        ["/a/folder", "/a/folder/triton"] if compiled else ["/the/users", "/the/users"]
    )
