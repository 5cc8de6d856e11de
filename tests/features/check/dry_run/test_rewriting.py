"""Rewriting keeps the meaning of a program and its lines, and lets loops be ended and lines be counted."""

from __future__ import annotations

import ast
import asyncio
import builtins
import gc
import linecache
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbaccel.features.check.dry_run import rewriting
from nbaccel.features.check.dry_run.loop_log import LoopLog
from nbaccel.features.check.dry_run.rewriting import LOG, REACHED, Table, rewrite, rewrite_functions
from nbaccel.features.source import users_functions


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Provide a log, and return the lines that are reached."""
    lines: set[int] = set()
    monkeypatch.setattr(builtins, LOG, LoopLog(lambda record: None), raising=False)
    monkeypatch.setattr(builtins, REACHED, lines.add, raising=False)
    return lines


def run(text: str, marks_lines: bool = True) -> dict[str, Any]:
    tree = ast.parse(textwrap.dedent(text))
    rewrite(tree, marks_lines=marks_lines)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(tree, "program", "exec", dont_inherit=True), names)
    return names


def table_of(text: str) -> Table:
    return rewrite(ast.parse(textwrap.dedent(text)))


PROGRAMS = {
    "break, continue and else of loops": """
        seen = []
        for x in range(9):
            if x == 2: continue
            if x == 5: break
            seen.append(x)
        else:
            seen.append("never")
        while seen[-1] < 9:
            seen.append(seen[-1] + 1)
        else:
            seen.append("else")
    """,
    "loops in loops, in functions that return": """
        def first(rows, wanted):
            for number, row in enumerate(rows):
                for x in row:
                    while x > wanted:
                        x -= 1
                        if x == wanted:
                            return number
            return None
        seen = first([[1], [2, 3], [9]], 2), first([[1]], 5)
    """,
    "exceptions and finally": """
        seen = []
        for x in range(3):
            try:
                if x == 1: raise KeyError(x)
                seen.append(x)
            except KeyError as error:
                seen.append(error.args)
                continue
            else:
                seen.append("else")
            finally:
                seen.append("finally")
        try:
            for x in 5: pass
        except TypeError as error:
            seen.append(str(error))
    """,
    "periods": """
        seen = [[], []]
        for i in range(40):
            if i % 7 == 3: seen[0].append(i)
            elif not i % 5 and i: seen[0].append(-i)
            else: seen[0].append(0)
            if i % 4 != 0: continue
            seen[1].append(i)
            if i % 8:
                continue
            seen[1].append("8")
    """,
    "texts and numbers of numpy with a percent sign": """
        import numpy
        seen = []
        name = "a%d"
        for i in range(3):
            if "a%d" % i == "a1": seen.append(i)
            if name % i == "a2": seen.append(i)
            if (numpy.arange(4) % 2 == i).any(): seen.append("any")
    """,
    "comparisons are made once and in order": """
        seen = []
        def say(x):
            seen.append(x)
            return x
        n = 0
        while say(n) < say(3) and not say(n) >= say(2):
            n += 1
            if say(n) == say(7) or say("a") > say("b"):
                break
    """,
    "generators": """
        def numbers(n):
            for i in range(n):
                got = yield i
                if got: yield got
        seen = list(numbers(4)), [x for x in numbers(2) for _ in range(2)]
        g = numbers(3); next(g); seen += (g.send("sent"),)
        pairs = []
        for x in numbers(3):
            for y in numbers(2): pairs.append((x, y))
    """,
    "classes, closures and names of outer functions": """
        class A:
            values = []
            for i in range(3): values.append(i)
            def __init__(self): self.__n = 0
            def run(self):
                while self.__n < 5: self.__n += 1
                return self.__n
        def outer():
            count = 0
            def inner():
                nonlocal count
                for _ in range(4): count += 1
                return [lambda: k for k in range(2)][0]()
            return inner(), count
        seen = A().run(), A.values, outer()
    """,
    "names that are declared global and nonlocal, in several places": """
        seen, count, other = [], 0, 0
        def f(n):
            '''Text.'''
            if n:
                global count
                count += 1
            for i in range(n):
                global other
                other += i
            def g():
                nonlocal n
                for _ in range(3): n += 1
                return sorted(locals())
            return g(), n, sorted(locals()), f.__doc__
        seen = f(3), count, other
    """,
    "match and with": """
        import contextlib
        seen = []
        for x in [1, "a", (2, 3)]:
            with contextlib.nullcontext():
                match x:
                    case int(): seen.append("int")
                    case (a, b):
                        for each in (a, b): seen.append(each)
                    case _: continue
    """,
    "a docstring and an import of the future": '''
        """Text."""
        from __future__ import annotations
        def f(x: unknown) -> unknown:
            """Text of f."""
            return 1
        seen = __doc__, f.__doc__, f(1), f.__annotations__
    ''',
    "the loop's iterable is given up when it ends": """
        import weakref
        class Batch: pass
        kept = []
        for batch in (Batch() for _ in range(3)):
            kept.append(weakref.ref(batch))
            del batch
            if kept[-1]() is not None: kept.append("alive")
        seen = [ref() for ref in kept]
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rewritten_program_does_the_same(name: str, reached: set[int]) -> None:
    plain: dict[str, Any] = {"__name__": "program"}
    exec(compile(textwrap.dedent(PROGRAMS[name]), "program", "exec", dont_inherit=True), plain)
    for marks_lines in (False, True):
        names = run(PROGRAMS[name], marks_lines)
        assert names["seen"] == plain["seen"]
        assert sorted(names) == sorted(plain), "no new names"


