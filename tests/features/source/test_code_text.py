"""The text of code: equal whoever wrote it and whichever Python reads it, and always that of the code that runs."""

from __future__ import annotations

import ast
import linecache
import warnings
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from nbaccel.features.source.code_text import (
    CODE,
    COMPILED,
    CodeTexts,
    canonical,
    mark_of_code,
    mark_of_text,
    mark_of_tree,
)


def function_in(path: Path, text: str, name: str = "f") -> FunctionType:
    """A function of a file."""
    path.write_text(text)
    linecache.checkcache(str(path))
    scope: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), scope)
    found: FunctionType = scope[name]
    return found


def mark(function: FunctionType) -> str:
    tree = CodeTexts().tree_of(function.__code__, function.__globals__)
    return mark_of_code(function.__code__) if tree is None else mark_of_tree(tree)


def test_comments_layout_and_docstrings_do_not_count(tmp_path: Path) -> None:
    one = function_in(tmp_path / "one.py", "def f(x):\n    return x + 1\n")
    two = function_in(tmp_path / "two.py", 'def f( x ):\n    "Says it."\n    # reason\n\n    return (x + 1)\n')
    three = function_in(tmp_path / "three.py", "def f(x):\n    return x + 2\n")
    assert mark(one) == mark(two) != mark(three)
    assert mark(one).startswith(CODE)


@pytest.mark.parametrize("above", ["@staticmethod\ndef f(x):", "class F(Base):"])
def test_a_docstring_counts_where_a_decorator_or_a_base_class_may_read_it(above: str) -> None:
    one, two = (canonical(ast.parse(f'{above}\n    "{text}"\n    y = 1')) for text in ("Answer.", "Answer briefly."))
    assert one != two


def test_a_function_of_nothing_but_a_docstring_is_one_that_passes() -> None:
    assert canonical(ast.parse("def f():\n    'x'")) == canonical(ast.parse("def f():\n    pass"))


@pytest.mark.parametrize(
    ("one", "two"),
    [("1", "1.0"), ("1", "True"), ("'a'", "b'a'"), ("'\u1234'", r"r'\u1234'"), ("(1,)", "[1]"), ("f(a)", "f(*a)"),
     ("{**a}", "{a}"), ("None", "0"), ("f'{a}'", "f'{a!r}'"), ("f'{a}b'", "f'b{a}'"), ("lambda: x", "lambda x: x")],
)  # fmt: skip
def test_what_differs_is_written_differently(one: str, two: str) -> None:
    assert canonical(ast.parse(f"x = {one}")) != canonical(ast.parse(f"x = {two}"))


@pytest.mark.parametrize(
    ("one", "two"),
    [("'ab'", "'a' \"b\""), ("f'{a}' 'b'", "f'{a}b'"), ("f'{a:}'", "f'{a}'"), ("1_000", "0x3e8"), ("u'a'", "'a'")],
)
def test_what_is_the_same_is_written_alike(one: str, two: str) -> None:
    assert canonical(ast.parse(f"x = {one}")) == canonical(ast.parse(f"x = {two}"))


def test_the_parts_of_an_f_string_are_joined_however_a_version_cuts_them() -> None:
    value = ast.FormattedValue(ast.Name("a", ast.Load()), -1, None)
    spec = ast.FormattedValue(ast.Name("a", ast.Load()), -1, ast.JoinedStr([ast.Constant("")]))
    one = ast.JoinedStr([ast.Constant("x"), ast.Constant("y"), value, ast.Constant("")])
    two = ast.JoinedStr([ast.Constant("xy"), spec])
    assert canonical(one) == canonical(two) == canonical(ast.parse("f'xy{a}'", mode="eval").body)


def lambdas_of(path: Path, text: str) -> list[FunctionType]:
    """All lambdas of a file whose code is at hand."""
    path.write_text(text)

    def codes(code: CodeType) -> list[CodeType]:
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        return [*inner, *(each for one in inner for each in codes(one))]

    found = codes(compile(text, str(path), "exec"))
    return [FunctionType(each, {}) for each in found if each.co_name == "<lambda>" and not each.co_freevars]


