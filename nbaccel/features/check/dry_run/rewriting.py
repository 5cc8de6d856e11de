"""Rewrites loops of a program, so that a dry run can end them, and marks the lines that are reached. Runs in ranks.

A rewritten program asks one object, the builtin `LOG` (see `nbaccel.features.check.dry_run.loop_log`), before each
round of a loop::

    for batch in loader:          with __nbaccel_log__.loop(7):
        train(batch)                  for batch in __nbaccel_log__.over(7, loader):
                                          train(batch)

    if step % 100 == 0:           if __nbaccel_log__.every(8, step, 100, 0):
        evaluate()                    with __nbaccel_log__.branch(9):
                                          evaluate()

    while step < 1000:            with __nbaccel_log__.loop(11):
        train(step)                   while __nbaccel_log__.goes_on(11) and __nbaccel_log__.holds(
                                          11, __nbaccel_log__.compare(10, step, "<", 1000)):
                                          train(step)

No names stay bound in the program, and every line keeps its number. A function has its plain body beside the rewritten
one, see `_runs_plain`. Generators and coroutines stay as they are: they are left in the middle of a round, so their
loops do not nest with those of their callers. Functions that the body of a dry run calls, in earlier cells and in local
modules, are rewritten in place by `rewrite_functions`. Nothing here knows when a loop ends.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbaccel.features.source.code_text import parsed_lines
from nbaccel.features.source.users_functions import (
    NOT_REWRITTEN,
    Functions,
    copied,
    functions_by_file,
    is_compiled,
    is_generator,
    is_rewritable,
    keep_for_compilers,
    must_stay_first,
    placed,
    replace_codes,
)

__all__ = ["LOG", "REACHED", "Table", "provide", "rewrite", "rewrite_functions"]

LOG, REACHED = "__nbaccel_log__", "__nbaccel_reached__"
"""Builtins that rewritten code calls: the `LoopLog`, and a function that takes the number of a line."""

Table = list[dict[str, Any]]
"""The rewritten places, one for each number, as plain JSON.

