"""What is left of a run in the saved file: a picture and its numbers, which every program that shows notebooks shows.

nbconvert comes with the notebook. Others can be tried by hand, each in a folder of its own:

    pip install --target /tmp/nbconvert-6.4.5 nbconvert==6.4.5 'jinja2<3.1' 'markupsafe<2.1' 'mistune<1'
    NBACCEL_NBCONVERT=/tmp/nbconvert-6.4.5 pytest tests/test_saved_notebook.py
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from environments import NEWEST
from headless import execute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_TRAINS = """
%%accelerate -n 2 --cpu
import torch
from tqdm.auto import tqdm
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(4000, 8), torch.arange(4000) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in tqdm(loader, mininterval=0.01):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss, "acc": 0.5})
del loss, data, optimizer, x, y
"""


def unsaved() -> Any:
    """A notebook with a run of 500 steps, not executed yet."""
    cells = ["%load_ext nbaccel", _TRAINS.strip()]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


@pytest.fixture(scope="module")
def of_500_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, executed and saved; for the kernel it is as if somebody watched."""
    notebook, path = unsaved(), tmp_path_factory.mktemp("saved") / "run.ipynb"
    execute(notebook, NEWEST, path.parent)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return path


def as_html(notebook: Path, folder: str = "") -> str:
    """What nbconvert makes of it: the installed one, or that of `folder`."""
    environ = dict(os.environ)
    if folder:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environ.get("PYTHONPATH")]))
        environ["JUPYTER_PATH"] = str(Path(folder) / "share" / "jupyter")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", "--log-level", "ERROR", str(notebook)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_file_of_a_run_of_500_steps_holds_one_picture_and_its_numbers(of_500_steps: Path) -> None:
    assert of_500_steps.stat().st_size < 100_000
    outputs = nbformat.read(of_500_steps, as_version=4).cells[1].outputs
    (display,) = [output for output in outputs if output.output_type == "display_data"]
    assert sorted(display.data) == ["image/png", "text/plain"]
    assert "javascript" not in json.dumps(outputs)
    words = display.data["text/plain"]
    for pattern in (
        r"^Cell In\[\d+\]: done in \d[^,]*, 500 steps$",
        r"^loss 0\.\d+ \(rank 0 \S+, rank 1 \S+, lowest",
        r"^rank 0: host .* GB, peak \S+ GB$",
        r"^rank 1: host .* GB, peak \S+ GB$",
    ):
        assert re.search(pattern, words, re.M), words


def test_bars_make_the_file_grow_by_their_last_states_alone(of_500_steps: Path) -> None:
    outputs = nbformat.read(of_500_steps, as_version=4).cells[1].outputs
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    bars = [line for line in text.splitlines() if "%|" in line]
    last = sorted(line.partition("|")[0] for line in bars)
    assert last in (["[rank 0] 100%", "[rank 1] 100%"], ["100%"])  # as fast as each other, to the last digit
    assert all("500/500" in line for line in bars), bars
    assert "\r" not in text


def _nbconverts() -> list[object]:
    other = os.environ.get("NBACCEL_NBCONVERT", "")
    why = "NBACCEL_NBCONVERT names no folder with another nbconvert"
    return ["", pytest.param(other, marks=pytest.mark.skipif(not other, reason=why), id="other")]


@pytest.mark.full
@pytest.mark.parametrize("folder", _nbconverts())
def test_nbconvert_shows_the_picture_and_the_numbers(of_500_steps: Path, folder: str) -> None:
    page = as_html(of_500_steps, folder)
    assert len(re.findall(r"<img[^>]+src=\"?data:image/png;base64,", page)) == 1
    assert re.search(
        r"done in \d[^,]*, 500 steps, loss 0\.\d+, acc 0\.5000, .* peak memory \S+ GB", html.unescape(page)
    )


@pytest.mark.full
def test_nbconvert_that_executes_leaves_lines_of_text_and_the_picture(tmp_path: Path) -> None:
    nbformat.write(unsaved(), tmp_path / "run.ipynb")
    command = ["--to", "notebook", "--execute", "--output", "done", str(tmp_path / "run.ipynb")]
    environ = NEWEST.environ()
    subprocess.run(
        [sys.executable, "-m", "nbconvert", *command], env=environ, capture_output=True, check=True, timeout=150
    )
    outputs = nbformat.read(tmp_path / "done.ipynb", as_version=4).cells[1].outputs
    (display,) = [output for output in outputs if output.output_type == "display_data"]
    assert sorted(display.data) == ["image/png", "text/plain"]
    text = "".join(output.get("text", "") for output in outputs)
    assert "\r" not in text
    assert text.count("500/500") in (1, 2)
    assert re.search(r"^done in \d[^,]*, 500 steps, loss", text, re.M)
