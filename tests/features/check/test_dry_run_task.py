"""A cell that is tried in a rank: what ends it, and what is recorded of its end."""

from __future__ import annotations

import builtins
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.features.check import dry_run_task
from nbaccel.features.check.dry_run import rank_run
from nbaccel.features.check.dry_run.rank_records import read_records
from nbaccel.features.check.dry_run.rewriting import LOG, REACHED
from nbaccel.features.check.dry_run_task import DryRunTask
from nbaccel.launching.tasks.cell_code import CellSource


def no_parts(*_: Any) -> Any:
    """Cut no loaders, and measure nothing."""
    cuts = SimpleNamespace(part=nullcontext)
    return SimpleNamespace(cuts=cuts, begin=lambda: None, end=lambda: None)


def test_an_error_of_the_device_that_no_line_waits_for_is_one_of_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a run meets it when its results are read."""

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for name in (LOG, REACHED):
        monkeypatch.setattr(builtins, name, None, raising=False)  # put back afterwards
    monkeypatch.setattr(rank_run, "rewrite_functions", lambda number: [])  # those of this process stay as they are
    monkeypatch.setattr(dry_run_task, "go_offline", lambda: None)
    monkeypatch.setattr(dry_run_task, "wait_for_device", fail)
    task = DryRunTask(
        CellSource("a = 1", "Cell In[1]"), {}, folder=str(tmp_path), make_parts=f"{__name__}:{no_parts.__name__}"
    )
    task.begin(0)
    with pytest.raises(RuntimeError, match="device-side assert"):
        task.run()
    (end,) = [record for record in read_records(tmp_path, 0) if record["kind"] == "end"]
    assert (end["error"], end["reached"]) == ("RuntimeError", [1])
