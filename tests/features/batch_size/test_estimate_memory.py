"""`nbaccel estimate-memory`: models of programs and of transformers, and the sentences for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel.cli import main

PROGRAM = """
import torch
from torch import nn
from beside import WIDTH

def make():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, WIDTH)

def needs_values():
    return nn.Linear(int(torch.tensor([3.0]).item()), 2)

def fails():
    raise RuntimeError("no weights")

def number():
    return 3
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 200\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_function_gives_model_optimizer_and_batch(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", f"{program}:make", "-n", "2", "4", "--dtypes", "float32", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert f"{program}:make, 42,210 parameters, float32" in said
    assert "42,210 parameters, bfloat16" in said
    assert said.count("\nfsdp  ") == 4
    assert "Each sample of a batch takes" in said


def test_devices_may_be_others_than_those_that_are_here(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", f"{program}:needs_values", "-n", "2", "--memory", "16GB"]) == 0
    assert "and there is 2 x 16.0 GB." in capsys.readouterr().out


def test_a_configuration_of_transformers_is_made_without_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    ).save_pretrained(tmp_path)
    line = ["estimate-memory", str(tmp_path), "-n", "2", "--batch_size", "2", "--sequence_length", "16"]
    assert main([*line, "--library_name", "transformers"]) == 0
    said = capsys.readouterr().out
    assert "Each sample of a batch takes" in said


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("program.py:fails", "raised RuntimeError: no weights"),
        ("program.py:number", "number returns a int, and it should return a torch.nn.Module first"),
        ("program.py:absent", "program.py has no function absent"),
        ("other.py:make", "there is no file"),
        ("nowhere/at-all", "is neither file.py:function, nor a folder with a config.json"),
        ("program.py:make --dtypes int8", "int8: a training computes in float32, float16 or bfloat16"),
        ("program.py:make --memory much", "--memory is a number of bytes such as 16GB, got 'much'"),
        ("program.py:make --optimizer AdamV", "torch.optim has no optimizer 'AdamV'"),
        ("bert --library_name timm", "timm is not known here"),
    ],
)
def test_what_is_wrong_is_said(
    name: str, sentence: str, program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    assert main(["estimate-memory", *name.split()]) == 1
    assert sentence in capsys.readouterr().err
