"""The line and the cell of a sweep: how values are read, and which names a cell binds."""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np
import pytest
from IPython.core.error import UsageError

from nbaccel.display.history import History
from nbaccel.errors import LaunchRefused
from nbaccel.features.sweep.sweep import configurations
from nbaccel.features.sweep.sweep_cell import (
    SweptCell,
    bound_at,
    changed_at,
    lines_of_lists,
    lists_of,
    refuse_bound_names,
    values_to_sweep,
    with_values,
)
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.notebook.cell_run import how_a_cell_ended
from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import parse
from nbaccel.options.run_options import RunOptions


def read(line: str) -> Any:
    return parse(flags_parser(), line)


@pytest.mark.parametrize(
    ("line", "swept"),
    [
        ("--sweep fold=0-4", {"fold": (0, 1, 2, 3, 4)}),
        ("--sweep lr=1e-3,1e-4 --out score", {"lr": (0.001, 0.0001)}),
        ("--sweep lr=1e-3 , 1e-4", {"lr": (0.001, 0.0001)}),
        ("--sweep opt=adam,sgd", {"opt": ("adam", "sgd")}),
        ("--sweep opt='a, b',\"c\"", {"opt": ("a, b", "c")}),
        ("--sweep opt='it\\'s'", {"opt": ("it's",)}),
        ("--sweep sizes=(8, 8),[1,2]", {"sizes": ((8, 8), [1, 2])}),
        ("--sweep on=True,False,None", {"on": (True, False, None)}),
        ("--sweep x=-1,0-1", {"x": (-1, 0, 1)}),
        ("--sweep x=inf,-inf,+inf", {"x": (math.inf, -math.inf, math.inf)}),
        ("--sweep x='-a','true','1e-3-1e-1','inf'", {"x": ("-a", "true", "1e-3-1e-1", "inf")}),
        ("--sweep x=True,7b,v1.0,Truth,e5,a1-3", {"x": (True, "7b", "v1.0", "Truth", "e5", "a1-3")}),
        ("--sweep=fold=0-1 lr=1", {"fold": (0, 1), "lr": (1,)}),
        ("-p no --sweep path=data/a-b.txt --slots 2", {"path": ("data/a-b.txt",)}),
    ],
)
def test_values_are_literals_words_and_ranges(line: str, swept: dict[str, Any]) -> None:
    options = read(line)
    assert dict(options.sweep) == swept


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--sweep x=1,2, --cpu", "--cpu stands in the values of x: a flag stands behind a blank, with no comma before"),
        ("--sweep on=true,false", "on=true: write True; for the text, put it into quotes: on='true'"),
        ("--sweep x=none", "x=none: write None;"),
        ("--sweep lr=1e-3-1e-1", "lr=1e-3-1e-1: this is no number and no range; write the values with commas"),
        ("--sweep fold=0..4", "fold=0..4: this is no number and no range"),
        ("--sweep day=2024-01-02", "for the text, put it into quotes: day='2024-01-02'"),
        ("--sweep x=1e400", "x=1e400: no float holds such a number; write inf if it is meant"),
        ("--sweep x=[1,{'a':-1e999}]", "no float holds such a number"),
        ("--sweep x=?", "a value is a Python literal, a word, or a range such as 0-4; got '?'"),
    ],
)
def test_words_that_can_only_be_mistakes_are_refused(line: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert sentence in str(caught.value)


def test_a_float_without_a_literal_is_set_in_the_cell() -> None:
    assert math.isnan(read("--sweep x=nan").sweep[0][1][0])
    space: dict[str, Any] = {}
    exec(with_values("\n", {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 0.5}), space)
    assert (space["a"], space["b"], space["c"] == space["c"], space["d"]) == (math.inf, -math.inf, False, 0.5)


def test_a_word_that_names_several_values_of_the_notebook_is_refused() -> None:
    notebook = {"lrs": [0.1, 0.2], "rows": np.ones(3), "adam": object(), "Series": np.ndarray, "test": (1, 2)}
    assert values_to_sweep(read("--sweep opt=adam,sgd kind=Series").sweep, notebook) == {
        "opt": ["adam", "sgd"],
        "kind": ["Series"],
    }
    assert values_to_sweep(read("--sweep part=train,'test'").sweep, notebook) == {"part": ["train", "test"]}
    assert all(type(each) is str for each in values_to_sweep(read("--sweep opt=a").sweep, {})["opt"])
    for word, kind in (("lrs", "list"), ("rows", "ndarray"), ("test", "tuple")):
        with pytest.raises(LaunchRefused, match=f"--sweep x={word}: {word} is the name of a {kind} in the notebook"):
            values_to_sweep(read(f"--sweep x=a,{word}").sweep, notebook)


def notes(line: str, code: str, **notebook: Any) -> list[str]:
    names = values_to_sweep(read(line).sweep, notebook)
    source = CellSource(f"\n{code}", "Cell In[1]")
    return list(SweptCell(source, notebook, RunOptions(seed=0), configurations(names), None, how_a_cell_ended).notes())


def test_a_swept_name_that_nothing_reads_is_said() -> None:
    assert notes("--sweep lrr=1,2", "r = lr", lr=100) == [
        "lrr is swept, and nothing in the cell reads it: runs that differ in it alone are equal (did you mean lr?)"
    ]
    assert notes("--sweep x=1,2 seed=0,1", "r = 3") == [
        "x is swept, and nothing in the cell reads it: runs that differ in it alone are equal"
    ]
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def rate():\n    return lr * 2", space)
    for code in ("r = rate()", "r = f'{lr}'", "def f(a=lr): pass", "get_ipython().system('echo {lr}')", "eval('lr')"):
        assert notes("--sweep lr=1,2", code, rate=space["rate"]) == []


def test_a_list_as_the_only_value_is_said_to_be_one() -> None:
    assert notes("--sweep lr=[1e-3,1e-4]", "r = lr") == ["lr=[0.001, 0.0001] is one value; 2 are lr=0.001,0.0001"]
    assert notes("--sweep sizes=[1,2],[3,4] shape=(1,2) one=[1]", "r = sizes, shape, one") == []


def test_the_flags_around_the_list_keep_their_meaning() -> None:
    options = read("-p no --sweep fold=0-1 lr=0.1 --slots 2 --out score, loss --gpus-per-run 2")
    assert (options.mixed_precision, options.slots, options.out, options.gpus_per_run) == (
        "no",
        2,
        ("score", "loss"),
        2,
    )
    assert read("--out sweep").sweep is None


BINDS = [
    "lr = 1",
    "x, (lr, y) = 1, (2, 3)",
    "lr += 1",
    "lr: float = 1",
    "for lr in (1, 2):\n    pass",
    "with open('a') as lr:\n    pass",
    "import lr",
    "import a.b as lr",
    "from a import b as lr",
    "print(lr := 1)",
    "[lr := x for x in (1,)]",
    "def lr():\n    pass",
    "class lr:\n    pass",
    "del lr",
    "if True:\n    while True:\n        lr = 1",
    "try:\n    pass\nexcept OSError as lr:\n    pass",
    "match 1:\n    case lr:\n        pass",
    "match []:\n    case [*lr]:\n        pass",
    "def f(x=(lr := 1)):\n    pass",
]


@pytest.mark.parametrize("code", BINDS)
def test_a_cell_that_binds_a_swept_name_is_refused_with_the_line(code: str) -> None:
    lines = f"# above\n{code}"
    with pytest.raises(LaunchRefused, match=r"line \d+ of the cell binds lr, which --sweep sets for each run: .*"):
        refuse_bound_names(lines, {"lr"})
    refuse_bound_names(lines, {"other"})


@pytest.mark.parametrize(
    "code",
    [
        "print(lr)",
        "def f(lr):\n    lr = 2\n    return lr",
        "[lr for lr in (1, 2)]",
        "g = lambda lr: lr",
        "class A:\n    lr = 1",
        "a.lr = 1",
        "d['lr'] = 1",
        "f(lr=1)",
        "@f(lr)\ndef g(): pass",
    ],
)
def test_reading_a_name_and_names_of_other_scopes_are_no_binding(code: str) -> None:
    refuse_bound_names(code, {"lr"})


def test_lines_are_those_of_the_cell() -> None:
    assert list(bound_at(ast.parse("\n\na = 1\nif a:\n    b = 2"))) == [("a", 3), ("b", 5)]


def test_a_future_import_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="put the __future__ import into a cell of its own"):
        refuse_bound_names("\nfrom __future__ import annotations\nprint(lr)", {"lr"})


