"""What a function computes by: a changed helper or constant is named, and what cannot be compared stops nobody."""

from __future__ import annotations

import itertools
import json
import linecache
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from features.source import marked_program
from nbaccel.features.source.code_text import CODE
from nbaccel.features.source.source_mark import SourceMark

NUMBERS = itertools.count()


def notebook(text: str, name: str = "f", **names: Any) -> Any:
    """A name of a notebook after one cell, whose text is found as IPython keeps it."""
    cell = f"<cell {next(NUMBERS)}>"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(text, cell, "exec", dont_inherit=True), space)
    return space[name]


def difference(one: str, two: str, names: dict[str, Any] | None = None, others: dict[str, Any] | None = None) -> str:
    """What is different in the second notebook, whose names are those of the first unless there are others."""
    names = names or {}
    before = SourceMark.of(notebook(one, **names))
    after = SourceMark.of(notebook(two, **(names if others is None else others)))
    return after.difference(json.loads(json.dumps(before.names)))


def test_of_many_constants_each_counts() -> None:
    names = [f"c{number}" for number in range(250)]
    text = f"def f():\n    return [{', '.join(names)}]\n"
    values = dict.fromkeys(names, 1)
    mark = SourceMark.of(notebook(text, **values), is_strict=True)
    assert len(mark.names) <= 202
    for changed in (names[0], names[-1], names[100]):
        assert SourceMark.of(notebook(text, **values | {changed: 2}), is_strict=True).digest != mark.digest


