"""RanCell: one cell of the kernel's history, as Python that a script can have. Runs in the kernel.

Lines that IPython alone understands are replaced: those that only set up the notebook become comments, `%time` and
`%env` become what they do, and a shell line becomes a comment that the export mentions. What else a magic does is not
known; such a cell can be left out, and cannot be written into a script.
"""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.features.export.code_facts import CodeFacts, NotebookNames, names_bound
from nbaccel.notebook.shell_hooks import MAGIC, is_code

__all__ = ["RanCell", "imports_in", "names_of", "read_cells"]

_SETS_UP = frozenset(
    {
        *(
            "accelerate",
            "alias",
            "autoawait",
            "autoreload",
            "colors",
            "config",
            "env",
            "history",
            "load_ext",
            "ls",
            "lsmagic",
        ),
        *("matplotlib", "pdb", "pinfo", "pinfo2", "pprint", "precision", "prun", "psearch", "pwd", "reload_ext"),
        *("reset", "tensorboard", "timeit", "unload_ext", "who", "who_ls", "whos", "xmode"),
    }
)
"""Magics of a line that set up or show something of the notebook."""

_INSTALL = frozenset({"pip", "conda", "mamba", "micromamba", "uv"})
_WRAPS = frozenset({"time", "capture"})
"""Magics of a cell that run it as it is; `%%capture name` also binds a name."""

_MAKE_FILES = frozenset({"%%!", "%%bash", "%%file", "%%script", "%%sh", "%%system", "%%writefile"})
_SHELL_LOOKS = frozenset({"cat", "df", "du", "echo", "env", "free", "head", "ls", "nvidia-smi", "pwd", "tail", "which"})
"""Commands of a shell that make no files."""

_CONFIGURES = ("env", "set_env")

_BIND = frozenset({"edit", "macro", "pylab", "recall", "rerun", "run"})
"""Magics that bind names which stand in no cell; and `%store -r`."""


@dataclass(frozen=True, slots=True)
class RanCell:
    """A cell that has run.

    Args:
        number: Its execution number.
        raw: Its text as it was typed.
        flags: What stood behind `%%accelerate`; None for a cell without it.
        code: Python for a script; empty where there is none.
        facts: About `code`.
        refused: Why a script cannot have it, as a sentence without its end; empty if it can.
        made_by: Names that a magic or a shell line has bound, with that line.
        installs: Commands that install packages.
        shell_lines: Shell lines that became comments.
        words: The text of the cell.
        binds_unknown: A line that binds names which stand in no cell; empty if there is none.
    """

    number: int
    raw: str
    flags: str | None
    code: str
    facts: CodeFacts
    refused: str = ""
    made_by: Mapping[str, str] | None = None
    installs: tuple[str, ...] = ()
    shell_lines: tuple[str, ...] = ()
    words: str = ""
    binds_unknown: str = ""

    def __str__(self) -> str:
        return f"cell [{self.number}]"


def read_cells(shell: Any, before: int) -> list[RanCell]:
    """Return the cells that have run, oldest first; those with a syntax error have not.

    Args:
        shell: IPython's shell.
        before: The execution number of the cell that asks.
    """
    typed = list(enumerate(shell.history_manager.input_hist_raw))[1:before]
    taken = [(number, raw, _taken_apart(shell, raw)) for number, raw in typed if str(raw).strip()]
    known = names_of([code for _, _, (_, _, code, _) in taken], shell.user_ns)
    cells = (_cell(number, raw, *parts, known, shell.compile.flags) for number, raw, parts in taken)
    return [cell for cell in cells if cell is not None]


def names_of(codes: Sequence[str], namespace: Mapping[str, Any]) -> NotebookNames:
    """Return the names of a notebook.

    Args:
        codes: The Python of its cells.
        namespace: The names as they are now.
    """
    trees = [tree for code in dict.fromkeys(codes) if (tree := _parsed(code)) is not None]
    counted = Counter(name for tree in trees for name in names_bound(tree))
    rebound = frozenset(name for name, count in counted.items() if count > 1)
    return NotebookNames(imports_in(trees), namespace, rebound)


def imports_in(trees: Sequence[ast.AST]) -> dict[str, str]:
    """Return the names that import statements bind, with the path of what they are.

    Example:
        >>> imports_in([ast.parse("import torch.nn as nn, os.path; from numpy import random")])
        {'nn': 'torch.nn', 'os': 'os', 'random': 'numpy.random'}
    """
    found: dict[str, str] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def _taken_apart(shell: Any, raw: str) -> tuple[str | None, str, str, str]:
    """Return the flags of `%%accelerate`, the line of a cell magic that is not known, the Python, and all words."""
    lines = str(raw).splitlines()
    flags: str | None = None
    while (first := next((number for number, line in enumerate(lines) if is_code(line)), None)) is not None:
        name, _, rest = lines[first].strip().partition(" ")
        if not name.startswith("%%") or name == "%%":
            break
        is_known = name[2:] in _WRAPS and all(word.startswith("-") for word in rest.split())
        if name == MAGIC:
            flags = rest.strip()
        elif not is_known:
            return flags, lines[first].strip(), "", str(raw)
        del lines[first]
    if first is None:
        return flags, "", "", ""
    return flags, "", str(shell.transform_cell("\n".join([*lines, ""]))), str(raw)


