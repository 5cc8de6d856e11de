"""notebooks/kaggle_two_t4.ipynb, which needs two GPUs: all of it that a machine without one can do is done here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from environments import NEWEST, REPOSITORY
from headless import execute

PAGE = REPOSITORY / "notebooks" / "kaggle_two_t4.ipynb"
SHELL = re.compile(r"^!.*$", re.M)


def read() -> Any:
    return nbformat.read(PAGE, as_version=4)


def test_it_is_stored_without_outputs_and_names_no_address() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    assert "git clone -q ADDRESS nbaccel" in cells[0].source


def test_its_commands_are_there() -> None:
    commands = "\n".join(line for cell in read().cells for line in SHELL.findall(cell.source))
    (target,) = re.findall(r"make (\w+) ", commands)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.M)
    for variable in re.findall(r"(GPU_\w+)=", commands):
        assert re.search(rf"^{variable} \?=", makefile, re.M), variable


@pytest.mark.full
@pytest.mark.timeout(600)
def test_without_a_gpu_it_ends_in_the_same_file_of_facts(tmp_path: Path) -> None:
    """The shell's commands are left out, and the training is shorter; everything else is executed."""
    notebook = read()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = SHELL.sub("", cell.source).replace("8192", "64").replace("256, shuffle", "32, shuffle")
    execute(notebook, NEWEST, tmp_path, timeout_s=300)
    first, second, *others = map(json.loads, (tmp_path / "two_t4_facts.jsonl").read_text().splitlines())
    assert [first["name"], second["name"]] == ["5 epochs, -n 1", "5 epochs, -n 2"]
    assert first["steps"] == second["steps"] == 10
    assert first["value"] > 0 < second["value"]
    assert others
