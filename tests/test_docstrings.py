"""Docstrings of what programs can call say what a caller needs, in Google's form; their examples run.

The form is that of the Google Python style guide, section 3.8, as torch and Lightning write it: `Args:`, `Returns:`,
`Raises:`, `Example:`. What programs can call is what tests/public_surface.txt lists.
"""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

import public_surface
from environments import REPOSITORY

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((REPOSITORY / "nbaccel").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
"""Headings, in the order in which they stand."""

UNNAMED = ("self", "cls", "args", "kwargs")
"""Parameters that need no entry; the last two are passed on to something that the docstring names."""


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    vars(builtins).pop("_", None)  # the last value of an example; IPython sets no `_` where the program has one
    assert not result.failed, f"{result.failed} of {result.attempted} lines differ; see the output"


def test_each_parameter_of_a_public_call_is_documented_under_args() -> None:
    """Of functions, methods and constructors. Enumerations, and classes that `prepare` makes, are not constructed."""
    wrong = [f"{path}: {', '.join(missing)}" for path, value in _callables() if (missing := _undocumented(value))]
    assert not wrong, "these parameters are not named under Args:\n" + "\n".join(wrong)


def test_what_a_public_call_returns_is_said() -> None:
    """Under Returns or Yields, or by a first line that begins with Return or Yield, as the style guide allows.

    A context manager that yields nothing, and a method that returns its own object, need not say so.
    """
    wrong = [path for path, value in _callables() if _returns(value) and not _says_what_it_returns(value)]
    assert not wrong, "these do not say what they return:\n" + "\n".join(wrong)


def test_sections_of_public_docstrings_stand_in_one_order_after_a_first_line_that_ends_a_sentence() -> None:
    wrong = []
    for path, value in _callables():
        text = inspect.getdoc(value) or ""
        found = re.findall(rf"^({'|'.join(SECTIONS)}):$", text, re.M)
        summary = re.split(r"\n\s*\n", text)[0].strip()
        if found != sorted(set(found), key=SECTIONS.index) or not re.search(r"[.!?:)]$", summary):
            wrong.append(f"{path}: {found}")
        wrong += [f"{path}: an example without a heading" for line in text.splitlines() if line.startswith(">>> ")]
    assert not wrong, "\n".join(wrong)


def _callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function, method and class of ours that tests/public_surface.txt lists, once."""
    seen: set[int] = set()
    for module_name, others in public_surface.MODULES.items():
        module = import_module(module_name)
        for name in sorted({*getattr(module, "__all__", ()), *others}):
            for path, value in _described(f"{module_name}.{name}", getattr(module, name)):
                if id(value) not in seen and _is_ours(value) and not re.match(r"nbaccel\.Run\b", path):
                    seen.add(id(value))
                    yield path, value


def _described(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        yield path, value
        for base in value.__mro__:
            for name, member in vars(base).items() if _is_ours(base) else ():
                plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                if not name.startswith("_") and inspect.isfunction(plain):
                    yield f"{path}.{name}", getattr(value, name)
    elif callable(value):
        yield path, value


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "nbaccel"


def _parameters(value: Any) -> list[str]:
    if isinstance(value, type):
        line = public_surface._class(value)
        if not line.startswith("class (") or value.__name__ in public_surface._MADE_BY_PREPARE:
            return []
        if issubclass(value, BaseException):
            return [name for name in inspect.signature(value).parameters if name != "message"]
        maker = next(vars(base) for base in value.__mro__ if {"__init__", "__new__"} & vars(base).keys())
        value = maker.get("__init__") or maker["__new__"]
    return [name for name in inspect.signature(value).parameters if name not in UNNAMED]


def _undocumented(value: Any) -> list[str]:
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", inspect.getdoc(value) or "", re.M)
    entries = re.findall(r"^ {4}([*\w, ]+)(?: \([^)]*\))?: \S", section[1], re.M) if section else []
    named = {name.strip("* ") for entry in entries for name in entry.split(",")}
    return [name for name in _parameters(value) if name not in named]


def _returns(value: Any) -> bool:
    if isinstance(value, type):
        return False
    annotation = str(inspect.signature(value).return_annotation)
    return annotation not in ("None", "Self", "NoReturn", "Iterator[None]", "AbstractContextManager[None]")


def _says_what_it_returns(value: Any) -> bool:
    text = inspect.getdoc(value) or ""
    return bool(re.match(r"Returns? |Yields? ", text) or re.search(r"^(Returns|Yields):$", text, re.M))
