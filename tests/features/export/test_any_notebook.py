"""Scripts of notebooks that nobody wrote: cells by chance, which rebind, share, change, draw and fail.

The cell that trains is Python without ranks here, run in the notebook and at the end of the script's cells.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from IPython.core.error import UsageError

from nbaccel.features.export.needed import needed_cells
from nbaccel.features.export.ran_cell import read_cells

NOTEBOOKS = 30
FIRST = [
    "import random",
    *(f"{name} = [0]" for name in "abcde"),
    *("def f():\n    return 1", "def g():\n    return a", "def h():\n    return f()", "random.seed(3)"),
]
CELLS = [
    *("{n} = {digit}", "{n} = [{digit}]", "{n} = {m}", "{n} = [{m}, {o}]", "{n}.append({digit})", "{n} += [1]"),
    *("def {f}():\n    return [{n}, {m}]", "{n} = {f}()", "{f}()", "{n} = {f}", "{n} = lambda: {m}", "print({n})"),
    *(
        "random.seed({digit})",
        "{n} = random.random()",
        "del {n}",
        "{n}, {m} = [{o}], 3",
        "{n} = [{m} for {m} in [{o}]]",
    ),
    "if isinstance({m}, list):\n    {n} = [{m}, 7]",
    "for {n} in range(3):\n    {m} = [{n}]",
    "def {f}():\n    {n}.append(random.random())\n    return {m}",
    "def {f}():\n    global {n}\n    {n} = [{m}]",
    "class {f}:\n    v = [{n}]\n    def __init__(self):\n        self.v.append({m})",
    "try:\n    {n} = {m}[0]\nexcept Exception as error:\n    {n} = {o}",
]
TRAINED = [
    *("result = [a, b, f()]", "result = [c, g(), random.random()]", "result = [h(), d]", "b = 3\nresult = [g(), b]"),
    *("for a in [1]:\n    result = [a, f()]", "if d:\n    e = 4\nresult = e"),
]


def result_of(cells: list[str], names: dict[str, Any]) -> str:
    """The result, without addresses and the names of modules; the class of the error if there is none."""
    try:
        for cell in cells:
            exec(cell, names)
        return re.sub(r" at 0x[0-9a-f]+|__main__\.|builtins\.", "", repr(names["result"]))
    except Exception as error:
        return type(error).__name__


def test_a_script_has_the_result_of_the_notebook_or_is_refused(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    refused = 0
    for seed in range(NOTEBOOKS):
        chance = random.Random(seed)
        shell.reset(new_session=True)
        shell.history_manager.input_hist_raw[:] = [""]
        shell.execution_count = 1
        cells = [*FIRST]
        for _ in range(chance.randrange(3, 14)):
            n, m, o = (chance.choice("abcde") for _ in range(3))
            cells.append(chance.choice(CELLS).format(n=n, m=m, o=o, f=chance.choice("fgh"), digit=chance.randrange(9)))
        ran = [shell.run_cell(cell, store_history=True).success for cell in cells]
        trained = chance.choice(TRAINED)
        shell.history_manager.input_hist_raw.append(f"%%accelerate -n 2\n{trained}")
        history = read_cells(shell, before=99)
        failed = [number for number, succeeded in enumerate(ran, 1) if not succeeded]
        try:
            needed = needed_cells(history, history[-1], shell.user_ns, failed)
        except UsageError:
            refused += 1
            continue
        there = result_of([trained], shell.user_ns)
        assert result_of([cell.code for cell in needed.all], {}) == there, (seed, cells, trained)
    assert refused < NOTEBOOKS / 3