def test_tracebacks_keep_the_lines_of_the_user(reached: set[int]) -> None:
    text = """
        def train(rows):
            for row in rows:
                while True:
                    if row % 1 == 0:
                        row / 0
        train([1])
    """
    with pytest.raises(ZeroDivisionError) as caught:
        run(text)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == "program"]
    assert lines == [7, 6]


def test_the_table_names_each_place() -> None:
    table = table_of("""
        def fit(loader):
            for epoch in range(9):
                for x in loader:
                    if step % 100 == 0 and is_main:
                        save()
                    if step >= most or loss < 0.1:
                        return
                while (left := left - 1) > 0:
                    pass
    """)
    assert [entry["number"] for entry in table] == list(range(len(table)))
    said = [(entry["kind"], entry["line"], entry["head"]) for entry in table]
    assert said == [
        ("for", 3, "for epoch in range(9)"),
        ("for", 4, "for x in loader"),
        ("every", 5, "step % 100 == 0"),
        ("branch", 6, "if step % 100 == 0 and is_main"),
        ("compare", 7, "step >= most"),
        ("compare", 7, "loss < 0.1"),
        ("while", 9, "while (left := (left - 1)) > 0"),
        ("compare", 9, "(left := (left - 1)) > 0"),
    ]
    assert table[3]["every"] == [2]
    assert (table[4]["ends"], table[4]["when"]) == ([0, 1], True)
    assert (table[7]["ends"], table[7]["when"]) == ([6], False)


@pytest.mark.parametrize(
    ("test", "ends"),
    [
        ("step >= 9", ["step >= 9"]),
        ("done and step >= 9", []),
        ("most is not None and step >= most", ["step >= most"]),
        ("most > 0 and step >= most", ["step >= most"]),
        ("ready() and step >= most", []),
        ("not step < 9", ["step < 9"]),
        ("1 < step < 9", []),
        ("1 < 2", []),
    ],
)
def test_a_comparison_ends_a_loop_if_it_alone_decides(test: str, ends: list[str]) -> None:
    table = table_of(f"while True:\n    if {test}:\n        break")
    assert [entry["head"] for entry in table if entry["kind"] == "compare"] == ends


def test_loops_of_coroutines_generators_compiled_functions_and_such_for_single_samples_stay(reached: set[int]) -> None:
    text = """
        def compile(*_): return lambda function: function
        @compile(3)
        def compiled(n):
            for x in range(n):
                if x % 2 == 0: pass
        def numbers():
            for x in range(3):
                while x:
                    yield x
        async def f():
            for x in range(3): pass
            return x
        class Data:
            def __getitem__(self, i):
                for x in range(i): pass
                return x
        class Model:
            def forward(self, x):
                for layer in range(x):
                    if layer % 2 == 0: pass
                return layer
    """
    assert table_of(text) == []
    assert asyncio.run(run(text)["f"]()) == 2


