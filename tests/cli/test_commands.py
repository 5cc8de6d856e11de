"""The command line: what it prints, and what it says of wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nbaccel
from environments import REPOSITORY
from nbaccel.cli import main


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
