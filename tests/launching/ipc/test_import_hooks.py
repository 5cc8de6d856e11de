"""Actions at the import of a module run when it is imported, however often a program looks for it before."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import FeatureMissing
from nbaccel.launching.ipc.import_hooks import when_found, when_loaded
from nbaccel.launching.ipc.import_hooks_meanwhile import when_found_meanwhile, when_loaded_meanwhile


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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported, and that imports its module."""
    folder = tmp_path / "found_later"
    folder.mkdir()
    (folder / "__init__.py").write_text("from found_later.inner import value\nseen = value\n")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "found_later"
    for name in ("found_later", "found_later.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("when", [when_found, when_found_meanwhile])
def test_a_package_is_asked_about_once_and_before_its_modules_are_loaded(package: str, when: Any) -> None:
    said: list[str] = []

    def ask() -> Iterator[tuple[str, Any]]:
        said.append("asked")
        yield f"{package}.inner", lambda module: setattr(module, "value", 2)
        yield package, lambda module: said.append(f"complete: {module.seen}")

    with contextlib.nullcontext() if (block := when([(package, ask)])) is None else block:
        assert importlib.util.find_spec(package) is not None
        assert said == []
        importlib.import_module(package)
    importlib.reload(sys.modules[package])
    assert said == ["asked", "complete: 2"]


def test_a_package_that_is_there_is_asked_about_at_once(package: str) -> None:
    module: Any = importlib.import_module(package)
    when_found([(package, lambda: [(package, lambda module: setattr(module, "seen", 3))])])
    assert module.seen == 3


def test_what_an_ask_raises_ends_the_import(package: str) -> None:
    def ask() -> Iterator[tuple[str, Any]]:
        raise FeatureMissing("not there")

    when_found([(package, ask)])
    with pytest.raises(FeatureMissing):
        importlib.import_module(package)
    assert package not in sys.modules
