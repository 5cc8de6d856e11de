from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from display.runs import a_run
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.features.panel.comparison import RunComparison
from nbaccel.features.panel.panel import Panel

DONE = RunState("done", "done in 10 s, 100 steps")


def panel(title: str) -> Panel:
    return Panel(a_run(2, 100), RunFacts(title))


def test_one_run_looks_as_if_there_was_no_comparison() -> None:
    assert RunComparison().bundle(panel("a"), 1.0) == panel("a").bundle(1.0)


def test_finished_runs_are_rows_above_the_one_that_goes_on() -> None:
    comparison = RunComparison()
    comparison.finish(panel("train(lr=0.1)"), 10.0, DONE)
    comparison.finish(panel("train(lr=<1>)"), 10.0, RunState("failed", "failed in 0:10: rank 0, ValueError"))
    bundle = comparison.bundle(panel("train(lr=3)"), 2.0)
    assert [line.split(",")[0] for line in bundle["text/plain"].splitlines()[:3]] == [
        "1. train(lr=0.1): done in 10 s",
        "2. train(lr=<1>): failed in 0:10: rank 0",
        "train(lr=3): running",
    ]
    table, current = ElementTree.fromstring(f"<div>{bundle['text/html'].partition('</style>')[2]}</div>")
    rows = [" ".join(" ".join(row.itertext()).split()) for row in table.findall(".//tbody/tr")]
    assert rows[0].startswith("1 ✓ done train(lr=0.1) ")
    assert rows[1].startswith("2 ✕ failed train(lr=<1>) ")
    assert "loss" in rows[0]
    assert [svg.attrib["aria-label"].split()[:2] for svg in table.iter("svg")] == [["loss", "from"]] * 2
    assert current.attrib["aria-label"] == "train(lr=3)"


def test_a_run_without_numbers_is_a_row_too() -> None:
    comparison = RunComparison()
    comparison.finish(Panel(History(1), RunFacts("a")), 0.1, DONE)
    assert comparison.bundle()["text/plain"] == "1. a: done in 10 s, 100 steps"


@pytest.mark.full
def test_a_sweep_of_many_runs_is_saved_in_less_than_200_kb() -> None:
    comparison = RunComparison()
    for lr in range(300):
        comparison.finish(panel(f"train(lr={lr})"), 10.0, DONE)
    bundle = comparison.bundle()
    assert sum(map(len, bundle.values())) < 200_000
    assert bundle["text/plain"].splitlines()[50] == "… 200 more runs"
    assert "… 200 more runs" in bundle["text/html"]
    assert bundle["text/plain"].splitlines()[-1].startswith("300. train(lr=299): done")
