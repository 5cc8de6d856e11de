"""`--bg` in a browser: the run's output stays in its cell while others run, and its button works between them."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd
from browser.test_panel import LOADS, TRAINS

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

ENDLESS = TRAINS.format(steps=100_000).replace("-n 2", "-n 2 --bg --out step") + "\n    print('at', step)"


@pytest.mark.full
def test_the_run_goes_on_in_its_cell_and_a_click_ends_it(open_notebook: OpenNotebook, front_end: FrontEnd) -> None:
    notebook = open_notebook(LOADS, ENDLESS, "print('another cell')", "%accelerate wait", front_end=front_end)
    notebook.run(0)
    notebook.run(1)
    button = notebook.cell(1).get_by_role("button", name="Stop after this step")
    button.wait_for(timeout=40_000)
    assert notebook.run(2) == "another cell"
    panel = notebook.cell(1).locator("div.nbaccel")
    before = panel.inner_text()
    expect(panel).not_to_have_text(before, use_inner_text=True)
    expect(notebook.cell(1)).to_contain_text("at ")
    button.click()
    expect(notebook.output(1).locator("img")).to_have_count(1)
    expect(notebook.cell(1)).to_contain_text("%accelerate wait brings step, its error")
    assert "KeyboardInterrupt: the run was interrupted" in notebook.run(3)
    expect(notebook.output(2)).to_have_count(1)
