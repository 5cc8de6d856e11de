"""What `--check` of an export says of the losses that it compares, and of those that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel.base.events import Loss
from nbaccel.display.history import History
from nbaccel.features.export import first_steps
from nbaccel.launching.run import Run

PATH = Path("train.py")


def history_of(losses: list[float]) -> History:
    history = History(1)
    for step, loss in enumerate(losses):
        history.feed(0, 0.0, Loss(loss, step))
    return history


def run_of(losses: list[float]) -> Run:
    return Run([None], history_of(losses), None, "fork", "", "", seconds=1.0)


def said(monkeypatch: pytest.MonkeyPatch, theirs: Run | None, ours: list[float], failed: str = "") -> str:
    monkeypatch.setattr(first_steps, "losses_of_script", lambda *_: (history_of(ours), failed))
    return first_steps.compared(theirs, PATH, [])


def test_losses_of_the_first_steps_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = run_of([3.0, 2.0, 1.0, 0.5])
    assert said(monkeypatch, theirs, [3.0, 2.0, 1.0]).startswith("--check: equal: the losses of the first 3 steps")
    assert said(monkeypatch, theirs, [3.0, 2.1, 1.0]) == (
        "--check: NOT equal: the loss of step 1 was 2 in the notebook, and is 2.1 in the script."
    )


def test_the_means_of_a_long_run_are_compared_with_means_of_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = run_of([float(step % 4) for step in range(2000)])
    assert theirs.history.curve("loss").step[1] == 4
    assert "equal: the losses of the first 4 steps" in said(monkeypatch, theirs, [0.0, 1.0, 2.0, 3.0])
    assert "NOT equal: the loss of step 0 was 1.5" in said(monkeypatch, theirs, [0.0, 1.0, 2.0, 4.0])


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = run_of([3.0, 2.0, 1.0])
    assert "the notebook has no losses of that cell to compare with" in said(monkeypatch, None, [])
    assert "the script failed, which the cell did not:\nValueError: x" in said(monkeypatch, theirs, [], "ValueError: x")
    assert "the script ran, and reported no loss in its first" in said(monkeypatch, theirs, [])
    assert "means of 256 steps, too many to run again" in said(monkeypatch, run_of([0.5] * 100_000), [])