def test_a_sum_of_hundreds_of_terms_is_no_error() -> None:
    terms = " + ".join(["'a'"] * 400)
    tree = ast.parse(f"def f():\n    for x in []: pass\n    return {terms}\n")
    before = ast.dump(tree.body[0].body[1])  # type: ignore[attr-defined]
    rewrite(tree, marks_lines=True)
    (choice,) = [each for each in tree.body[-1].body if isinstance(each, ast.If)]  # type: ignore[attr-defined]
    assert ast.dump(choice.body[1]) == before
    names: dict[str, Any] = {}
    exec(compile(tree, "cell", "exec"), {REACHED: print}, names)


def test_many_loops_inside_of_each_other_can_be_compiled() -> None:
    lines = [f"{'    ' * depth}for i{depth} in range(3):" for depth in range(12)]
    tree = ast.parse("\n".join([*lines, "    " * 12 + "pass"]))
    assert len(rewrite(tree)) == 7
    compile(tree, "cell", "exec")


def test_each_statement_that_begins_is_marked(reached: set[int]) -> None:
    text = '''
    """Text."""
    a = 1
    if a:
        b = (
            2)
    else:
        c = 3
    def f():
        """Text."""
        return 1
    '''
    run(text)
    assert reached == {3, 4, 5, 9}


def test_no_new_names_are_left_by_a_loop_that_was_ended(reached: set[int]) -> None:
    names = run("for i in range(3):\n    if i == 1: break")
    assert set(names) == {"__name__", "__builtins__", "i"}


@pytest.mark.slow  # torch loads its compiler
def test_functions_that_torch_compiles_are_as_they_were(reached: set[int], tmp_path: Path) -> None:
    text = """
        import torch
        def repeated(x, n):
            for k in range(n):
                if k % 2 == 0: x = x + k
            while k < 9:
                k += 1
                x = 2 * x
            return x
        class Model(torch.nn.Module):
            def forward(self, x):
                return repeated(x, 3)
        compiled = torch.compile(repeated, backend="eager", fullgraph=True)
        model = torch.compile(Model(), backend="eager", fullgraph=True)
        seen = [f.tolist() for f in (compiled(torch.ones(1), 4), model(torch.ones(1)), repeated(torch.ones(1), 4))]
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(text))
    tree = ast.parse(file.read_text())
    rewrite(tree, marks_lines=True)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(tree, str(file), "exec", dont_inherit=True), names)
    assert names["seen"] == [[192], [384], [192]]


def test_a_function_runs_as_it_was_in_a_process_that_has_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse("def f(n):\n    for i in range(n): pass\n    return i, sorted(locals())")
    rewrite(tree, marks_lines=True)
    names: dict[str, Any] = {}
    monkeypatch.setattr(builtins, REACHED, lambda line: None, raising=False)
    exec(compile(tree, "program", "exec", dont_inherit=True), names)
    assert not hasattr(builtins, LOG)
    assert names["f"](3)[0] == 2


# --- functions that exist


def module_of(text: str, name: str) -> types.ModuleType:
    """Return a module whose lines Python knows, as those of a cell."""
    text = textwrap.dedent(text)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("made")
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    return module


@pytest.fixture
def cell() -> Iterator[Callable[[str], types.ModuleType]]:
    yield lambda text: module_of(text, "Cell In[77]")
    linecache.cache.pop("Cell In[77]", None)


def rewrite_cell() -> Table:
    return rewrite_functions(100, lambda name: name == "Cell In[77]")


TEXT = """
import functools
from dataclasses import dataclass

def plain(n):
    for i in range(n): pass
    return i

def decorated(function):
    @functools.wraps(function)
    def call(*args):
        for attempt in range(1): return function(*args)
    return call

@decorated
def with_decorator(n):
    while n > 3: n -= 1
    return n

@dataclass
class Trainer:
    n: int = 5
    def fit(self):
        for epoch in range(self.n): pass
        return epoch
    @classmethod
    def of(cls): return [cls(k) for k in range(2)]

def counter(start):
    count = start
    def up(n):
        nonlocal count
        for _ in range(n): count += 1
        return count
    return up

