"""The lines of a cell that a dry run did not reach, as ranges that a person reads. Used in the kernel; runs no code.

Not every line that has not run is a gap. These are none, for the reason given:

- bodies of `except`: they run when something fails, and a run without failures is the aim;
- an `if` or an `else` that only raises, warns or leaves (`raise`, `warnings.warn`, `sys.exit`, `break`): it guards, and
  has nothing in it that could be wrong;
- bodies of ``if __name__ == "__main__"`` and of ``if TYPE_CHECKING``: a notebook never runs the other side;
- functions and methods of which no line has run: they are defined, and may be for other cells.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

__all__ = ["not_reached"]

_WARNING = frozenset({"warn", "warning", "exit", "_exit", "error", "exception", "critical"})
_NOT_EXECUTED = ("__name__", "TYPE_CHECKING")

_Functions = ast.FunctionDef | ast.AsyncFunctionDef


def not_reached(code: str, reached: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and the last line of each part of `code` that was not reached.

    Args:
        reached: Numbers of the lines whose statements began, as `rewrite` with `marks_lines` reports them.

    Example:
        >>> not_reached("a = 1\\nif a:\\n    b = 2\\nelse:\\n    c = 3\\n", {1, 2, 3})
        [(4, 5)]
    """
    lines = code.splitlines()
    gaps = _Gaps(lines, frozenset(reached))
    joined: list[tuple[int, int]] = []
    for first, last in gaps.of_block(ast.parse(code).body):
        if joined and not any(map(_is_code, lines[joined[-1][1] : first - 1])):
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def _is_code(line: str) -> bool:
    text = line.strip()
    return bool(text) and not text.startswith("#")


class _Gaps:
    """Finds the gaps of a cell, statement by statement."""

    def __init__(self, lines: list[str], reached: frozenset[int]) -> None:
        self._lines = lines
        self._reached = reached

    def of_block(self, block: list[ast.stmt]) -> Iterator[tuple[int, int]]:
        for statement in block:
            if statement.lineno in self._reached:
                yield from self._inside(statement)
            elif not _is_never_marked(statement):
                first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
                yield first, statement.end_lineno or statement.lineno

    def _inside(self, node: ast.stmt) -> Iterator[tuple[int, int]]:
        """Yield the gaps in the blocks of a statement that was reached."""
        if isinstance(node, _Functions):
            if self._is_entered(node.body):
                yield from self.of_block(node.body)
            return
        if isinstance(node, ast.If):
            if any(name in ast.unparse(node.test) for name in _NOT_EXECUTED):
                return
            if not _only_leaves(node.body):
                yield from self.of_block(node.body)
        else:
            yield from self.of_block(getattr(node, "body", []))
        for handler in getattr(node, "handlers", ()):
            if self._is_entered(handler.body):
                yield from self.of_block(handler.body)
        for case in getattr(node, "cases", ()):
            yield from self._part(case.pattern.lineno, case.body)
        above: list[ast.AST] = getattr(node, "handlers", None) or getattr(node, "body", [])
        for field in ("orelse", "finalbody"):
            block = getattr(node, field, None)
            if block:
                yield from self._part(self._line_of_else(above, block), block)
                above = block

    def _part(self, head: int, block: list[ast.stmt]) -> Iterator[tuple[int, int]]:
        """Yield the gaps of a part with a line above it, such as `else`, which belongs to the gap if nothing ran."""
        if _only_leaves(block) and not self._is_entered(block):
            return
        if not self._is_entered(block):
            yield head, head
        yield from self.of_block(block)

    def _line_of_else(self, above: list[ast.AST], block: list[ast.stmt]) -> int:
        first = block[0].lineno
        for number in range(first, (getattr(above[-1], "end_lineno", 0) or 0), -1):
            if self._lines[number - 1].strip().startswith(("else", "finally", "elif")):
                return number
        return first

    def _is_entered(self, block: list[ast.stmt]) -> bool:
        return any(statement.lineno in self._reached for statement in block)


def _is_never_marked(statement: ast.stmt) -> bool:
    """Return whether no mark stands before a statement: a docstring, or an import of the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _only_leaves(block: list[ast.stmt]) -> bool:
    """Return whether a block only raises, warns or leaves; a text printed before an error counts as a warning."""
    raises = any(isinstance(each, ast.Raise) for each in block)
    return all(_leaves(each) or (raises and _called(each) == "print") for each in block)


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Raise | ast.Break | ast.Continue | ast.Pass) or _called(statement) in _WARNING


def _called(statement: ast.stmt) -> str:
    """Return the last name of the function that a statement calls; empty for another statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return ""
