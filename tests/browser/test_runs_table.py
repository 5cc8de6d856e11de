"""The table of runs as a person sees it: in light, dark and narrow, for everybody to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(240)]

MAKES_RUNS = """
import math, random, time
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts
from nbaccel.base.events import Loss, Metric, Progress, Resumed, Checkpoint
from nbaccel.launching.run import Run, RunOrigin
from nbaccel.features.runs.runs import Runs
runs, noise = Runs(), random.Random(0)
for number in range(1, 6):
    history = History(2)
    first = 100 if number == 4 else 0
    for step in range(first, first + 200):
        for rank in (0, 1):
            value = 0.3 + 2.0 * math.exp(-step / (40 * number)) * (1 + 0.1 * noise.gauss(0, 1))
            history.feed(rank, step / 10, Loss(value, step))
            history.feed(rank, step / 10, Progress(step + 1, step % 100 + 1, 100, step // 100, 3, 32, first=first,
                                                   learning_rates=(3e-4,)))
        if step % 20 == 19:
            history.feed(0, step / 10, Metric({"val_loss": value + 0.1, "val_acc": step / 400}, step))
    history.feed(0, 10.0, Checkpoint(f"saves/{number}", 100, 0.1))
    if number == 4:
        history.feed(0, 0.0, Resumed("saves/3", 100))
    error = ValueError("expected 10 classes, got 11") if number == 2 else None
    flags = f"-n 2 --seed {number}" + (" --resume" if number == 4 else " --strategy fsdp" if number == 5 else "")
    run = Run([None], history, error, "fork", "", "", 20.5 * number, facts=RunFacts(f"Cell In[{number + 3}]"))
    run.origin = RunOrigin(flags, {"seed": str(number)}, number, time.time() - 3600 / number)
    runs.add(run.light())
runs"""

SHOWS_A_PANEL = """
from nbaccel.features.panel.panel import Panel
from IPython.display import HTML
HTML(Panel(runs[-1].history, RunFacts("Cell In[9]", "2 ranks on the CPU")).bundle(20.0)["text/html"])"""

MEASURES = """table => {
    const own = table.getBoundingClientRect();
    const seen = [...table.querySelectorAll('th, td')].filter(part => part.getBoundingClientRect().width > 0);
    return {
        columns: table.querySelectorAll('thead th').length,
        seen: [...table.querySelectorAll('thead th')].filter(part => part.getBoundingClientRect().width > 0).length,
        scrolls: table.scrollWidth > table.clientWidth,
        height: own.height,
        overlaps: seen.filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.outerHTML),
    };
}"""


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_everybody_can_read_the_table_and_the_panel(
    open_notebook: OpenNotebook, front_end: FrontEnd, is_dark: bool, tmp_path: Path
) -> None:
    notebook = open_notebook(MAKES_RUNS, "runs.compare(1, 4)", SHOWS_A_PANEL, front_end=front_end, is_dark=is_dark)
    notebook.run(0)
    table = notebook.output(0).locator("div.nbaccel.runs")
    expect(table).to_contain_text("done, 200 steps, goes on from run 3")
    expect(table.locator("tbody tr")).to_have_count(5)
    expect(table.locator("td.failed")).to_contain_text("ValueError: expected 10 classes, got 11")
    assert notebook.grave_findings("div.nbaccel.runs") == []
    background = table.evaluate("element => getComputedStyle(element).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if is_dark else "rgb(255, 255, 255)")
    notebook.shoot(tmp_path / "table.png", "div.nbaccel.runs")
    notebook.run(1)
    expect(notebook.output(1).locator("img")).to_have_count(1)
    notebook.run(2)
    panel = notebook.output(2).locator("div.nbaccel")
    expect(panel.locator("b.val")).to_contain_text("val_loss")
    expect(panel).to_contain_text("samples/s")
    expect(panel).to_contain_text("lr 0.0003")
    notebook.page.evaluate("() => document.querySelectorAll('div.nbaccel')[1].id = 'panel'")
    assert notebook.grave_findings("#panel") == []
    notebook.shoot(tmp_path / "panel.png", "#panel")


LONG_RUNS = """
trouble = ValueError("expected 10 classes, got 11: look at the last batch of the data set")
for title, flags in (
    ("sweep of train_one_fold_of_many (15 runs)", "-n 2 --sweep fold=0-4 learning_rate=1e-2,1e-3,3e-3"),
    ("map of embed_all_of_the_pages", "--checkpoint-every=100steps --checkpoint-dir=/kaggle/working/a"),
):
    run = Run([None], history, trouble, "fork", "", "", 20_500.0, facts=RunFacts(title))
    run.origin = RunOrigin(flags, {}, 382175, time.time())
    runs.add(run.light())
runs"""


def test_in_a_narrow_window_the_table_leaves_columns_out(open_notebook: OpenNotebook, tmp_path: Path) -> None:
    notebook = open_notebook(MAKES_RUNS.removesuffix("\nruns") + LONG_RUNS, SHOWS_A_PANEL, is_dark=True)
    notebook.run(0)
    notebook.run(1)
    table = notebook.output(0).locator("div.nbaccel.runs")
    seen = {}
    for width in (620, 1200, 1500):
        notebook.page.set_viewport_size({"width": width, "height": 900})
        notebook.page.wait_for_timeout(300)  # the page follows a new width within some frames
        seen[width] = table.evaluate(MEASURES)
        notebook.shoot(tmp_path / f"table-{width}.png", "div.nbaccel.runs")
    assert [each["seen"] for each in seen.values()] == [5, 8, 9]
    assert [each["overlaps"] for each in seen.values()] == [[], [], []]
    assert not seen[1200]["scrolls"]
    assert not seen[1500]["scrolls"]
    notebook.page.set_viewport_size({"width": 620, "height": 900})
    notebook.shoot(tmp_path / "page.png")