def _cell(
    number: int,
    raw: str,
    flags: str | None,
    magic: str,
    code: str,
    words: str,
    known: NotebookNames,
    compiler_flags: int,
) -> RanCell | None:
    if magic:
        facts = CodeFacts.of("", known)
        made = {word: magic for word in magic.replace(">>", " ").split() if word.isidentifier()}
        name = magic.split()[0]
        lines = (magic,) if name in _MAKE_FILES else ()
        return RanCell(number, raw, flags, "", facts, f"it is a cell of {name}", made, (), lines, words)
    tree = _parsed(code)
    if tree is None:
        return None
    replaced = _Lines(code)
    for statement in _statements(tree):
        if (call := _call_of_ipython(statement)) is not None:
            replaced.take(statement, *call)
    try:
        facts = CodeFacts.of(replaced.text, known, compiler_flags)
    except SyntaxError:
        return None
    refused = replaced.refused or ("it awaits at its top level" if facts.awaits else "")
    return RanCell(
        number,
        raw,
        flags,
        replaced.text.strip("\n"),
        facts,
        refused,
        replaced.made_by,
        tuple(replaced.installs),
        tuple(replaced.shell_lines),
        words,
        replaced.binds_unknown,
    )


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.Assign))


def _call_of_ipython(statement: ast.stmt) -> tuple[str, list[str]] | None:
    """Return the method of `get_ipython()` that a line was turned into, with its arguments; None for plain Python."""
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    owner = call.func.value
    is_shell = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "get_ipython"
    if not is_shell or not all(isinstance(each, ast.Constant) for each in call.args):
        return None
    return call.func.attr, [str(each.value) for each in call.args if isinstance(each, ast.Constant)]


class _Lines:
    """The lines of a cell's Python, in which those of IPython are replaced."""

    def __init__(self, code: str) -> None:
        self._lines = code.split("\n")
        self.refused = ""
        self.made_by: dict[str, str] = {}
        self.installs: list[str] = []
        self.shell_lines: list[str] = []
        self.binds_unknown = ""

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def take(self, statement: ast.stmt, method: str, words: list[str]) -> None:
        """Replace a statement that calls a method of IPython."""
        is_shell = method in ("system", "getoutput")
        name, rest = ("", words[0]) if is_shell else (words[0], words[1] if len(words) > 1 else "")
        shown = f"!{rest}" if is_shell else f"%{name} {rest}".strip()
        if isinstance(statement, ast.Assign):
            bound = {leaf.id for target in statement.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
            self.made_by |= dict.fromkeys(bound, shown)
            what = "the shell line" if is_shell else "the magic"
            self._put(statement, f"{' = '.join(sorted(bound))} = None")
            return self._refuse(f"{' and '.join(sorted(bound))} comes from {what} {shown}")
        command = rest.split()[:1] if is_shell else [name]
        if {*command} & _INSTALL and "install" in rest.split():
            self.installs.append(shown[1:])
            return self._put(statement, f"pass  # {shown}")
        if is_shell:
            self.shell_lines += [shown] if not _SHELL_LOOKS & {*command} else []
            return self._put(statement, f"pass  # {shown}")
        if name == "time" and _parsed(rest) is not None:
            return self._put(statement, rest or "pass  # %time")
        if name in _CONFIGURES and "=" in rest and not {"$", "{"} & {*rest}:
            key, _, value = rest.partition("=")
            return self._put(statement, f'__import__("os").environ[{key.strip()!r}] = {value.strip()!r}')
        if name == "cd" and rest and not {"$", "{"} & {*rest}:
            path = (shlex.split(rest) or [""])[-1]
            return self._put(statement, f'__import__("os").chdir(__import__("os").path.expanduser({path!r}))')
        if method == "run_line_magic" and name in _SETS_UP:
            return self._put(statement, f"pass  # {shown}")
        if name in _BIND or shown.startswith("%store -r"):
            self.binds_unknown = shown
        self._put(statement, f"pass  # {shown}")
        self._refuse(f"what the magic {shown} does is not known outside of IPython")
        return None

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def _put(self, statement: ast.stmt, text: str) -> None:
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        is_top = statement.col_offset == 0
        text = text.removeprefix("pass  ") if is_top else text
        self._lines[first] = " " * statement.col_offset + text
        for number in range(first + 1, last):
            self._lines[number] = ""
