"""The panels of a map and of a sweep as a person sees them while they work: in light, dark and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(240)]

LOADS = "%load_ext nbaccel\nimport os, time, torch, torch._dynamo\ngate = {gate!r}"

MAPS = """
def answer(texts):
    while len(texts[0]) < 2 and not os.path.exists(gate):
        time.sleep(0.05)
    if texts[0] == "bad":
        raise ValueError("no answer to this")
    return [text.upper() for text in texts]

items = ["x" * 40] * 300 + ["bad"] + ["y"] * 100
answers = nbaccel.map(answer, items, num_processes=2, cpu=True, batch_size=4)"""

SWEEPS = """
def train(lr, fold, accelerator):
    if fold == 1 and lr == 0.2:
        raise ValueError("expected 10 classes, got 11")
    for step in range(30):
        accelerator.log({"loss": lr / (step + 1)}, step)
    while fold == 2 and not os.path.exists(gate):
        time.sleep(0.05)
    return lr * fold

runs = nbaccel.sweep(train, lr=[0.1, 0.2], fold=[2, 1, 0], slots=1, cpu=True, folder=f"{gate}-sweeps")"""

KEEPS_A_COPY = """() => {
    const still = document.querySelector('div.nbaccel').parentElement.cloneNode(true);
    still.id = 'still';
    document.querySelector('div.nbaccel').closest('.jp-OutputArea').append(still);
}"""
"""The panel itself is replaced twice a second."""

SCROLLS = "still => still.scrollWidth > still.clientWidth + 1"


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("cell", "while_it_works", "at_its_end"),
    [
        (MAPS, ["of 401", "rank"], "401 items in"),
        (SWEEPS, ["waiting", "running", "lr=0.2, fold=0"], "6 runs: 5 done, 1 failed"),
    ],
    ids=["map", "sweep"],
)
def test_everybody_can_read_the_panel_while_it_works(
    open_notebook: OpenNotebook,
    front_end: FrontEnd,
    is_dark: bool,
    cell: str,
    while_it_works: list[str],
    at_its_end: str,
    tmp_path: Path,
) -> None:
    gate = tmp_path / "go-on"
    notebook = open_notebook(
        LOADS.format(gate=str(gate)) + "\nimport nbaccel", cell, front_end=front_end, is_dark=is_dark
    )
    notebook.run(0, timeout_s=60.0)
    notebook.begin(1)
    for words in while_it_works:
        expect(notebook.output(1).filter(has_text=words).first).to_be_visible(timeout=60_000)
    notebook.page.evaluate(KEEPS_A_COPY)
    assert notebook.grave_findings("#still") == []
    notebook.shoot(tmp_path / "works.png", "#still")
    notebook.page.set_viewport_size({"width": 620, "height": 900})
    assert not notebook.page.locator("#still").evaluate(SCROLLS)
    assert notebook.grave_findings("#still") == []
    notebook.shoot(tmp_path / "narrow.png", "#still")
    gate.touch()
    assert at_its_end in notebook.end(1, timeout_s=90.0)
    notebook.shoot(tmp_path / "over.png")
