"""The notebooks are stored with what they showed when they were executed: `make notebooks`."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy
import pytest
from PIL import Image

from environments import REPOSITORY
from nbaccel.features.panel.figure import PAPER
from stored_notebooks import MOST_BYTES, NOTEBOOKS, belongs_together, presentable

SHOWN = {
    "01_quickstart.ipynb": "2 ranks on",
    "02_from_accelerate.ipynb": "of their size",
    "03_accelerate_compatibility.ipynb": "names are here; missing: none",
    "04_out_of_memory.ipynb": "started again with 2 x",
    "05_watch_and_steer.ipynb": "accuracy by fold",
    "06_never_lose_a_run.ipynb": "weights of the plain loop are equal, bit for bit: True",
    "07_what_it_costs.ipynb": "x raw",
    "08_bigger_than_one_gpu.ipynb": "goes on where the ranks were: True",
    "09_models_larger_than_a_card.ipynb": "texts as in one process: True",
    "10_inference_on_every_card.ipynb": "all others as before: True",
    "11_sweeps_and_runs.ipynb": "10 of 15 runs finished earlier",
    "12_check_and_speed.ipynb": "accelerator.gather counts 23 samples twice",
    "13_fine_tune_a_4_bit_model.ipynb": "the second epoch as before: True",
    "14_six_traps.ipynb": "batch inside of accumulate: weights are equal: True",
    "15_several_machines.ipynb": "the same object: True, Classifier",
}
"""Of each notebook something that it is there to show."""

paths = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def test_every_notebook_is_known_here() -> None:
    assert {path.name for path in NOTEBOOKS} == set(SHOWN)


@paths
def test_stored_outputs_are_those_of_the_stored_sources(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert belongs_together(notebook), "sources or outputs were edited alone; run: make notebooks"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert SHOWN[path.name] in path.read_text(encoding="utf-8")


@paths
def test_a_stored_notebook_is_small_and_says_nothing_of_the_machine(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert len(content.encode()) < MOST_BYTES
    assert "iopub.execute_input" not in content, "times of cells"
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]
    said = json.dumps([_without_pictures(output) for output in outputs])
    assert not re.findall(r"/tmp/\w*[a-z0-9_]{8}/", said), "a temporary folder's name, which differs each time"
    assert not re.findall(r"(?<![\w.…/])/(?!tmp/|proc/)\w[\w.-]*/[\w./-]+", said), "where something lies on one machine"
    mimes = {mime for output in outputs for mime in output.get("data", {})}
    assert mimes <= {"text/plain", "text/html", "image/png", "image/svg+xml"}, "what pages without a kernel show"


def test_an_edited_source_or_output_no_longer_belongs_to_the_other() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    prose = copy.deepcopy(notebook)
    prose.cells[0].source += " More words."
    source = copy.deepcopy(notebook)
    source.cells[code[0]].source += "  # edited"
    output = copy.deepcopy(notebook)
    output.cells[code[-1]].outputs = []
    assert [belongs_together(one) for one in (notebook, prose, source, output)] == [True, True, False, False]


def test_what_is_of_one_machine_and_one_minute_is_left_out() -> None:
    said = (
        "/tmp/work1234/saved; /tmp/nbaccel-logs-ab12cd_3/rank0.log at 0x7f12ab34cd56, "
        f"{REPOSITORY}/nbaccel/world.py, /usr/lib/python3.11/site-packages/torch/nn.py, {Path.home()}/notes"
    )
    left = "./saved; /tmp/nbaccel-logs-…/rank0.log at 0x…, nbaccel/world.py, site-packages/torch/nn.py, ~/notes"
    printed = nbformat.v4.new_output("stream", text=said)
    drawn = nbformat.v4.new_output("display_data", {"text/plain": said}, metadata={"text/plain": {"alt": said}})
    assert presentable(printed, "/tmp/work1234").text == left
    shown = presentable(drawn, "/tmp/work1234")
    assert [shown.data["text/plain"], shown.metadata["text/plain"]["alt"]] == [left, left]


def _pictures(path: Path) -> list[tuple[str, Image.Image]]:
    """The pictures of runs in a stored notebook, with their words."""
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]
    drawn = [output for output in outputs if "alt" in output.get("metadata", {}).get("image/png", {})]
    return [
        (output.data["text/plain"], Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB"))
        for output in drawn
    ]


def _pixels_of(picture: Image.Image, colour: str) -> int:
    """How many pixels have a colour, or a paler one: lines of ranks behind a smooth curve, and edges of thin ones."""
    pixels = numpy.asarray(picture).astype(float)
    wanted = numpy.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    far = [numpy.abs(pixels - (255 + (wanted - 255) * part)).max(axis=2) for part in (1.0, 0.8, 0.6, 0.45)]
    return int((numpy.min(far, axis=0) <= 16).sum())


@paths
def test_every_curve_is_in_the_stored_pictures(path: Path) -> None:
    """A picture that is stored with another palette loses curves. Each has a colour of its own, up to the sixth."""
    for words, picture in _pictures(path):
        compared = re.findall(r"^(\d+)\. .*: (?:done|stopped|failed)", words, re.M)
        ranks = re.findall(r"rank \d+ ([\d.]+)", next(iter(re.findall(r"^\S*loss .*$", words, re.M)), ""))
        curves = max(map(int, compared), default=0) or (len(ranks) if len({*ranks}) > 1 else 1)
        colours = PAPER.ranks[: min(curves, len(PAPER.ranks))]
        assert [_pixels_of(picture, colour) > 30 for colour in colours] == [True] * len(colours), words
        assert picture.getpixel((0, 0)) == (255, 255, 255)


def _without_pictures(output: Any) -> Any:
    return output | {"data": {mime: value for mime, value in output.get("data", {}).items() if "image" not in mime}}
