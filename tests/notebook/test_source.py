"""The text of a cell on its way to ranks: line numbers stay those that the user sees."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
from IPython.core.error import UsageError

from environments import reads_assigned_commands
from nbaccel.errors import LaunchRefused
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.notebook.cell_source import read_cell
from nbaccel.notebook.shell_hooks import comments_below_magic


def read(shell: Any, cell: str, body: str | None = None) -> CellSource:
    """`read_cell` as the magic would call it while `cell` runs."""
    shell.history_manager.input_hist_raw.append(cell)
    return read_cell(shell, cell.partition("\n")[2] if body is None else body)


def line_of(source: CellSource, text: str) -> int:
    return next(number for number, line in enumerate(source.code.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("cell", "body"),
    [
        ("%%accelerate\nx = 1\nhere\n", "x = 1\nhere\n"),
        ("%%accelerate\n\n\nhere", "\n\nhere"),
        ("%%accelerate\n\n!ls here\nx = 1", "\n!ls here\nx = 1"),
        ("\n\n%%accelerate\nx = 1\nhere\n\n", "x = 1\nhere\n\n"),
        ("%%time\n%%accelerate -n 2\nhere\n", "here\n"),
        ("%%capture out\n%%time\n%%accelerate -n 2\nhere\n", "here\n"),
        ("#@title Training\n\n%%accelerate -n 2\nhere\n", "#@title Training\n\nhere\n"),
        ("%%accelerate\n!echo \\\n  twice\nhere\n", "!echo \\\n  twice\nhere\n"),
        ("%%accelerate\nif True:\n    %time x = 1\n    !ls\nhere\n", "if True:\n    %time x = 1\n    !ls\nhere\n"),
        ("%%accelerate\n%%time\nhere\n", "%%time\nhere\n"),
        ("  %%accelerate\n  if 1:\n      here\n", "if 1:\n    here\n"),
    ],
)
def test_line_numbers_are_those_of_the_cell(shell: Any, cell: str, body: str) -> None:
    source = read(shell, cell, body)
    shown = next(number for number, line in enumerate(cell.splitlines(), 1) if "here" in line)
    assert line_of(source, "here") == shown


def test_a_cell_without_history_counts_from_the_magic_line(shell: Any) -> None:
    source = read(shell, "something else\n", "x = 1\nhere\n")
    assert line_of(source, "here") == 3
    assert source.shown == "%%accelerate\nx = 1\nhere\n"


def test_tracebacks_find_the_lines_as_typed(shell: Any) -> None:
    source = read(shell, "%%accelerate -n 2\n!echo hello\n")
    assert linecache.getline(source.name, 2) == "!echo hello\n"
    linecache.checkcache(source.name)
    assert linecache.getline(source.name, 1) == "%%accelerate -n 2\n"


def test_the_name_is_the_number_the_user_sees(shell: Any) -> None:
    shell.run_cell("1", store_history=True)
    shell.user_ns["read"] = lambda: read_cell(shell, "x = 1\n").name
    assert shell.run_cell("read()", store_history=True).result == "Cell In[2]"


def test_commands_and_line_magics_are_transformed(shell: Any) -> None:
    code = read(shell, "%%accelerate\n!ls\n%time x = 1\n").code
    assert "get_ipython().system('ls')" in code
    assert "get_ipython().run_line_magic('time', 'x = 1')" in code


def test_time_at_the_top_of_the_body_is_taken_out(shell: Any) -> None:
    source = read(shell, "%%accelerate\n# how long?\n%%time\nx = 1\n")
    assert source.is_timed
    assert "time" not in source.code.replace("# how long?", "")
    assert not read(shell, "%%accelerate\nx = 1\n%time y = 2\n").is_timed


def test_another_cell_magic_in_the_body_is_left_to_ipython(shell: Any) -> None:
    assert "run_cell_magic('bash', '', 'ls\\n')" in read(shell, "%%accelerate\n\n%%bash\nls\n").code


def test_future_imports_of_the_notebook_hold_in_the_cell(shell: Any) -> None:
    shell.run_cell("from __future__ import annotations")
    assert read(shell, "%%accelerate\nx: no_such_name = 1\n").flags & 0x1000000


@pytest.mark.parametrize("body", ["\n", "# only a remark\n\n", "%%time\n", "%%time\n# x\n"])
def test_an_empty_cell_is_one_sentence(shell: Any, body: str) -> None:
    with pytest.raises(UsageError, match="the cell is empty: put the code that every rank shall run below the"):
        read(shell, f"%%accelerate\n{body}")


@pytest.mark.parametrize(
    "line",
    [
        "%pip install x",
        "%conda install x",
        "!pip install -q x",
        "!python -m pip install x",
        pytest.param("out = !pip3 install x", marks=reads_assigned_commands),
        "get_ipython().system('uv pip install x')",
    ],
)
def test_installing_packages_is_refused(shell: Any, line: str) -> None:
    with pytest.raises(LaunchRefused, match=r"line 3 of the cell installs packages .* a cell of its own, above this"):
        read(shell, f"%%accelerate\nx = 1\n{line}\n")


@pytest.mark.parametrize("line", ["!pip list", "print('!pip install x')", "# %pip install x\nx = 1", "%pylab_like"])
def test_what_installs_nothing_is_not_refused(shell: Any, line: str) -> None:
    assert read(shell, f"%%accelerate\n{line}\n").code


@pytest.mark.parametrize(
    "lines",
    [
        ["x = 1\n", "%%accelerate\n"],
        ["# x\n", "%%time\n", "y\n"],
        ["%%accelerate\n", "x\n"],
        ["# only\n", "\n"],
        ["# x\n", "%%accelerated\n"],
        [],
    ],
)
def test_comments_stay_where_no_accelerate_follows_them(lines: list[str]) -> None:
    assert comments_below_magic(list(lines)) == lines