up = counter(10)
small = lambda n: n
"""


def uses_log(function: Any) -> bool:
    return LOG in function.__code__.co_names


def test_functions_methods_closures_and_decorated_ones_are_rewritten(
    reached: set[int], cell: Callable[[str], types.ModuleType]
) -> None:
    module = cell(TEXT)
    before = module.plain
    table = rewrite_cell()
    assert [entry["head"] for entry in table if entry["kind"] in ("for", "while")] == [
        "for i in range(n)",
        "for attempt in range(1)",
        "while n > 3",
        "for epoch in range(self.n)",
        "for _ in range(n)",
    ]
    assert table[0]["number"] == 100
    assert {entry["file"] for entry in table} == {"Cell In[77]"}
    assert module.plain is before
    rewritten = [module.plain, module.with_decorator.__wrapped__, module.with_decorator, module.Trainer.fit, module.up]
    assert all(map(uses_log, rewritten))
    assert (module.plain(4), module.with_decorator(9), module.Trainer().fit(), module.up(3)) == (3, 3, 4, 13)
    assert module.up(2) == 15


def test_the_text_of_a_cell_may_have_magics(reached: set[int], cell: Callable[[str], types.ModuleType]) -> None:
    module = cell("\n\ndef f(n):\n    for i in range(n): pass\n    return i\n")
    lines = ["%%accelerate -n 2\n", "!pip list\n", *linecache.cache["Cell In[77]"][2][2:]]
    linecache.cache["Cell In[77]"] = (1, None, lines, "Cell In[77]")
    assert rewrite_cell()
    assert uses_log(module.f)
    assert module.f(3) == 2


def test_functions_are_found_after_a_fork_has_frozen_all_objects(
    reached: set[int], cell: Callable[[str], types.ModuleType]
) -> None:
    module = cell("def f(n):\n    for i in range(n): pass\n    return i\n")
    gc.freeze()
    rewrite_cell()
    assert uses_log(module.f)
    assert gc.get_freeze_count() > 0


def test_a_function_whose_file_was_edited_is_left_alone(
    reached: set[int], cell: Callable[[str], types.ModuleType]
) -> None:
    module = cell("def f(n):\n    for i in range(n): pass\n    return i\n")
    text = "def f(n):\n    for i in range(n): n += 1\n    return -i\n"
    linecache.cache["Cell In[77]"] = (len(text), None, text.splitlines(keepends=True), "Cell In[77]")
    assert rewrite_cell() == []
    assert not uses_log(module.f)


def test_a_text_that_is_no_python_is_no_error(reached: set[int], cell: Callable[[str], types.ModuleType]) -> None:
    module = cell("def f(n):\n    for i in range(n): pass\n    return i\n")
    linecache.cache["Cell In[77]"] = (1, None, ["def f(n:\n"], "Cell In[77]")
    assert rewrite_cell() == []
    assert module.f(2) == 1


@pytest.mark.parametrize(
    ("name", "is_rewritable"),
    [
        (__file__, True),
        (linecache.__file__, False),
        (pytest.__file__, False),
        (rewriting.__file__, False),
        ("<string>", False),
    ],
)
def test_only_files_of_the_user_are_rewritten(name: str, is_rewritable: bool) -> None:
    assert users_functions.is_rewritable(name) is is_rewritable


def test_a_dataclass_keeps_its_own_methods(reached: set[int], cell: Callable[[str], types.ModuleType]) -> None:
    @dataclass
    class Point:
        x: int = 1

    rewrite_cell()
    assert Point() == Point(1)


def test_cells_and_the_working_folder_come_before_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for folder in ("here", "library"):
        (tmp_path / folder).mkdir()
        for name in ("a.py", "b.py"):
            names.append(str(tmp_path / folder / name))
            Path(names[-1]).write_text("def f(n):\n    for i in range(n):\n        pass\n")
    monkeypatch.chdir(tmp_path / "here")
    functions = []
    for name in names:
        found: dict[str, Any] = {}
        exec(compile(Path(name).read_text(), name, "exec"), found)
        functions.append(found["f"])
    monkeypatch.setattr(users_functions, "_MOST_LINES", 9)
    monkeypatch.setattr(users_functions, "_functions", lambda: iter(functions))
    assert [entry["file"] for entry in rewrite_functions(0, names.__contains__)] == names[:3]


class NotToBeCopied:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("a node that all trees share was copied, with what a traceback has given it")


def test_what_tracebacks_give_to_nodes_is_not_copied() -> None:
    tree = ast.parse("def f(n):\n    for i in range(n):\n        n = -n + 1 if n < 1 and n else n")
    shared = [node for node in ast.walk(tree) if not hasattr(node, "lineno") and not list(ast.iter_child_nodes(node))]
    for node in shared:
        node.parent = NotToBeCopied()  # type: ignore[attr-defined]
    try:
        assert rewrite(tree)
    finally:
        for node in {id(node): node for node in shared}.values():
            del node.parent  # type: ignore[attr-defined]
