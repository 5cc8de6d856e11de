"""What is put into modules is made before, for those that are loaded, and put in place in one go."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbaccel.launching.ipc.import_hooks import Assignment, Change, Changes


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported, with a module that it imports."""
    folder = tmp_path / "changed_later"
    folder.mkdir()
    (folder / "__init__.py").write_text("from changed_later import inner\n")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "changed_later"
    sys.meta_path[:] = before
    for name in ("changed_later", "changed_later.inner"):
        sys.modules.pop(name, None)


def _two(module: Any) -> list[Change]:
    return [Assignment(module, "value", 2)]


def test_nothing_changes_before_all_is_put_in_place(package: str) -> None:
    inner: Any = importlib.import_module(f"{package}.inner")
    changes = Changes([(f"{package}.inner", _two)])
    assert inner.value == 1
    changes.put()
    assert inner.value == 2


def test_a_module_that_is_loaded_later_is_changed_then(package: str) -> None:
    Changes([(f"{package}.inner", _two)]).put()
    assert importlib.import_module(f"{package}.inner").value == 2


def test_a_module_that_is_loaded_before_the_changes_are_put_in_place_is_changed(package: str) -> None:
    changes = Changes([(f"{package}.inner", _two)])
    inner: Any = importlib.import_module(f"{package}.inner")
    changes.put()
    assert inner.value == 2


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_package_is_asked_about_its_modules(package: str, is_loaded: bool) -> None:
    if is_loaded:
        importlib.import_module(package)
    Changes(asks=[(package, lambda: [(f"{package}.inner", _two)])]).put()
    assert importlib.import_module(f"{package}.inner").value == 2


def test_a_module_that_was_loaded_anew_is_the_one_that_is_changed(package: str) -> None:
    importlib.import_module(f"{package}.inner")
    changes = Changes([(f"{package}.inner", _two)])
    del sys.modules[f"{package}.inner"]
    inner: Any = importlib.import_module(f"{package}.inner")
    changes.current().put()
    assert inner.value == 2


def test_what_does_not_fit_a_version_hinders_nothing_else(package: str) -> None:
    inner: Any = importlib.import_module(f"{package}.inner")

    def fails(module: Any) -> list[Change]:
        raise AttributeError("this version has another name for it")

    def fails_later(module: Any) -> list[Change]:
        return [Assignment(object, "value", 3), *_two(module)]

    Changes([(f"{package}.inner", fails), (f"{package}.inner", fails_later)]).put()
    assert inner.value == 2


def test_what_had_the_name_before_is_kept() -> None:
    class Kept:
        pass

    holder: Any = type("Holder", (), {"value": Kept()})
    before = id(holder.value)
    changes = Assignment(holder, "value", 2)
    changes()
    assert id(changes._kept) == before
