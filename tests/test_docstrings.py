"""Every example in a docstring runs and answers what it says."""

from __future__ import annotations

import builtins
import doctest
from importlib import import_module

import pytest

from environments import REPOSITORY

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((REPOSITORY / "nbaccel").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    vars(builtins).pop("_", None)  # the last value of an example; IPython sets no `_` where the program has one
    assert not result.failed, f"{result.failed} of {result.attempted} lines differ; see the output"