Each has: number, kind ("for", "while", "branch", "every" or "compare"), file, line, head (its source text). A branch
has "every", the numbers of its conditions. A comparison has "ends", the numbers of the loops that it ends, "when", the
outcome that ends them, and "is_test": it is in the test of a `while`.
"""

_OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_LONGEST_HEAD = 80

_MOST_NESTED = 7
"""Loops inside of each other that are rewritten: Python compiles 20 nested blocks, and a rewritten loop is two."""

_Ends = tuple[list[int], bool] | None
"""Loops that a test ends, and the outcome that ends them; None for a test that ends no loop by itself."""


def provide(log: Any, reached: Callable[[int], object] = lambda line: None) -> None:
    """Let rewritten code of this process find its log, from now on; processes that are forked later log nothing."""
    setattr(builtins, LOG, log)
    setattr(builtins, REACHED, reached)
    os.register_at_fork(after_in_child=log.leave)


def _runs_plain() -> bool:
    """Return whether a rewritten function runs its plain body: `torch.compile` reads it, or a process has no log.

    A process that is spawned has none, such as the worker of a loader; it gets the function by its code.
    """
    from torch.compiler import is_compiling

    return is_compiling() or not hasattr(builtins, LOG)


def rewrite(tree: ast.Module, first_number: int = 0, marks_lines: bool = False, file: str = "") -> Table:
    """Rewrite the loops of a program in place, and return the table of what was rewritten.

    Args:
        first_number: The first number of the first entry; later ones count up.
        marks_lines: Each statement says that it was reached.

    Example:
        >>> tree = ast.parse("for epoch in range(9):\\n    print(epoch)")
        >>> rewrite(tree)[0]["head"]
        'for epoch in range(9)'
        >>> print(ast.unparse(tree))
        with __nbaccel_log__.loop(0):
            for epoch in __nbaccel_log__.over(0, range(9)):
                print(epoch)
    """
    rewriter = _Rewriter(first_number, marks_lines, file)
    tree.body = rewriter.block(tree.body)
    ast.fix_missing_locations(tree)
    return rewriter.table


# --- the tree ----------------------------------------------------------------------------------------------------


class _Rewriter:
    """Rewrites statements, block by block.

    Attributes:
        table: What was rewritten so far.
    """

    def __init__(self, first_number: int, marks_lines: bool, file: str) -> None:
        self.table: Table = []
        self._first_number = first_number
        self._marks_lines = marks_lines
        self._file = file
        self._is_on = True  # loops here are rewritten
        self._loops: list[int] = []  # open in this function
        self._flags: dict[tuple[str, Any], int] = {}  # of `while not done`: the value of the name that ends it

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for at, statement in enumerate(statements):
            if self._marks_lines and not must_stay_first(statement, at):
                mark = ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(statement.lineno)], [])
                done.append(placed(ast.Expr(mark), statement))
            rest = statements[at + 1 :]
            if rest and self._is_on and isinstance(statement, ast.If) and _goes_to_the_next_round(statement):
                # `if step % 100: continue` makes the rest of the block a branch
                head = f"if not ({ast.unparse(statement.test)})"
                statement.test, numbers = self._test(statement.test, None)
                statement.body = self.block(statement.body)
                done.append(statement)
                return [*done, self._branch(rest, numbers, head, rest[0])]
            done.append(self._statement(statement))
        return done

    def _statement(self, node: ast.stmt) -> ast.stmt:
        if isinstance(node, Functions | ast.ClassDef):
            self._inner_scope(node)
        elif self._is_on and isinstance(node, ast.For | ast.While) and len(self._loops) < _MOST_NESTED:
            return self._loop(node)
        elif self._is_on and isinstance(node, ast.If):
            return self._if(node)
        else:
            self._blocks_of(node)
        return node

    def _blocks_of(self, node: ast.AST) -> None:
        """Rewrite the blocks of a statement. The expressions in it have no statements, and stay."""
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                setattr(node, field, self.block(inner))
        for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
            part.body = self.block(part.body)

    def _inner_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if not isinstance(node, ast.ClassDef) and is_compiled(node):
            return
        outer, count = (self._is_on, self._loops, self._flags), len(self.table)
        plain = [] if isinstance(node, ast.ClassDef) else copied(node.body)
        is_plain = isinstance(node, ast.FunctionDef) and node.name not in NOT_REWRITTEN
        self._is_on, self._loops = is_plain and not is_generator(node), []
        self._flags = {}
        self._blocks_of(node)
        self._is_on, self._loops, self._flags = outer
        if plain and (self._marks_lines or len(self.table) > count):
            keep_for_compilers(node, plain, _runs_plain)

    def _loop(self, node: ast.For | ast.While) -> ast.stmt:
        if isinstance(node, ast.For):
            kind, head = "for", f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        else:
            kind, head = "while", f"while {ast.unparse(node.test)}"
        number = self._enter(kind, node, head)
        flags, self._flags = self._flags, {**self._flags, **_flag_of(node, number)}
        if isinstance(node, ast.For):
            node.iter = placed(_call("over", ast.Constant(number), node.iter), node.iter)
        else:
            test, _ = self._test(node.test, ([number], False), of_while=True, has_periods=False)
            asked = placed(_call("goes_on", ast.Constant(number)), node.test)
            held = placed(_call("holds", ast.Constant(number), test), node.test)
            node.test = placed(ast.BoolOp(ast.And(), [asked, held]), node.test)
        self._loops.append(number)
        node.body = self.block(node.body)
        self._loops.pop()
        self._flags = flags
        refuses = _raises(node.orelse)
        node.orelse = self.block(node.orelse)
        if refuses:  # `else: raise` of a search that the whole run may end by `break`
            first = node.orelse[0]
            node.orelse = [
                placed(ast.If(placed(_call("has_ended", ast.Constant(number)), first), node.orelse, []), first)
            ]
        return _with("loop", number, [node], node)

    def _if(self, node: ast.If) -> ast.If:
        head = f"if {ast.unparse(node.test)}"
        leaving, outcome = (self._left_by(node.body), True) if node.body else ([], True)
        if not leaving and (leaving := self._left_by(node.orelse)):
            outcome = False
        first, refuses = node.body[0], _raises(node.body)
        node.test, numbers = self._test(node.test, (leaving, outcome) if leaving else None, has_periods=not refuses)
        node.body = [self._branch(node.body, numbers, head, first)] if numbers else self.block(node.body)
        node.orelse = self.block(node.orelse)
        return node

    def _branch(self, body: list[ast.stmt], numbers: list[int], head: str, first: ast.stmt) -> ast.stmt:
        number = self._enter("branch", first, head, every=numbers)
        return _with("branch", number, self.block(body), first)

    def _left_by(self, block: list[ast.stmt]) -> list[int]:
        """Return the loops that a block leaves when it is run."""
        if any(isinstance(each, ast.Return) for each in block):
            return list(self._loops)
        left = self._loops[-1:] if any(isinstance(each, ast.Break) for each in block) else []
        for each in block:
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
                left += [
                    self._flags[name.id, each.value.value]
                    for name in each.targets
                    if isinstance(name, ast.Name) and (name.id, each.value.value) in self._flags
                ]
        return left

    def _test(
        self, node: ast.expr, ends: _Ends, of_while: bool = False, has_periods: bool = True
    ) -> tuple[ast.expr, list[int]]:
        """Return a test that is logged, and the numbers of the periods in it.

        Parts of a test are comparisons that end a loop if one of them alone decides: those of `and` in a `while`, and
        those of `or` in an `if`. So does the second part of `if limit is not None and step >= limit`.

        Args:
            has_periods: The body may run although its period has not come: it does not refuse a value.
        """
        if isinstance(node, ast.BoolOp):
            one_decides = ends is not None and ends[1] is isinstance(node.op, ast.Or)
            decide = [one_decides or _rest_is_about(node.values, value) for value in node.values]
            parts = [
                self._test(value, ends if is_one else None, of_while, has_periods)
                for value, is_one in zip(node.values, decide, strict=True)
            ]
            node.values = [part for part, _ in parts]
            return node, [number for _, numbers in parts for number in numbers]
        if has_periods and (period := _period(node)) is not None:
            value, every, remainder, is_negated = period
            number = self._enter("every", node, ast.unparse(node))
            asked: ast.expr = placed(_call("every", ast.Constant(number), value, every, remainder), node)
            return (placed(ast.UnaryOp(ast.Not(), asked), node) if is_negated else asked), [number]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            ends = ends and (ends[0], not ends[1])
            node.operand, numbers = self._test(node.operand, ends, of_while, has_periods)
            return node, numbers
        if ends is not None and isinstance(node, ast.Compare) and _is_limit(node):
            number = self._enter("compare", node, ast.unparse(node), ends=ends[0], when=ends[1], is_test=of_while)
            operator = ast.Constant(_OPERATORS[type(node.ops[0])])
            return placed(_call("compare", ast.Constant(number), node.left, operator, node.comparators[0]), node), []
        return node, []

    def _enter(self, kind: str, node: ast.stmt | ast.expr, head: str, **more: Any) -> int:
        number = self._first_number + len(self.table)
        head = head if len(head) <= _LONGEST_HEAD else head[: _LONGEST_HEAD - 3] + "..."
        place = {"file": self._file, "line": node.lineno, "head": head}
        self.table.append({"number": number, "kind": kind, **place, **more})
        return number


def _flag_of(node: ast.For | ast.While, number: int) -> dict[tuple[str, Any], int]:
    """Return the name and the value that end `while name` or `while not name`, with the number of the loop."""
    if isinstance(node, ast.For):
        return {}
    test, value = node.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, value = test.operand, True
    return {(test.id, value): number} if isinstance(test, ast.Name) else {}


def _raises(block: list[ast.stmt]) -> bool:
    """Return whether a block raises whenever it is run."""
    return any(isinstance(each, ast.Raise) for each in block)


def _goes_to_the_next_round(node: ast.If) -> bool:
    """Return whether a statement is `if step % 100: continue`, or the like."""
    is_bare = len(node.body) == 1 and isinstance(node.body[0], ast.Continue) and not node.orelse
    if not is_bare:
        return False
    if _mod(node.test) is not None:
        node.test = placed(ast.Compare(node.test, [ast.NotEq()], [placed(ast.Constant(0), node.test)]), node.test)
    period = _period(node.test)
    return period is not None and period[3]


def _mod(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return both sides of `X % K`; None for another expression, also for one that formats a text."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        is_text = isinstance(node.left, ast.JoinedStr) or isinstance(getattr(node.left, "value", 0), str)
        return None if is_text else (node.left, node.right)
    return None


def _period(node: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr, bool] | None:
    """Return X, K, C and whether it is negated, for `X % K == C`, `X % K != C` and `not X % K`; else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and (sides := _mod(node.operand)):
        return *sides, placed(ast.Constant(0), node), False
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return None
    if (sides := _mod(node.left)) is None:
        return None
    return *sides, node.comparators[0], isinstance(node.ops[0], ast.NotEq)


