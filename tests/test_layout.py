"""The package gets no further from its layout: what breaks a rule of tests/layout.py today is listed, and no more may.

An offender that is gone leaves the list, by the command that the failure names; the list never grows.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import layout
from layout import RULES, Layout, Source, layers, offenders, read, rings, weight, write


@functools.cache
def the_package() -> Layout:
    return Layout.of_the_package()


@functools.cache
def of_today() -> dict[str, list[str]]:
    return offenders(the_package())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_no_new_offender_and_forgets_those_that_are_gone(rule: str) -> None:
    known, now = set(read()[rule]), set(of_today()[rule])
    new = sorted(now - known)
    assert not new, (
        f"{RULES[rule].__doc__}\nThese do not follow it. Where files only moved, {layout.COMMAND}\n  "
        + "\n  ".join(new)
    )
    gone = sorted(known - now)
    assert not gone, f"good: these are gone, so take them from the list, {layout.COMMAND}\n  " + "\n  ".join(gone)


def test_every_list_belongs_to_a_rule() -> None:
    assert list(read()) == list(RULES)


def test_the_numbers_are_told() -> None:
    told = list(layout.numbers(the_package()))
    assert told[0].startswith("files / without __init__")
    assert told[-1].startswith("longest files")


def test_lines_of_code_are_neither_empty_nor_said() -> None:
    said = '"""A file."""\n\n# a comment\n'
    text = f'{said}x = 1  # and another\n\n\ndef f():\n    """Text.\n\n    More.\n    """\n    return x\n'
    assert layout._lines_of_code(text, ast.parse(text)) == 3


# -- the rules find what they are for


def example(**files: str) -> Layout:
    """A package of these files; `a__b` is the file a/b.py."""
    return Layout(
        Source(f"{name.replace('__', '/')}.py", ast.parse(code), len(code.splitlines())) for name, code in files.items()
    )


def test_rings_are_found_whichever_way_they_are_entered() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert rings(graph) == [{"b", "c"}]
    assert layers(graph) == 4  # e, a, the ring, d


def test_folders_that_import_each_other_are_offenders_and_files_that_do_not_are_none() -> None:
    package = example(
        train__data__loader="from nbaccel.train.step.window import Window",
        train__step__window="",
        train__step__clock="def f():\n    import nbaccel.train.data.order",
        train__data__order="",
    )
    assert sorted(layout.folders_in_a_ring(package)) == ["train/data -> train/step", "train/step -> train/data"]
    assert not list(layout.files_in_a_ring(package))
    one_way = example(train__data__loader="from nbaccel.train.step.window import Window", train__step__window="")
    assert not list(layout.folders_in_a_ring(one_way))


def test_a_subfolder_that_imports_a_file_above_it_is_an_offender() -> None:
    package = example(
        train__setup="from nbaccel.train.data.loader import Loader",
        train__data__loader="from ..state import State",
        train__state="",
    )
    assert list(layout.files_imported_from_below(package)) == ["train/data -> train/state.py"]


def test_a_name_of_a_module_that_a_function_changes_is_state() -> None:
    package = example(
        events="CURRENT = None\nTABLE = {}\nSEEN = []\nNAMES = {}\n"
        "def set_it():\n    global CURRENT\n    TABLE['a'] = 1\n    SEEN.append(2)\n    return NAMES['a']\n"
    )
    assert list(layout.state_of_modules(package)) == ["events.py: CURRENT", "events.py: SEEN", "events.py: TABLE"]


def test_questions_are_counted_by_file() -> None:
    code = "def f():\n    'What it is.'\ndef g():\n    'Whether it is.'\ndef h():\n    'Return it.'\n"
    found = list(layout.docstrings_that_begin_like_a_question(example(a=code)))
    assert found == ["a.py 2"]
    assert weight(found) == 2
    assert weight(["train/a.py: f", "b.py"]) == 2


def test_a_list_that_would_grow_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FILE", tmp_path / "offenders.txt")
    assert write({"one": ["a.py", "b.py"], "two": ["c.py 3"]}) == []
    assert write({"one": ["a.py", "moved.py"], "two": ["c.py 2", "d.py 2"]}) == ["two"]
    assert read() == {"one": ["a.py", "moved.py"], "two": ["c.py 3"]}
