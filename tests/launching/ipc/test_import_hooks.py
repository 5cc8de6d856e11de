"""Actions at the import of a module run when it is imported, however often a program looks for it before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbaccel.launching.ipc.import_hooks import when_loaded, when_loaded_meanwhile


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported."""
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "looked_for"
    sys.modules.pop("looked_for", None)


def test_a_look_for_a_module_is_no_import(name: str) -> None:
    seen: list[str] = []
    when_loaded({name: lambda module: seen.append(module.__name__)})
    assert importlib.util.find_spec(name) is not None
    assert seen == []
    importlib.import_module(name)
    importlib.reload(sys.modules[name])
    assert seen == [name]


def test_what_is_asked_for_inside_of_a_block_holds_after_it(name: str) -> None:
    seen: list[str] = []
    with when_loaded_meanwhile({}):
        when_loaded({name: lambda module: seen.append(module.__name__)})
    importlib.import_module(name)
    assert seen == [name]
