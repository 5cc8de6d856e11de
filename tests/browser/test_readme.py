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
from browser.page import NOTEBOOK
from documents import README, blocks
from panel_words import panel_words

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

MOST_BYTES = 60_000
COLOURS = 200

LOADS, TRAINS = [block.text for block in blocks(README, "python")[:2]]
LONGER = "range(3)", "range(40)"

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
