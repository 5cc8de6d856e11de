"""The panel as a person sees it: it moves while the cell works, stands still on the page, and can be read by all."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd
from environments import Environment

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

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


@pytest.mark.full
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


@pytest.mark.full
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


MAKES_A_RUN = """
from IPython.display import HTML
from nbaccel.base.events import Loss, Memory, Metric, Progress
from nbaccel.launching.run import Run
from nbaccel.display.history import History
from nbaccel.features.panel.panel import Panel
from nbaccel.display.summary import RunFacts, RunState
history, facts = History(2), RunFacts("Cell In[5]", "2 ranks on the CPU, seed 878899", plots=("loss", "acc"))
for step in range(40):
    for rank in (0, 1):
        history.feed(rank, step / 10, Loss(0.0069321 / (step + 1), step))
        history.feed(rank, step / 10, Progress(step + 1, step + 1, 400, 0, 3))
        history.feed(rank, step / 10, Memory(3 * 10**8, 4 * 10**8, 24 * 10**9))
        history.feed(rank, step / 10, Metric({"acc": step / 40}, step))
HTML(Panel(history, facts).bundle(4.0)["text/html"])"""

SHOWS_ITS_PICTURE = (
    "Run([None], history, None, 'fork', '', '', 4.0, facts=facts, state=RunState('done', 'done')).plot()"
)

MEASURES = """panel => {
    const place = part => panel.querySelector(part).getBoundingClientRect();
    const [own, curves, table] = [panel.getBoundingClientRect(), place('.plots'), place('table')];
    const out = [...panel.querySelectorAll('th, td, svg, figure, .axis span, .fits, progress')].filter(part => {
        const box = part.getBoundingClientRect();
        return box.width > 0 && (box.right > own.right - 12 || box.left < own.left || box.bottom > own.bottom);
    });
    const hidden = [...panel.querySelectorAll('.fits > *')].filter(part => part.scrollWidth > part.clientWidth + 1
        && part.getBoundingClientRect().top < part.parentElement.getBoundingClientRect().bottom - 1);
    const axis = place('.axis span'), curve = place('.plot svg');
    const line = panel.querySelector('.at > .fits').getBoundingClientRect();
    const where = [...panel.querySelectorAll('.at > .fits:first-child > *')]
        .filter(part => part.getBoundingClientRect().top < line.bottom - 1).map(part => part.textContent).join('');
    return {
        where, is_below: table.top >= curves.bottom, is_beside: table.left >= curves.right, height: own.height,
        out: out.map(part => part.outerHTML), cut: hidden.map(part => part.outerHTML), touches: axis.right > curve.left,
    };
}"""


@pytest.mark.full
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_in_a_narrow_window_the_table_stands_below_and_nothing_is_cut_off(
    open_notebook: OpenNotebook, is_dark: bool, tmp_path: Path
) -> None:
    notebook = open_notebook(MAKES_A_RUN, SHOWS_ITS_PICTURE, is_dark=is_dark)
    notebook.run(0)
    panel = notebook.output(0).locator("div.nbaccel")
    seen = {}
    for width in (600, 900, 1500):
        notebook.page.set_viewport_size({"width": width, "height": 900})
        notebook.page.wait_for_timeout(300)  # the page follows a new width within some frames
        seen[width] = panel.evaluate(MEASURES)
        assert (seen[width]["out"], seen[width]["cut"], seen[width]["touches"]) == ([], [], False)
        assert seen[width]["where"].startswith("epoch 1/3, batch 40/400, step 40"), "the position is what is kept"
        notebook.shoot(tmp_path / f"panel-{width}.png")
    assert [seen[width]["is_below"] for width in seen] == [True, True, False]
    assert seen[1500]["is_beside"]
    assert seen[600]["height"] > seen[900]["height"] > seen[1500]["height"]
    notebook.run(1)
    picture = notebook.output(1).locator("img")
    ground = Image.open(io.BytesIO(picture.screenshot())).convert("RGB").getpixel((2, 2))
    assert ground == (255, 255, 255), "a picture brings its paper"
    notebook.shoot(tmp_path / "picture.png")


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_page_that_was_reloaded_gets_panel_and_picture_back(open_notebook: OpenNotebook) -> None:
    runs = TRAINS.format(steps=100_000).replace("-n 2", "-n 2 --bg").replace("0.05)\n    if", "0.3)\n    if")
    commands = [f"%accelerate {command}" for command in ("attach", "stop", "wait", "last")]
    notebook = open_notebook(LOADS, runs, *commands)
    notebook.run(0)
    notebook.begin(1)
    notebook.page.locator("div.nbaccel svg[role=img]").first.wait_for(timeout=40_000)
    notebook.page.reload()
    notebook.wait_until_ready(40.0)
    notebook.begin(2)
    expect(notebook.output(2).locator("div.nbaccel").first).to_contain_text("running", timeout=20_000)
    notebook.page.keyboard.press("Escape")
    notebook.page.keyboard.press("i")
    notebook.page.keyboard.press("i")
    assert "detached; Cell In[2] has been running" in notebook.end(2, timeout_s=60)
    notebook.run(3)
    assert "the run was interrupted after" in notebook.run(4)
    expect(notebook.output(2).locator("img")).to_have_count(1)  # the run is over there, too
    assert "Cell In[2]: stopped after" in notebook.run(5)
    expect(notebook.output(5).locator("div.nbaccel b.stopped")).to_be_visible()
    expect(notebook.output(5).locator("img")).to_have_count(1)
