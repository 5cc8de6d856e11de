"""The panel as a person sees it: it moves while the cell works, stands still on the page, and can be read by all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd
from environments import Environment

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(120)]

LOADS = "%load_ext nbaccel\nimport torch, torch._dynamo"

TRAINS = """%%accelerate --cpu -n 2
import time, torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(4000, 8), torch.arange(4000) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({{"acc": 0.5}})
    time.sleep(0.05)
    if step == {steps}:  # the same one on both ranks
        break
"""

WATCHES = """() => {
    const seen = window.seen = {frames: new Set(), heights: new Set(), empty: 0};
    const area = document.querySelectorAll('.jp-Notebook .jp-Cell')[1];
    let has_begun = false;
    const look = () => {
        const panel = area.querySelector('div.nbaccel');
        if (panel) {
            has_begun = true;
            seen.frames.add(panel.textContent);
            seen.heights.add(panel.getBoundingClientRect().height);
        } else if (has_begun && !area.querySelector('img')) seen.empty += 1;
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""


KEEPS_A_COPY = """() => {
    const output = document.querySelector('div.nbaccel').closest('.jp-OutputArea-output');
    const still = output.cloneNode(true);
    still.id = 'still';
    output.closest('.jp-OutputArea').append(still);
}"""
"""The panel itself is replaced twice a second."""

FITS = """panel => [...panel.querySelectorAll('svg, table, figure')].every(
    part => part.getBoundingClientRect().bottom <= panel.getBoundingClientRect().bottom
)"""


def test_the_panel_moves_while_the_cell_works_and_keeps_its_place(
    open_notebook: OpenNotebook, front_end: FrontEnd
) -> None:
    notebook = open_notebook(LOADS, TRAINS.format(steps=120), front_end=front_end)
    notebook.run(0)
    notebook.page.evaluate(WATCHES)
    notebook.begin(1)
    words = notebook.end(1, timeout_s=60)
    assert re.search(r"^done in .* steps, loss \S+, acc 0.5000", words, re.M)
    seen = notebook.page.evaluate("() => ({frames: seen.frames.size, heights: [...seen.heights], empty: seen.empty})")
    assert seen["frames"] >= 10
    assert len(seen["heights"]) == 1
    assert seen["empty"] == 0, "for some frames the browser showed nothing where the panel is"
    expect(notebook.output(1).locator("img")).to_have_count(1)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_everybody_can_read_the_panel(
    open_notebook: OpenNotebook, environment: Environment, is_dark: bool, tmp_path: Path
) -> None:
    notebook = open_notebook(LOADS, TRAINS.format(steps=100_000), environment=environment, is_dark=is_dark)
    notebook.run(0)
    notebook.begin(1)
    panel = notebook.page.locator("div.nbaccel").first
    panel.locator("svg[role=img]").first.wait_for(timeout=40_000)
    expect(panel).to_contain_text("steps/s", timeout=20_000)
    notebook.page.evaluate(KEEPS_A_COPY)
    still = notebook.page.locator("#still div.nbaccel")
    assert notebook.grave_findings("#still") == []
    background = still.evaluate("element => getComputedStyle(element).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if is_dark else "rgb(255, 255, 255)")
    assert still.evaluate(FITS), "something is cut off"
    notebook.shoot(tmp_path / "panel.png", "#still")
    notebook.cell(1).locator(".cm-content").click()
    notebook.page.keyboard.press("Escape")
    notebook.page.keyboard.press("i")
    notebook.page.keyboard.press("i")
    assert "stopped after" in notebook.end(1, timeout_s=60)