def test_lists_have_none_where_a_run_failed_whatever_it_had_left() -> None:
    runs = [Run([None], History(1), error, "fork", "", "", 1.0) for error in (None, ValueError("no"), None)]
    left: list[dict[str, Any]] = [{"score": 1, "model": "a"}, {"score": 2}, {"score": 3, "model": "b"}]
    assert lists_of(runs, left, ("score", "model")) == {"score": [1, None, 3], "model": ["a", None, "b"]}
    assert list(lines_of_lists(runs, left, ("score",), "score = 1", {})) == [
        "brought back: score (a list of 3, None for 1 run that did not end well)"
    ]


def test_a_run_that_was_stopped_before_it_had_assigned_a_name_is_said() -> None:
    runs = [Run([None], History(1), error, "fork", "", "", 1.0) for error in (None, ValueError("no"), None)]
    left: list[dict[str, Any]] = [{"score": 1}, {}, {}]
    assert lists_of(runs, left, ("score",)) == {"score": [1, None, None]}
    assert list(lines_of_lists(runs, left, ("score",), "score = 1", {})) == [
        "brought back: score (a list of 3, None for 1 run that did not end well, None for 1 run stopped before it had "
        "assigned score)"
    ]


def test_a_cell_without_out_is_told_which_name_it_could_bring_back() -> None:
    runs = [Run([None], History(1), None, "fork", "", "", 1.0)] * 3
    assert list(lines_of_lists(runs, [{}] * 3, (), "import x\nacc = 1\nprint(acc)\nfor i in x: acc = i", {})) == [
        "nothing was brought back: --out acc would leave a list of 3"
    ]
    assert list(lines_of_lists(runs, [{}] * 3, (), "acc = 1\nacc", {})) == [], (
        "its last line is a value: `runs` have it"
    )
    assert list(lines_of_lists(runs, [{}] * 3, (), "def f(): a = 1", {})) == []


def test_results_that_a_cell_collects_in_an_object_of_the_notebook_are_said_to_stay_away() -> None:
    runs = [Run([None], History(1), None, "fork", "", "", 1.0)]
    code = "own = []\nscores.append(1)\nif fold:\n    best[fold] = 2\nnet.add(1)\nown.append(1)\nprint(scores[0])"
    notebook = {"scores": [], "best": {}, "net": object()}
    _, line = lines_of_lists(runs, [{"a": 1}], ("a",), code, notebook)
    assert line.startswith("not brought back: scores, best, which each run has changed for itself")
    assert len([*lines_of_lists(runs, [{"scores": [1]}], ("scores",), "scores.append(1)", {"scores": [[1]]})]) == 1
    assert changed_at(ast.parse("f(x.append)\nwith a[0]: pass\nfor b[1] in c: pass")) == ["b"]