COUNTS = "def make(n):\n    def g(x):\n        nonlocal n\n        n += 1\n        return x\n    return g\n"
OBJECT = "class C:\n    def __init__(self, n):\n        self.n = n\n    def __call__(self, x):\n        return x\n"
READS = "def f(x):\n    return {}\n"
CHANGED: dict[str, tuple[str, str, str]] = {
    "itself": ("def f(x):\n    return x\n", "def f(x):\n    return x + 1\n", "its source has changed"),
    "a number": (
        "N = 32\n" + READS.format("x[:N]"),
        "N = 64\n" + READS.format("x[:N]"),
        "N was 32 then, and is 64 now",
    ),
    "a text": ("P = 'a'\n" + READS.format("P"), "P = 'é'\n" + READS.format("P"), "P was 'a' then, and is \"é\" now"),
    "a long text": ("P = 'a' * 99\n" + READS.format("P"), "P = 'b' * 99\n" + READS.format("P"), "P has changed"),
    "the kind of a number": (
        "N = 1\n" + READS.format("N"),
        "N = 1.0\n" + READS.format("N"),
        "N was 1 then, and is 1.0",
    ),
    "a short list": (
        "E = ['a', 1]\n" + READS.format("E"),
        "E = ['b', 1]\n" + READS.format("E"),
        "E was ['a', 1] then, and is ['b', 1] now",
    ),
    "a dict": (
        "C = {'k': 1}\n" + READS.format("C"),
        "C = {'k': 2}\n" + READS.format("C"),
        "C was {'k': 1} then, and is {'k': 2} now",
    ),
    "a long tuple": (
        "T = (1,) * 999\n" + READS.format("T"),
        "T = (2,) * 999\n" + READS.format("T"),
        "T has changed",
    ),
    "a helper": (
        "def g(x):\n    return x\n" + READS.format("g(x)"),
        "def g(x):\n    return -x\n" + READS.format("g(x)"),
        "g() has changed",
    ),
    "a helper of a helper, in a ring": (
        "def g(x):\n    return h(x)\ndef h(x):\n    return g(x) or f\n" + READS.format("g(x)"),
        "def g(x):\n    return h(x)\ndef h(x):\n    return g(x) and f\n" + READS.format("g(x)"),
        "h() has changed",
    ),
    "a name of another helper": (
        "def a(x):\n    return 1\ndef b(x):\n    return 2\ng = a\n" + READS.format("g(x)"),
        "def a(x):\n    return 1\ndef b(x):\n    return 2\ng = b\n" + READS.format("g(x)"),
        "g has changed",
    ),
    "a function of a package": (
        "from json import loads as g\n" + READS.format("g(x)"),
        "from pickle import loads as g\n" + READS.format("g(x)"),
        "g has changed",
    ),
    "a helper behind a package's decorator": (
        "import functools\n@functools.cache\ndef g(x):\n    return x\n" + READS.format("g(x)"),
        "import functools\n@functools.cache\ndef g(x):\n    return -x\n" + READS.format("g(x)"),
        "g() has changed",
    ),
    "a helper behind a decorator of the notebook": (
        "def d(g):\n    return lambda x: g(x)\n@d\ndef g(x):\n    return x\n" + READS.format("g(x)"),
        "def d(g):\n    return lambda x: g(x)\n@d\ndef g(x):\n    return -x\n" + READS.format("g(x)"),
        "g in g() has changed",
    ),
    "a method": (
        "class C:\n    def m(self):\n        return 1\n" + READS.format("C().m()"),
        "class C:\n    def m(self):\n        return 2\n" + READS.format("C().m()"),
        "C.m() has changed",
    ),
    "a property": (
        "class C:\n    @property\n    def m(self):\n        return 1\n" + READS.format("C().m"),
        "class C:\n    @property\n    def m(self):\n        return 2\n" + READS.format("C().m"),
        "C.m() has changed",
    ),
    "a new method": (
        "class C:\n    a = 1\n" + READS.format("C()"),
        "class C:\n    a = 1\n    def __len__(self):\n        return 2\n" + READS.format("C()"),
        "C has changed",
    ),
    "a method of a base class": (
        "class B:\n    def m(self):\n        return 1\nclass C(B):\n    pass\n" + READS.format("C().m()"),
        "class B:\n    def m(self):\n        return 2\nclass C(B):\n    pass\n" + READS.format("C().m()"),
        "B.m() has changed",
    ),
    "settings in a class": (
        "class CFG:\n    size = 1\n" + READS.format("CFG.size"),
        "class CFG:\n    size = 2\n" + READS.format("CFG.size"),
        "CFG.size was 1 then, and is 2 now",
    ),
    "settings in an object": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    size: int\nc = C(1)\n" + READS.format("c.size"),
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    size: int\nc = C(2)\n" + READS.format("c.size"),
        "c.size was 1 then, and is 2 now",
    ),
    "an attribute of an object that was its class's": (
        "class C:\n    n = 'a'\nc = C()\n" + READS.format("c.n"),
        "class C:\n    n = 'a'\nc = C()\nc.n = 'b'\n" + READS.format("c.n"),
        "c.n was 'a' then, and is 'b' now",
    ),
    "an attribute of an object that is its class's again": (
        "class B:\n    n = 1\nclass C(B):\n    n = 2\nc = C()\nc.n = 3\n" + READS.format("c.n"),
        "class B:\n    n = 1\nclass C(B):\n    n = 2\nc = C()\n" + READS.format("c.n"),
        "c.n was 3 then, and is 2 now",
    ),
    "a constant that became data": (
        "S = None\n" + READS.format("S"),
        "S = [1] * 101\n" + READS.format("S"),
        "S was None then, and is data now",
    ),
    "data that became a constant": (
        "S = [1] * 101\n" + READS.format("S"),
        "S = [1] * 2\n" + READS.format("S"),
        "S was data then, and is [1, 1] now",
    ),
    "a number that became a tensor": (
        "import torch\nW = 2\n" + READS.format("W"),
        "import torch\nW = torch.zeros(2, device='cpu')\n" + READS.format("W"),
        "W was 2 then, and is an object now",
    ),
    "what is called like a parameter of an inner function": (
        "S = {}\ndef f(x):\n    def g(S):\n        S[1] = x\n    return g, S\n",
        "S = {1: 1}\ndef f(x):\n    def g(S):\n        S[1] = x\n    return g, S\n",
        "S was {} then, and is {1: 1} now",
    ),
    "what is called like a name that an inner function assigns": (
        "S = []\ndef f(x):\n    def g():\n        S = []\n        lambda: S.append(x)\n    return g, S\n",
        "S = [1]\ndef f(x):\n    def g():\n        S = []\n        lambda: S.append(x)\n    return g, S\n",
        "S was [] then, and is [1] now",
    ),
    "a choice of an enumeration": (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\nc = E.A\n" + READS.format("c"),
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\nc = E.B\n" + READS.format("c"),
        "c was E.A 1 then, and is E.B 2 now",
    ),
    "what a closure holds": (
        "def make(n):\n    def g(x):\n        return x + n\n    return g\nf = make(1)\n",
        "def make(n):\n    def g(x):\n        return x + n\n    return g\nf = make(2)\n",
        "n in g() was 1 then, and is 2 now",
    ),
    "a default": (
        "N = 1\ndef f(x, n=N, *, k=3):\n    return x\n",
        "N = 2\ndef f(x, n=N, *, k=3):\n    return x\n",
        "n of f() was 1 then, and is 2 now",
    ),
    "an argument of a partial": (
        "import functools\ndef g(x, n):\n    return x\nf = functools.partial(g, n=1)\n",
        "import functools\ndef g(x, n):\n    return x\nf = functools.partial(g, n=2)\n",
        "n of the partial was 1 then, and is 2 now",
    ),
    "the function of a partial": (
        "import functools\ndef g(x, n):\n    return x\nf = functools.partial(g, 1)\n",
        "import functools\ndef g(x, n):\n    return n\nf = functools.partial(g, 1)\n",
        "g() has changed",
    ),
    "an attribute of an object that is called": (
        OBJECT + "f = C(1)\n",
        OBJECT + "f = C(2)\n",
        "its C.n was 1 then, and is 2 now",
    ),
    "an attribute of the object of a method": (
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def m(self, x):\n        return x\nf = C(1).m\n",
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def m(self, x):\n        return x\nf = C(2).m\n",
        "its C.n was 1 then, and is 2 now",
    ),
    "a method behind a package's decorator": (
        "import torch\nclass C:\n    @torch.no_grad()\n    def __call__(self, x):\n        return x\nf = C()\n",
        "import torch\nclass C:\n    @torch.no_grad()\n    def __call__(self, x):\n        return -x\nf = C()\n",
        "C.__call__() has changed",
    ),
    "a method that is given": (
        "class C:\n    def m(self, x):\n        return x\nf = C().m\n",
        "class C:\n    def m(self, x):\n        return -x\nf = C().m\n",
        "its source has changed",
    ),
    "an attribute in a slot": (
        "class C:\n    __slots__ = ('n',)\nc = C()\nc.n = 1\n" + READS.format("c.n"),
        "class C:\n    __slots__ = ('n',)\nc = C()\nc.n = 2\n" + READS.format("c.n"),
        "c.n was 1 then, and is 2 now",
    ),
    "a named tuple": (
        "from collections import namedtuple\nT = namedtuple('T', 'a b')(1, 2)\n" + READS.format("T.a"),
        "from collections import namedtuple\nT = namedtuple('T', 'a b')(1, 3)\n" + READS.format("T.a"),
        "T was (1, 2) then, and is (1, 3) now",
    ),
    "a function in a dict": (
        "def g(x):\n    return 1\nD = {'g': g}\n" + READS.format("D['g'](x)"),
        "def g(x):\n    return 2\nD = {'g': g}\n" + READS.format("D['g'](x)"),
        "g() has changed",
    ),
    "a type of tensors": (
        "import torch\nT = torch.float16\n" + READS.format("x.to(T)"),
        "import torch\nT = torch.bfloat16\n" + READS.format("x.to(T)"),
        "T was torch.float16 then, and is torch.bfloat16 now",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_changed_is_named(case: str) -> None:
    one, two, words = CHANGED[case]
    assert difference(one, two).startswith(words)
    assert difference(one, one) == ""


def test_code_without_a_text_is_said_to_have_none() -> None:
    one, two = {"__name__": "__main__"}, {"__name__": "__main__"}
    exec("def f(x):\n    return x", one)
    exec("def f(x):\n    return -x", two)
    words = "its code has changed, or it has no text and Python has"
    assert SourceMark.of(one["f"]).difference(SourceMark.of(two["f"]).names) == words
    assert SourceMark.of(one["f"]).difference(SourceMark.of(one["f"]).names) == ""


def test_of_many_changes_three_are_named() -> None:
    reads = READS.format("[a, b, c, d, e]")
    one, two = ("".join(f"{name} = {value}\n" for name in "abcde") + reads for value in (1, 2))
    assert difference(one, two).endswith("c was 1 then, and is 2 now; 2 more names differ")


NOT_COUNTED: dict[str, tuple[str, str]] = {
    "a comment": ("def f(x):\n    return x\n", "def f(x):\n    # why\n    return x\n"),
    "what is not read": ("N = 1\ndef f(x):\n    return x\n", "N = 2\ndef f(x):\n    return x\n"),
    "a long list": ("L = [1] * 101\n" + READS.format("L"), "L = [2] * 101\n" + READS.format("L")),
    "a cache": (
        "S = {}\ndef f(x):\n    if x not in S:\n        S[x] = 1\n    return S[x]\n",
        "S = {1: 1}\ndef f(x):\n    if x not in S:\n        S[x] = 1\n    return S[x]\n",
    ),
    "a cache of a helper": (
        "S = {}\ndef g(x):\n    S[x] = 1\ndef f(x):\n    return S.get(x) or g(x)\n",
        "S = {1: 1}\ndef g(x):\n    S[x] = 1\ndef f(x):\n    return S.get(x) or g(x)\n",
    ),
    "a list to which an inner function appends": (
        "S = []\ndef f(x):\n    [S for S in x]\n    def g(y):\n        [S for S in y]\n        S.append(y)\n"
        "    return g, S\n",
        "S = [1]\ndef f(x):\n    [S for S in x]\n    def g(y):\n        [S for S in y]\n        S.append(y)\n"
        "    return g, S\n",
    ),
    "a count in an inner function": (
        "N = 0\ndef f(x):\n    def g():\n        global N\n        N += 1\n    return g\n",
        "N = 7\ndef f(x):\n    def g():\n        global N\n        N += 1\n    return g\n",
    ),
    "a count": (
        "N = 0\ndef f(x):\n    global N\n    N += 1\n    return x\n",
        "N = 7\ndef f(x):\n    global N\n    N += 1\n    return x\n",
    ),
    "a count in a closure": (
        COUNTS + "f = make(0)\n",
        COUNTS + "f = make(7)\n",
    ),
    "a count in an object": (
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def __call__(self, x):\n"
        "        self.n += 1\nf = C(0)\n",
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def __call__(self, x):\n"
        "        self.n += 1\nf = C(7)\n",
    ),
    "an attribute that it sets": (
        "class C:\n    n = 0\ndef f(x):\n    C.n = x\n    return C.n\n",
        "class C:\n    n = 7\ndef f(x):\n    C.n = x\n    return C.n\n",
    ),
    "a list of long lists": ("L = [[1] * 60] * 2\n" + READS.format("L"), "L = [[2] * 60] * 2\n" + READS.format("L")),
    "a list that it appends to": (
        "S = []\ndef f(x):\n    S.append(x)\n",
        "S = [1, 2]\ndef f(x):\n    S.append(x)\n",
    ),
    "an attribute of a class that it sets, read in an object": (
        "class C:\n    n = 0\nc = C()\ndef f(x):\n    C.n = x\n    return c.n\n",
        "class C:\n    n = 7\nc = C()\ndef f(x):\n    C.n = x\n    return c.n\n",
    ),
    "a cache that has become long": (
        "S = {}\ndef f(x):\n    S[x] = 1\n    return S\n",
        "S = dict.fromkeys(range(200))\ndef f(x):\n    S[x] = 1\n    return S\n",
    ),
    "a list of data that became an array": (
        "A = [0] * 200\n" + READS.format("A"),
        "import numpy\nA = numpy.zeros(200)\n" + READS.format("A"),
    ),
    "a number that became a device": (
        "import torch\nD = 0\n" + READS.format("D"),
        "import torch\nD = torch.device('cuda:0')\n" + READS.format("D"),
    ),
    "a place that was none": (
        "from pathlib import Path\nP, API_KEY = None, None\n" + READS.format("P, API_KEY"),
        "from pathlib import Path\nP, API_KEY = Path('/b'), 'key'\n" + READS.format("P, API_KEY"),
    ),
    "a device": ("D = 'cuda:1'\n" + READS.format("x.to(D)"), "D = 'cpu'\n" + READS.format("x.to(D)")),
    "a path": (
        "from pathlib import Path\nP = Path('/a')\n" + READS.format("P"),
        "from pathlib import Path\nP = Path('/b')\n" + READS.format("P"),
    ),
    "a constant that became a model": (
        "import torch\nM = None\n" + READS.format("M(x)"),
        "import torch\nM = torch.nn.Linear(1, 1, device='cpu')\n" + READS.format("M(x)"),
    ),
    "data in a partial": (
        "import functools, torch\ndef g(d, x):\n    return x\nf = functools.partial(g, torch.zeros(2, device='cpu'))\n",
        "import functools, torch\ndef g(d, x):\n    return x\nf = functools.partial(g, torch.ones(2, device='cpu'))\n",
    ),
}


@pytest.mark.parametrize("case", NOT_COUNTED)
def test_what_does_not_count_stops_nobody(case: str) -> None:
    one, two = NOT_COUNTED[case]
    assert difference(one, two) == ""


@pytest.mark.parametrize("case", [case for case in NOT_COUNTED if case not in ("a comment", "what is not read")])
def test_a_sweep_counts_all_that_is_plain(case: str) -> None:
    """It would take an old run for the same; a map would refuse to go on."""
    one, two = (SourceMark.of(notebook(text), is_strict=True) for text in NOT_COUNTED[case])
    has_data = case == "data in a partial"
    assert (one.digest == two.digest) is has_data
    assert one.uncounted == (("argument 1",) if has_data else ())


def test_secrets_are_not_written_and_a_new_one_stops_nobody() -> None:
    text = "API_KEY, LIKE_ONE, PAD_TOKEN = 'short', 'hf_aBcDeFgHiJkLmNoPqRsT', '<pad>'\n"
    text += READS.format("[API_KEY, LIKE_ONE, PAD_TOKEN]")
    written = SourceMark.of(notebook(text)).names
    assert "API_KEY" not in written
    assert written["LIKE_ONE"].startswith("# str ")
    assert written["PAD_TOKEN"] == "= '<pad>'"
    assert difference(text, text.replace("short", "other")) == ""
    assert difference(text, text.replace("_aB", "_AB")) == "LIKE_ONE has changed"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("PASSWORD_PROMPT = 'Is it {} one?'\n" + READS.format("PASSWORD_PROMPT"), "PASSWORD_PROMPT"),
        ("SECRETARY = '{}'\n" + READS.format("SECRETARY"), "SECRETARY"),
        (
            "P = '{}'\ndef has_secret(x, prompt=P):\n    return x\n" + READS.format("has_secret(x)"),
            "prompt of has_secret()",
        ),
    ],
)
def test_what_is_only_named_after_secrets_counts_and_is_not_written(text: str, name: str) -> None:
    one, two = (text.replace("{}", word) for word in ("short", "other"))
    assert difference(one, two) == f"{name} has changed"
    assert "short" not in json.dumps(SourceMark.of(notebook(one)).names)