def test_of_several_lambdas_in_a_line_the_right_one_is_found(tmp_path: Path) -> None:
    text = "fs = [lambda: 1, lambda: 'a', lambda x: x + 1, lambda x: (lambda y: y + 1), lambda x: x or (1 if x else 2)]"
    texts = CodeTexts()
    found = [texts.tree_of(each.__code__, {}) for each in lambdas_of(tmp_path / "all.py", text)]
    alone = ["lambda: 1", "lambda: 'a'", "lambda x: x + 1", "lambda x: (lambda y: y + 1)"]
    alone += ["lambda x: x or (1 if x else 2)", "lambda y: y + 1"]
    assert sorted(map(canonical, found)) == sorted(canonical(ast.parse(each).body[0].value) for each in alone)


def test_a_lambda_counts_without_the_call_around_it(tmp_path: Path) -> None:
    one = function_in(tmp_path / "one.py", "f = (lambda x: x + 1)\n")
    two = function_in(tmp_path / "two.py", "f = sorted(\n    [(lambda x: x +\n     1)],\n    key=id)[0]\n")
    three = function_in(tmp_path / "three.py", "other = 1\nf, b = (lambda x: x + 1), 7\n")
    assert mark(one) == mark(two) == mark(three)
    assert mark(one).startswith(CODE)


def test_a_function_whose_file_was_edited_elsewhere_keeps_its_text(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    function = function_in(path, "def g():\n    return 1\n\n\ndef f(x):\n    return x + 1\n")
    before = mark(function)
    path.write_text("def g():\n    print()\n    print()\n    return 2\n\n\ndef f(x):\n    return x + 1\n")
    linecache.checkcache(str(path))
    assert mark(function) == before


def test_a_text_that_is_not_what_runs_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    function = function_in(path, "def f(x):\n    return x + 1\n")
    path.write_text("def f(x):\n    return x + 20\n")
    linecache.clearcache()
    assert mark(function).startswith(COMPILED)


def test_a_file_that_was_loaded_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    function_in(path, "def f(x):\n    return x + 1\n")
    linecache.getlines(str(path))
    path.write_text("def f(x):\n    return x + 200\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert mark(scope["f"]).startswith(CODE)


def test_of_a_cell_as_it_was_typed_the_magics_do_not_count() -> None:
    typed = "%%accelerate -n 2\n!ls\nf = lambda x: x + 1\n"
    scope: dict[str, Any] = {}
    exec(compile("\n\nf = lambda x: x + 1\n", "Cell In[77]", "exec"), scope)
    linecache.cache["Cell In[77]"] = (len(typed), None, typed.splitlines(keepends=True), "Cell In[77]")
    try:
        assert mark(scope["f"]) == mark_of_text("lambda x: x + 1")
    finally:
        del linecache.cache["Cell In[77]"]


def test_a_cell_is_compiled_statement_by_statement(tmp_path: Path) -> None:
    """Python calls a function of a module otherwise where it sees the import."""
    path = tmp_path / "cell.py"
    text = "import time\ndef f(x):\n    return time.sleep(x)\n"
    path.write_text(text)
    scope: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        exec(compile(ast.Module([statement], []), str(path), "exec"), scope)
    assert mark(scope["f"]) == mark(function_in(tmp_path / "file.py", text))


def test_code_without_a_text_is_known_by_its_instructions() -> None:
    scopes: list[dict[str, Any]] = [{}, {}, {}]
    for scope, text in zip(scopes, ["x + 1", "x  +  1", "x + 2"], strict=True):
        exec(f"\ndef f(x):\n    return {text}", scope)
    one, two, three = (mark(scope["f"]) for scope in scopes)
    assert one == two != three
    assert one.startswith(COMPILED)


@pytest.mark.parametrize("action", ["always", "error"])
def test_warnings_about_the_code_are_not_given_again(tmp_path: Path, action: Any) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("ignore")
        function = function_in(tmp_path / "one.py", "def f(x):\n    return x is 1 or '\\d'\n")
        warnings.simplefilter(action)
        assert mark(function).startswith(CODE)
        assert mark_of_text("lambda x: x is 1 or '\\d'").startswith(CODE)
    assert given == []


def test_what_an_older_version_printed_has_the_mark_of_its_function(tmp_path: Path) -> None:
    text = 'def f(x):\n    """Says it."""\n    return f"{x}a"\n'
    assert mark_of_text(ast.unparse(ast.parse(text))) == mark(function_in(tmp_path / "one.py", text))
    assert mark_of_text("builtins.len") == mark_of_text("not python (") == ""
