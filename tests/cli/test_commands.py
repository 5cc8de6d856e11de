"""The command line: what it prints, and that the demo really executes a notebook in a kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import nbaccel
from environments import REPOSITORY
from nbaccel.cli import main


def notebook(path: Path, *sources: str, tag: str = "parameters") -> Path:
    """A notebook of code cells, the first of which is tagged."""
    cells = [new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = [tag]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_doctor_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("nbaccel   ")


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("nbaccel")
    result = subprocess.run([command, "--help"], stdout=subprocess.PIPE, text=True, check=True)
    for command in ("doctor", "config", "launch", "demo"):
        assert command in result.stdout


def test_the_module_is_the_command_and_says_its_version() -> None:
    command = [sys.executable, "-m", "nbaccel", "--version"]
    said = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said == f"nbaccel {nbaccel.__version__}\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("lanuch -n 2 train.py", "; did you mean launch?"),
        ("demo --num_proceses 2", "unrecognized arguments: --num_proceses 2; did you mean --num-processes?"),
        ("doctor --versoin", "unrecognized arguments: --versoin; did you mean --version?"),
        ("demo -n two", "invalid int value: 'two'"),
    ],
)
def test_wrong_use_names_what_was_perhaps_meant(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert capsys.readouterr().err.rstrip().endswith(sentence)


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "COMMAND" in capsys.readouterr().err


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


def test_config_says_what_the_folder_chooses_and_writes_what_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config"]) == 0
    assert main(["config", "num-processes=2", "mixed-precision=fp16"]) == 0
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "nbaccel.toml: nothing is set",
        f"saved to {tmp_path / 'nbaccel.toml'}: num-processes=2 mixed-precision=fp16",
        "nbaccel.toml: num-processes=2 mixed-precision=fp16",
    ]


def test_config_refuses_a_wrong_setting_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "accumulate=0"]) == 1
    assert capsys.readouterr().err == ("nbaccel: -a/--accumulate: batches per optimizer step are 1 or more; got '0'.\n")
    assert list(tmp_path.iterdir()) == []
