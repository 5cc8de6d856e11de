from __future__ import annotations

import json

import pytest

from display.runs import a_run
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.features.panel.comparison import RunComparison, draw_runs
from nbaccel.features.panel.figure import picture
from nbaccel.features.panel.panel import Panel

DONE = RunState("done", "done in 10 s, 100 steps")


def sweep(runs: int) -> RunComparison:
    comparison = RunComparison()
    for at in range(runs):
        comparison.finish(Panel(a_run(2, 100), RunFacts(f"train(lr={at})")), 10.0, DONE)
    return comparison


def words(comparison: RunComparison) -> list[str]:
    return [text.get_text() for text in draw_runs(comparison).axes[1].texts]


def test_every_run_has_a_curve_and_a_line_of_words() -> None:
    comparison = sweep(2)
    comparison.finish(Panel(a_run(1, 50), RunFacts("of $5 and $x^")), 3.0, RunState("failed", "failed after 3 s"))
    figure = draw_runs(comparison)
    assert len(figure.axes[0].lines) == 3
    assert (
        len({(line.get_color(), line.get_linestyle(), str(line._dash_pattern)) for line in figure.axes[0].lines}) == 3
    )  # type: ignore[attr-defined]
    assert figure.get_suptitle() == "3 runs: 2 done, 1 failed"
    shown = words(comparison)
    assert shown[:3] == ["1. train(lr=0)", f"loss {comparison.rows[0].latest:#.4g}", "10 s"]
    assert shown[6] == "3. of $5 and $x^"
    assert shown[7].startswith("failed, loss ")
    assert picture(figure, "words").png


@pytest.mark.full
def test_of_very_many_runs_the_first_and_the_latest_are_named() -> None:
    shown = words(sweep(300))
    assert [text for text in shown if "." in text and "train" in text][7:9] == ["8. train(lr=7)", "293. train(lr=292)"]
    assert "… 284 more runs" in shown


@pytest.mark.parametrize("runs", [3, 40, 300])
def test_the_picture_of_a_sweep_and_its_words_take_less_than_200_kb(runs: int) -> None:
    comparison = sweep(runs)
    assert len(json.dumps(picture(draw_runs(comparison), comparison.bundle()["text/plain"]).bundle())) < 200_000


def test_runs_without_numbers_are_named_all_the_same() -> None:
    comparison = sweep(1)
    comparison.finish(Panel(History(1), RunFacts("nothing")), 0.2, DONE)
    assert words(comparison)[3:] == ["2. nothing", "", "0.2 s"]
