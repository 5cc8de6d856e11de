"""A folder of features that is not there: the core works, and whoever asks for the feature is told in a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from environments import REPOSITORY
from nbaccel import features

FOLDERS = sorted(each.name for each in Path(features.__file__).parent.iterdir() if (each / "__init__.py").exists())

CORE = """
import torch, nbaccel
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
accelerator = nbaccel.Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(4, 2)).mean())
optimizer.step()
accelerator.save_state("checkpoint")
accelerator.load_state("checkpoint")
print(nbaccel.launch(int, 2, cpu=True).values)
"""

SHOWN = [
    ("nbaccel", "map"),
    ("nbaccel", "sweep"),
    ("nbaccel", "init_empty_weights"),
    ("nbaccel.answers", "Failed"),
    ("nbaccel.big_modeling", "dispatch_model"),
    ("nbaccel.hooks", "CpuOffload"),
    ("nbaccel.utils", "infer_auto_device_map"),
    ("nbaccel.utils.bnb", "load_and_quantize_model"),
    ("nbaccel.utils.modeling", "dtype_byte_size"),
    ("nbaccel.utils.offload", "offload_weight"),
]
"""Names of features, and public modules that show them."""

ASKS = """
import importlib, nbaccel, torch
from nbaccel.errors import FeatureMissing
from nbaccel.features import _TABLE, feature
for name, reference in _TABLE.items():
    try:
        feature(name)
    except FeatureMissing as error:
        print(error)
print("names:")
for module, name in {names}:
    try:
        getattr(importlib.import_module(module), name)
    except FeatureMissing as error:
        print(error)
assert nbaccel.utils.gather and nbaccel.utils.AutocastKwargs
try:
    nbaccel.Accelerator(cpu=True).find_batch_size(lambda batch: batch, torch.ones(1))
except FeatureMissing as error:
    print("in a program:", error)
"""


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package that has no feature."""
    shutil.copytree(REPOSITORY / "nbaccel", tmp_path / "nbaccel", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in FOLDERS:
        shutil.rmtree(tmp_path / "nbaccel" / "features" / folder)
    return tmp_path


def said(folder: Path, program: str) -> list[str]:
    """Return the lines that a program prints, with the package of `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "IPYTHONDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_core_trains_saves_and_launches_without_any_feature(without: Path) -> None:
    assert said(without, CORE)[-1] == "[0, 0]"


@pytest.mark.slow
def test_whoever_asks_for_a_missing_feature_is_told_which_it_is(without: Path) -> None:
    lines = said(without, ASKS.replace("{names}", repr(SHOWN)))
    asked = "belongs to nbaccel.features.check, which this installation of nbaccel lacks: install nbaccel as a whole"
    assert any(line.startswith(f"--check {asked}") for line in lines)
    *table, _ = lines[: lines.index("names:") + 1]
    *names, in_a_program = lines[len(table) + 1 :]
    assert len(table) == len(features._TABLE)
    assert [line.partition(" belongs to nbaccel.features.")[0].rpartition(".")[2] for line in names] == [
        "answers" if module == "nbaccel.answers" else name for module, name in SHOWN
    ]
    assert in_a_program.startswith("in a program: Accelerator.find_batch_size belongs to nbaccel.features.batch_size, ")


def test_an_import_that_fails_inside_of_a_feature_is_that_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        features.module_of("--check", "no_such_module")