def _is_limit(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return len(sides) == 2 and type(node.ops[0]) in _OPERATORS and not all(isinstance(s, ast.Constant) for s in sides)


def _rest_is_about(parts: list[ast.expr], one: ast.expr) -> bool:
    """Return whether all parts of a test but `one` ask about nothing that `one` does not read."""
    rest = [part for part in parts if part is not one]
    return not any(isinstance(node, ast.Call) for part in rest for node in ast.walk(part)) and all(
        _read(part) <= _read(one) for part in rest
    )


def _read(node: ast.AST) -> set[str]:
    """Return the names that an expression reads, with their attributes."""
    if isinstance(node, ast.Name | ast.Attribute):
        return {ast.unparse(node)}
    return {name for child in ast.iter_child_nodes(node) for name in _read(child)}


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(LOG, ast.Load()), method, ast.Load()), list(arguments), [])


def _with(method: str, number: int, body: list[ast.stmt], where: ast.stmt) -> ast.With:
    item = ast.withitem(placed(_call(method, ast.Constant(number)), where), None)
    return ast.copy_location(ast.With([item], body), where)


def rewrite_functions(first_number: int = 0, is_ours: Callable[[str], bool] = is_rewritable) -> Table:
    """Give all functions of this process whose file `is_ours` accepts code with rewritten loops; return the table.

    Only for a process that is thrown away: nothing puts the code back.
    """
    table: Table = []
    for name, functions in functions_by_file(is_ours).items():
        with suppress(SyntaxError, ValueError, RecursionError):  # no text, or not one that can be compiled as a whole
            tree = parsed_lines(linecache.getlines(name))
            entries = rewrite(tree, first_number + len(table), file=name)
            if entries and replace_codes(name, functions, tree, LOG):
                table += entries
    return table
