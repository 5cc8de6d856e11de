"""The Stop button in JupyterLab and Notebook 7: by pointer, by keyboard, and for those who do not see it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd, NotebookPage
from browser.server import JupyterServer
from browser.test_panel import LOADS, TRAINS

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

ENDLESS = TRAINS.format(steps=100_000)

WATCHES = """() => {
    const seen = window.seen = {frames: new Set(), heights: new Set(), buttons: new Set()};
    const area = document.querySelectorAll('.jp-Notebook .jp-Cell')[1];
    const look = () => {
        const panel = area.querySelector('.nbaccel-stop div.nbaccel');
        if (panel) {
            seen.frames.add(panel.textContent);
            seen.heights.add(panel.getBoundingClientRect().height);
            seen.buttons.add(area.querySelector('.nbaccel-stop button').getBoundingClientRect().top
                - panel.getBoundingClientRect().top);
        }
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""

IS_MANY = "() => seen.frames.size >= 10"
SEEN = "() => ({heights: [...seen.heights], buttons: [...seen.buttons]})"


def begin(notebook: NotebookPage) -> Locator:
    """Run the cell that trains; its button, once it is there."""
    notebook.run(0)
    notebook.page.evaluate(WATCHES)
    notebook.begin(1)
    button = notebook.page.get_by_role("button", name="Stop after this step")
    button.wait_for(timeout=40_000)
    return button


def seconds_to_interrupt(notebook: NotebookPage) -> float:
    """The same by the front end's own key."""
    begin(notebook)
    notebook.cell(1).locator(".cm-content").click()
    notebook.page.keyboard.press("Escape")
    pressed_at = time.monotonic()
    notebook.page.keyboard.press("i")
    notebook.page.keyboard.press("i")
    notebook.end(1, timeout_s=60)
    return time.monotonic() - pressed_at


@pytest.mark.sample(1)
def test_a_click_ends_the_cell_within_a_second_and_leaves_the_picture(
    open_notebook: OpenNotebook, front_end: FrontEnd
) -> None:
    notebook = open_notebook(LOADS, ENDLESS, front_end=front_end)
    seconds: list[float] = []
    limit_s = 1.0
    while len(seconds) < 5 and min(seconds, default=9.0) > limit_s:
        button = begin(notebook)
        clicked_at = time.monotonic()
        button.click()
        words = notebook.end(1, timeout_s=60)
        seconds.append(time.monotonic() - clicked_at)
        assert "KeyboardInterrupt: the run was interrupted" in words
        expect(notebook.output(1).locator("img")).to_have_count(1)
        expect(notebook.page.locator(".nbaccel-stop")).to_have_count(0)
        if seconds[-1] > limit_s:  # a machine that is busy has bad moments, and so has the front end's own interrupt
            limit_s = max(limit_s, 2 * seconds_to_interrupt(notebook))
    print(f"{front_end.name}: from the click to the cell's end {min(seconds) * 1000:.0f} ms")
    assert min(seconds) < limit_s


@pytest.mark.full
def test_panel_and_button_keep_their_place_and_everybody_can_use_them(
    open_notebook: OpenNotebook, tmp_path: Path
) -> None:
    notebook = open_notebook(LOADS, ENDLESS)
    button = begin(notebook)
    notebook.page.wait_for_function(IS_MANY, timeout=60_000)
    seen = notebook.page.evaluate(SEEN)
    assert len(seen["heights"]) == 1
    assert len(seen["buttons"]) == 1
    assert notebook.grave_findings(".nbaccel-stop") == []
    assert "Every rank finishes its step" in (button.get_attribute("title") or "")
    notebook.shoot(tmp_path / "button.png", ".nbaccel-stop")
    button.focus()
    notebook.page.keyboard.press("Space")
    assert "KeyboardInterrupt: the run was interrupted" in notebook.end(1, timeout_s=60)


@pytest.mark.full
def test_a_page_that_is_reloaded_during_a_run_shows_how_it_ended(
    open_notebook: OpenNotebook, server: JupyterServer
) -> None:
    notebook = open_notebook(LOADS, ENDLESS)
    begin(notebook)
    notebook.page.keyboard.press("Control+s")
    expect(notebook.page.locator(".jp-mod-dirty")).to_have_count(0)
    notebook.page.reload()
    server.interrupt_kernels()
    shown = notebook.output(1).locator(".nbaccel-stop")
    expect(shown).to_contain_text("stopped after", timeout=60_000)
    expect(shown.locator("button")).to_be_hidden()
