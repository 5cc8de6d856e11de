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

ASKS = """
import nbaccel, torch
from nbaccel.errors import FeatureMissing
from nbaccel.features import _TABLE, feature
for name, reference in _TABLE.items():
    try:
        feature(name)
    except FeatureMissing as error:
        print(error)
for name in ("map", "sweep", "init_empty_weights"):
    try:
        getattr(nbaccel, name)
    except ImportError as error:
        print(type(error).__name__, error)
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
    lines = said(without, ASKS)
    assert len(lines) == len(features._TABLE) + 4
    asked = "belongs to nbaccel.features.check, which this installation of nbaccel lacks: install nbaccel as a whole"
    assert any(line.startswith(f"--check {asked}") for line in lines)
    assert lines[-2].startswith("FeatureMissing nbaccel.init_empty_weights belongs to nbaccel.features.big_models, ")
    assert lines[-1].startswith("in a program: Accelerator.find_batch_size belongs to nbaccel.features.batch_size, ")


def test_an_import_that_fails_inside_of_a_feature_is_that_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        features.module_of("--check", "no_such_module")
