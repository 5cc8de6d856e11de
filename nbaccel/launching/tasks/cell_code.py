"""CellSource: the text of a cell, ready to be compiled under the cell's name, and how a part of it runs.

Made in the kernel; ranks compile and run it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["CellSource", "execute", "tree_as_typed"]

_PYTHON_HERE = ("%%time", "%%capture", "%%prun")
"""Cell magics whose cells bind names of the notebook."""


@dataclass(frozen=True, slots=True)
class CellSource:
    """The text of a cell.

    Args:
        code: Plain Python, with as many lines above it as the notebook shows above it, so that line numbers agree.
        name: The file name it is compiled under, "Cell In[5]".
        shown: The cell as the user typed it, for tracebacks.
        flags: Compiler flags of the notebook (its `from __future__` imports).
        is_timed: A `%%time` stood at the top of the body.
    """

    code: str
    name: str
    shown: str = ""
    flags: int = 0
    is_timed: bool = False

    def compile(self) -> list[types.CodeType]:
        """Return the statements, and separately the last expression if there is one whose value is to be shown.

        Raises:
            SyntaxError: With the cell's name and line.
        """
        return self.compile_tree(self.parsed())

    def parsed(self) -> ast.Module:
        """Return the tree of the code.

        Raises:
            SyntaxError: With the cell's name and line.
        """
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        module = compile(self.code, self.name, "exec", flags, dont_inherit=True)
        assert isinstance(module, ast.Module)
        return module

    def compile_tree(self, module: ast.Module) -> list[types.CodeType]:
        """Return what `compile` does, for a tree that may have been rewritten."""
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        body = module.body
        is_shown = bool(body) and isinstance(body[-1], ast.Expr) and not self.code.rstrip().endswith(";")
        split = len(body) - 1 if is_shown else len(body)
        parts = [compile(ast.Module(body[:split], []), self.name, "exec", flags, dont_inherit=True)]
        if is_shown:
            last = body[-1]
            assert isinstance(last, ast.Expr)
            parts.append(compile(ast.Expression(last.value), self.name, "eval", flags, dont_inherit=True))
        return parts


def execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    """Run a part of a cell, also one with a top-level `await`; return the value of an expression."""
    value = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        return _completed(value)
    return value


def _completed(coroutine: Any) -> Any:
    """Return the result of a cell with a top-level `await`."""
    if not _loop_is_running():  # outside of any `except`: an error of the cell has nothing to do with it
        return asyncio.run(coroutine)
    # Inline, in the kernel, whose own loop is running in this thread: the cell gets a loop in another.
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def tree_as_typed(text: str) -> ast.Module | None:
    """Return the tree of a cell as typed, without its magics; None if it is not Python."""
    if text.lstrip().startswith("%%") and not text.lstrip().startswith(_PYTHON_HERE):
        return None
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):  # shell commands inside of blocks, or a mistake
        return None
