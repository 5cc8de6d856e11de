"""Rows of the benchmark compare what is right: a way that loses a step, or mixes up its answers, gets no numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import Row, measure
from benchmarks.rows import inference, recovery


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
