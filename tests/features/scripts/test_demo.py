"""`nbaccel demo` really executes a notebook in a kernel, and says why it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from nbaccel.cli import main


def notebook(path: Path, *sources: str, tag: str = "parameters") -> Path:
    """A notebook of code cells, the first of which is tagged."""
    cells = [new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = [tag]
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.mark.slow
def test_demo_runs_the_notebook_with_the_asked_number_of_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = notebook(tmp_path / "a.ipynb", "num_processes = 1", "accuracy = 0.9 + num_processes / 100", "num_processes")
    output = tmp_path / "out" / "done.ipynb"
    assert main(["demo", "--notebook", str(path), "--output", str(output), "-n", "3"]) == 0
    shown = capfd.readouterr()
    assert shown.err == "", "ipykernel has nothing to warn of"
    first, *_, after, one, two, three = shown.out.splitlines()
    assert first.startswith(f"running the cells of {path} in a kernel, with num_processes = 3")
    assert "accuracy 0.930" in shown.out
    assert after == "next:"
    for line in (one, two, three):
        program, *arguments = line.partition("#")[0].split()
        assert Path(program).exists() or shutil.which(program), line
        assert all(Path(argument).exists() for argument in arguments if "/" in argument), line
    executed = nbformat.read(output, as_version=4)
    assert [cell.source for cell in executed.cells][1] == "num_processes = 3"
    assert executed.cells[-1].outputs[0].data["text/plain"] == "3"


@pytest.mark.slow
def test_demo_fails_where_the_notebook_fails_and_keeps_its_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(tmp_path / "a.ipynb", "num_processes = 1", "print('so far'); 1 / 0")
    output = tmp_path / "done.ipynb"
    assert main(["demo", "--notebook", str(path), "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert "a cell failed" in error
    assert "ZeroDivisionError" in error
    assert nbformat.read(output, as_version=4).cells[-1].outputs[0].text == "so far\n"


def test_demo_says_where_the_notebook_should_have_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.ipynb"
    assert main(["demo", "--notebook", str(missing)]) == 1
    assert f"{missing} is not here: run the demo in a clone of the repository" in capsys.readouterr().err


def test_demo_needs_a_cell_where_it_can_set_the_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = notebook(tmp_path / "a.ipynb", "pass", tag="other")
    assert main(["demo", "--notebook", str(path)]) == 1
    assert 'has no cell tagged "parameters"' in capsys.readouterr().err