def test_of_objects_that_a_package_defines_the_class_counts() -> None:
    model = torch.nn.Linear(2, 2, device="cpu")
    assert SourceMark.of(model).digest == SourceMark.of(torch.nn.Linear(3, 3, device="cpu")).digest
    assert SourceMark.of(model).digest != SourceMark.of(torch.nn.ReLU()).digest


@pytest.mark.parametrize("function", [len, str.upper, "a".upper, torch.relu, dict, max, SimpleNamespace().__eq__])
def test_what_has_no_source_has_its_name(function: Callable[..., Any]) -> None:
    (only,) = SourceMark.of(function).names
    assert SourceMark.of(function).digest != SourceMark.of(min).digest
    assert only == ""


def test_functions_of_another_file_of_the_users_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_helpers.py").write_text("N = 1\ndef clean(x):\n    return x + N\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_helpers  # type: ignore[import-not-found]

    read = SourceMark.of(notebook(READS.format("clean(x)"), clean=my_helpers.clean))
    assert read.names["clean"] == "name my_helpers.clean"
    assert "N" not in read.names
    assert SourceMark.of(my_helpers.clean).names["N"] == "= 1"  # where it is the function itself, its file counts


class Hostile:
    """An object that answers wrongly to everything."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def test_no_code_of_the_values_runs() -> None:
    itself: list[Any] = []
    itself.append(itself)
    names = {"h": Hostile(), "hs": [Hostile()], "itself": itself, "m": torch.nn.Linear(1, 1, device="cpu")}
    mark = SourceMark.of(notebook(READS.format("[h, hs, itself, m]"), **names))
    uncounted = ("uncounted data", "uncounted an object")
    assert {name for name, mark in mark.names.items() if mark not in uncounted} == {""}
    SourceMark.of(notebook(READS.format("[h, hs, itself, m]"), **names), is_strict=True)


def test_a_program_of_many_names_stays_small() -> None:
    text = "".join(f"def g{n}(x):\n    return {n}\n" for n in range(300))
    reads = READS.format(f"[{', '.join(f'g{n}' for n in range(300))}]")
    mark = SourceMark.of(notebook(text + reads))
    assert len(json.dumps(mark.names)) < 10_000
    changed = text.replace("return 299", "return 300")
    assert difference(text + reads, changed + reads) == "another of the names that it reads has changed"


def test_a_mark_of_the_version_before_goes_on_which_had_none_of_what_does_not_count() -> None:
    text = "class C:\n    n = 1\nc, D = C(), [1] * 101\n" + READS.format("c.n, D")
    mark = SourceMark.of(notebook(text))
    assert mark.names["D"] == "uncounted data"
    earlier = {name: each for name, each in mark.names.items() if name not in ("c", "c.n", "D")}
    assert mark.difference(earlier) == ""


def test_a_script_and_a_notebook_find_the_same_source(tmp_path: Path) -> None:
    text = "import json\nN = 3\nclass C:\n    def m(self, x):\n        return x * N\n" + READS.format("C().m(x)")
    (tmp_path / "script.py").write_text(
        text + "from nbaccel.features.source.source_mark import SourceMark\nprint(json.dumps(SourceMark.of(f).names))\n"
    )
    script = [sys.executable, str(tmp_path / "script.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(script, capture_output=True, text=True, check=True, env=env)
    assert json.loads(ended.stdout) == SourceMark.of(notebook(text)).names


def test_a_cell_counts_by_its_text_and_by_what_it_reads() -> None:
    def mark(text: str, **names: Any) -> str:
        return SourceMark.of_cell(text, [compile(text, "Cell In[4]", "exec")], names).digest

    one, two = (notebook(f"def train(x):\n    return x + {n}\n", "train") for n in (1, 2))
    cell = "score = train(fold)"
    assert mark(cell, train=one) == mark(f"# moved\n\n{cell}  # here", train=one, unread=1)
    assert len({mark(cell, train=one), mark(cell, train=two), mark(cell + " + 1", train=one)}) == 3


@pytest.mark.parametrize("action", ["always", "error"])
def test_warnings_about_the_code_of_a_cell_are_not_given(action: Any) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter(action)
        assert SourceMark.of_cell("'\\d'", [], {}).names[""].startswith(CODE)
    assert given == []


STORED = {
    "many": "4977d8254f328e5099211092f028c3b5",
    "kept": "f2f43d36ae48ffb6a030cbccf4d3fdcb",
    "answer": "e00a4574c9b893d932104d58dd18adef",
}
"""Marks of `marked_program`, taken under Python 3.11."""


def test_marks_are_the_same_under_every_version_of_python() -> None:
    found = {name: SourceMark.of(getattr(marked_program, name)).digest for name in STORED}
    assert found == STORED


DIGESTS = """
import json, sys
from features.source import marked_program
from nbaccel.features.source.source_mark import SourceMark
json.dump({name: SourceMark.of(getattr(marked_program, name)).digest for name in sys.argv[1:]}, sys.stdout)
"""


@pytest.mark.parametrize("python", ["python3.12", "python3.13", "python3.14"])
def test_other_versions_that_are_installed_here_find_the_same_marks(python: str) -> None:
    found = subprocess.run([python, "--version"], capture_output=True) if shutil.which(python) else None
    if found is None or found.returncode:
        pytest.skip(f"{python} is not installed here")
    path = os.pathsep.join(str(Path(__file__).parents[up]) for up in (2, 3))
    ended = subprocess.run(
        [python, "-W", "ignore", "-c", DIGESTS, *STORED],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout) == STORED
