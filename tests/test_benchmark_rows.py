"""Rows of the benchmark compare what is right: a way that loses a step, or mixes up its answers, gets no numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import alternatives, checkpoints, history, orphans
from benchmarks.harness import Row, measure
from benchmarks.kernels import LAUNCHERS, PLAIN
from benchmarks.rows import inference, recovery, saves

pytestmark = pytest.mark.full  # they test the benchmark, which is run by hand


@pytest.fixture(autouse=True)
def _disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that write to a disk make the repository's build folder, where there is none yet."""
    monkeypatch.setattr(saves, "_DISK", tmp_path)


def _forgetful(scene: recovery._Scene) -> torch.Tensor:
    """A loop that catches the failure and goes on with the next batch."""
    model, optimizer = recovery._things()
    rank, _ = scene.enter()
    for step in range(recovery._STEPS):
        try:
            scene.fail(step, rank)
        except torch.OutOfMemoryError:
            continue
        recovery._loss(model(recovery._sample(step).expand(8, -1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        scene.clock.end(rank)
    return recovery._parameters(model)


@pytest.mark.slow
def test_a_recovery_that_loses_a_step_is_refused_and_ours_counts_from_the_failure_to_the_next_step() -> None:
    ways = {"raw": recovery._raw, "forgetful": _forgetful, "the ranks": recovery._by_the_launcher}
    makes = {name: (lambda way=way: recovery._bout(way, 1)) for name, way in ways.items()}  # type: ignore[misc]
    measured = measure(Row("recovery", makes, turns=1, judged="wall"), rounds=1)
    assert list(measured.refused) == ["forgetful"]
    assert "WRONG RESULT" in measured.refused["forgetful"]
    (raw,), (ranks,) = measured.samples["raw"], measured.samples["the ranks"]
    assert 0 < raw.wall_s < ranks.wall_s


@pytest.mark.slow
def test_a_checkpoint_without_the_optimizer_is_refused_and_ours_are_whole() -> None:
    def half(megabytes: int) -> saves.Store:
        whole = saves.available()["raw"](megabytes)
        path = whole.folder / "weights.pt"
        return replace(
            whole,
            save=lambda: torch.save(whole.model.state_dict(), path),
            load=lambda: whole.model.load_state_dict(torch.load(path)),
        )

    ways = {name: make for name, make in saves.available().items() if name in ("raw", saves.OURS, saves.OURS_BEHIND)}
    makes = {name: partial(saves._saving, make, 1) for name, make in {**ways, "half": half}.items()}
    measured = measure(Row("save", makes, turns=1), rounds=1)
    assert list(measured.refused) == ["half"]


@pytest.mark.slow
def test_what_a_checkpoint_takes_is_told_in_units_of_its_state() -> None:
    on_disk, saving, loading = checkpoints._measured("raw", saves.available()["raw"], 20)
    assert 0.9 < on_disk < 1.1
    assert saving >= 0
    assert loading >= 0


@pytest.mark.slow
def test_answers_in_another_order_than_the_texts_are_refused() -> None:
    def unrestored(toolkit: inference._Toolkit, model: inference._Model, texts: list[inference.Text]) -> list[float]:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        return inference._as_they_come(toolkit, model, [texts[index] for index in order])

    texts = inference._uneven()[:16]
    ways = {
        "raw": inference._as_they_come,
        "unrestored": unrestored,
        "by length": inference._by_length,
    }
    makes = {
        name: (lambda way=way: inference._bout(inference._raw, way, texts))  # type: ignore[misc]
        for name, way in ways.items()
    }
    measured = measure(Row("inference", makes, turns=1), rounds=1)
    assert list(measured.refused) == ["unrestored"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_outlives_a_killed_kernel_is_counted_and_ours_leave_nothing() -> None:
    assert orphans.left_by(LAUNCHERS[PLAIN]) == 1
    assert orphans.left_by(LAUNCHERS["nbaccel, fork"]) == 0


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_way_to_train_from_a_cell_that_leaves_no_trained_model_gets_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = alternatives.WAYS["the loop in the kernel, one process"]
    assert [len(taken) for taken in alternatives.measure({"loop": loop}, turns=1).values()] == [1]
    with pytest.raises(alternatives.NotTrained, match="nothing: 0"):
        alternatives.measure({"nothing": alternatives.Way("", "pass")}, turns=1)


def test_what_grows_with_the_steps_misses_its_target() -> None:
    states = [history.State(10**power, 2.0, 1.0, 8.0 + power, 0.1) for power in (3, 6)]
    findings = [finding for kind in history.kinds(2) for finding in kind.findings(2, states)]
    assert [finding.what for finding in findings if not finding.holds] == ["bytes of a frame, ranks: 2"]
    assert findings[-3].verdict == "FALLS SHORT of 1.1"
