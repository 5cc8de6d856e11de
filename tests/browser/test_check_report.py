"""The report of a check as a person sees it: in light, dark and narrow, for everybody to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(240)]

SHOWS = """
from IPython.display import display
from nbaccel.features.check.report import CheckReport, ReportLine
report = CheckReport([
    ReportLine("red", "line 12, all 2 ranks: NameError: name 'histroy' is not defined. Did you mean: 'history'?"),
    ReportLine("red", "the whole run takes 13 h 10 min to 14 h 40 min, and a session of Kaggle ends it after 12 h: "
                      "fewer epochs, or --checkpoint-every 10min and --resume in the next session"),
    ReportLine("yellow", "not reached: lines 14-16"),
    ReportLine("yellow", "loader takes 62% of each batch: try another num_workers, or a cheaper data set"),
    ReportLine("ok", "memory at the longest batch (size 512): 11.2 GB of 15.0 GB on the device"),
    ReportLine("ok", "a batch takes 310 ms: loader 62%, host to device 2%, forward 11%, backward 21%, optimizer 4%"),
    ReportLine("ok", "a save to /kaggle/working/model_1.pt has 440.1 MB and takes 0.9 s, 20 times in the whole run"),
])
display(report.bundle(), raw=True)"""


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_everybody_can_read_the_report(
    open_notebook: OpenNotebook, front_end: FrontEnd, is_dark: bool, tmp_path: Path
) -> None:
    notebook = open_notebook(SHOWS, front_end=front_end, is_dark=is_dark)
    notebook.run(0)
    report = notebook.output(0).locator("div.nbaccel.check")
    expect(report).to_contain_text("not reached: lines 14-16")
    assert notebook.grave_findings("div.nbaccel.check") == []
    background = report.evaluate("element => getComputedStyle(element).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if is_dark else "rgb(255, 255, 255)")
    colours = report.evaluate("element => [...element.querySelectorAll('b')].map(b => getComputedStyle(b).color)")
    assert len(set(colours)) == 3
    notebook.shoot(tmp_path / "report.png", "div.nbaccel.check")


def test_in_a_narrow_window_the_lines_break(open_notebook: OpenNotebook, tmp_path: Path) -> None:
    notebook = open_notebook(SHOWS, is_dark=True)
    notebook.run(0)
    notebook.page.set_viewport_size({"width": 620, "height": 900})
    report = notebook.output(0).locator("div.nbaccel.check")
    assert report.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    notebook.shoot(tmp_path / "narrow.png", "div.nbaccel.check")
