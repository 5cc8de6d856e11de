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

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

MOST_BYTES = 60_000
COLOURS = 200

LOADS = """%load_ext nbaccel
import torch, torch._dynamo, torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).div(16), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)"""

TRAINS = """%%accelerate -n 2 --seed 0 --plot loss,acc
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in accelerator.epochs(40):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            scores = model(inputs)
            accelerator.backward(F.cross_entropy(scores, targets))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"acc": (scores.argmax(1) == targets).float().mean()})"""

COVERS_NOTHING = "() => document.activeElement.blur()"


@pytest.mark.full
def test_the_picture_of_the_readme_shows_a_training_and_is_small(open_notebook: OpenNotebook, tmp_path: Path) -> None:
    notebook = open_notebook(LOADS, TRAINS, front_end=NOTEBOOK)
    notebook.run(0)
    notebook.begin(1)
    panel = notebook.page.locator("div.nbaccel").first
    expect(panel).to_contain_text(re.compile(r"step \d,\d{3}"), timeout=60_000)
    notebook.page.evaluate(COVERS_NOTHING)
    expect(notebook.cell(1).get_by_role("button", name=re.compile("stop", re.IGNORECASE))).to_be_visible()
    expect(panel).not_to_contain_text(re.compile("behind|ahead"))  # ranks are not seen at the same moment
    picture = Image.open(io.BytesIO(notebook.cell(1).screenshot())).convert("RGB").quantize(COLOURS, dither=0)
    content = io.BytesIO()
    picture.save(content, "png", optimize=True)
    (tmp_path / "panel.png").write_bytes(content.getvalue())
    assert len(content.getvalue()) < MOST_BYTES
    assert picture.width > 600
