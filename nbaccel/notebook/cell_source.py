"""Source: turns the text that IPython passes to a cell magic into the `CellSource` that ranks run. Runs in the kernel.

Line numbers are those of the cell as the user sees it: lines above the body are counted, and a line that IPython's
transforms remove becomes an empty one. It compiles nothing and starts nothing.
"""

from __future__ import annotations

import ast
import difflib
import linecache
import re
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError

from nbaccel.errors import LaunchRefused
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.notebook.shell_hooks import MAGIC, is_code

__all__ = [
    "read_cell",
]

_INSTALLERS = frozenset({"pip", "conda", "mamba", "micromamba", "uv"})
_INSTALL_COMMAND = re.compile(r"\b(pip3?|conda|mamba|micromamba|uv)\s+(pip\s+)?install\b")


def read_cell(shell: Any, body: str) -> CellSource:
    """Return the running cell, ready to be compiled, and enter it into the kernel's `linecache`.

    Args:
        body: The text below the `%%accelerate` line.

    Raises:
        UsageError: Nothing but blanks and comments.
        LaunchRefused: The cell installs packages.
    """
    lines = body.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if is_code(line)), None)
    is_timed = first is not None and lines[first].split()[0] == "%%time"
    if is_timed:
        assert first is not None
        lines[first] = "\n"
    if not any(map(is_code, lines)):
        raise UsageError("the cell is empty: put the code that every rank shall run below the %%accelerate line.")
    raw = _raw_cell(shell, body)
    code = "\n" * _lines_above(raw, lines) + _transformed(shell, lines)
    _refuse_installing(code)
    name = f"Cell In[{shell.displayhook.prompt_count}]"  # IPython 9 counts a cell before it runs, IPython 7 after
    # No modification time: linecache keeps such an entry, and tracebacks that show this name find their lines.
    linecache.cache[name] = (len(raw), None, raw.splitlines(keepends=True), name)
    return CellSource(code, name, raw, flags=shell.compile.flags, is_timed=is_timed)


def _raw_cell(shell: Any, body: str) -> str:
    """Return the whole cell as typed; rebuilt if IPython keeps no history of it (a cell that runs silently)."""
    typed = shell.history_manager.input_hist_raw
    raw = str(typed[-1]) if typed else ""
    return raw if _is_tail(raw, body.splitlines()) else f"{MAGIC}\n{body}"


def _is_tail(raw: str, body: list[str]) -> bool:
    """Return whether `raw` ends in `body`. Comments may have moved, and a common indentation may be gone."""
    tail = raw.splitlines()[-len(body) :]
    pairs = zip(tail, body, strict=False)
    return len(tail) == len(body) and all(typed.strip() == line.strip() for typed, line in pairs if is_code(line))


def _lines_above(raw: str, body: list[str]) -> int:
    return len(raw.splitlines()) - len(body)


def _transformed(shell: Any, lines: list[str]) -> str:
    """Return plain Python for `lines`, with an empty line for every line that IPython's transforms remove."""
    first = next(number for number, line in enumerate(lines) if line.strip())  # it drops blank lines above
    typed = "".join(lines[first:]).splitlines()
    new = str(shell.transform_cell("".join(lines[first:]))).splitlines()
    padded = [""] * first
    for _, typed_from, typed_to, new_from, new_to in difflib.SequenceMatcher(None, typed, new, False).get_opcodes():
        padded += new[new_from:new_to]
        padded += [""] * ((typed_to - typed_from) - (new_to - new_from))
    return "\n".join([*padded, ""])


def _refuse_installing(code: str) -> None:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # compiling gives a better error
        return
    for line, command in _commands(tree):
        word = command.split()[0] if command.split() else ""
        if word.lstrip("%") in _INSTALLERS or _INSTALL_COMMAND.search(command):
            raise LaunchRefused(
                f"line {line} of the cell installs packages ({command.strip()}), which every rank would do at once: "
                "put it into a cell of its own, above this one."
            )


def _commands(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every line magic and shell command, which IPython's transforms have turned into calls."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        words = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
        if node.func.attr == "run_line_magic" and words:
            yield node.lineno, "%" + " ".join(words)
        elif node.func.attr in ("system", "getoutput") and words:
            yield node.lineno, "!" + words[0]
