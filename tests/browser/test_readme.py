"""The picture in the README: a cell that trains, as a person sees it. `make screenshot` takes it anew.

It is a test as well: what is shown is there, and the file stays small.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from browser.conftest import OpenNotebook
from browser.page import LAB, NOTEBOOK, FrontEnd
from documents import README, blocks
from environments import KAGGLE, NEWEST, Environment
from panel_words import panel_words

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

MOST_BYTES = 60_000
COLOURS = 200

LOADS, TRAINS = [block.text for block in blocks(README, "python")[:2]]
LONGER = "range(3)", "range(40)"

PROMISED = re.search(r"^```\n(2 ranks on CPU.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)

COVERS_NOTHING = "() => document.activeElement.blur()"


@pytest.mark.full
def test_the_picture_of_the_readme_shows_a_training_and_is_small(open_notebook: OpenNotebook, tmp_path: Path) -> None:
    notebook = open_notebook(LOADS, TRAINS.rstrip().replace(*LONGER), front_end=NOTEBOOK)
    notebook.run(0)
    notebook.begin(1)
    panel = notebook.page.locator("div.nbaccel").first
    expect(panel).to_contain_text(re.compile(r"step \d,\d{3}"), timeout=60_000)
    notebook.page.evaluate(COVERS_NOTHING)
    expect(notebook.cell(1).get_by_role("button", name=re.compile("stop", re.IGNORECASE))).to_be_visible()
    expect(panel).not_to_contain_text(re.compile("behind|ahead"))  # ranks are not seen at the same moment
    (tmp_path / "panel_words.txt").write_text(panel_words(panel.evaluate("panel => panel.outerHTML")))
    picture = Image.open(io.BytesIO(notebook.cell(1).screenshot())).convert("RGB").quantize(COLOURS, dither=0)
    content = io.BytesIO()
    picture.save(content, "png", optimize=True)
    (tmp_path / "panel.png").write_bytes(content.getvalue())
    assert len(content.getvalue()) < MOST_BYTES
    assert picture.width > 600


@pytest.mark.full
@pytest.mark.parametrize(
    ("front_end", "environment"),
    [(LAB, NEWEST), (NOTEBOOK, NEWEST), (LAB, KAGGLE)],
    ids=["lab", "notebook", "lab with Kaggle's pins"],
)
def test_the_cells_of_the_first_screen_train_where_they_are_pasted(
    open_notebook: OpenNotebook, front_end: FrontEnd, environment: Environment
) -> None:
    """What they say is what README shows, but for its numbers."""
    notebook = open_notebook("", "", front_end=front_end, environment=environment)
    for number, text in enumerate((LOADS, TRAINS)):
        notebook.cell(number).locator(".cm-content").click()
        notebook.page.keyboard.insert_text(text.rstrip())
    assert notebook.run(0, timeout_s=60) == ""
    said = notebook.run(1, timeout_s=100)
    assert PROMISED is not None
    expected = [re.sub(r"[\d.]+", "#", line) for line in PROMISED[1].splitlines()]
    found = [re.sub(r"[\d.]+", "#", line.removeprefix("nbaccel: ")) for line in said.splitlines()]
    lacking = [line for line in expected if not any(line.partition(", peak")[0] in each for each in found)]
    assert not lacking, said
    expect(notebook.output(1).locator("img").last).to_be_visible()
