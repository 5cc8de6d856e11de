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
import copy
import gc
import linecache
import os
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nbaccel.base.code_text import parsed_lines
from nbaccel.base.notices import is_users

__all__ = ["LOG", "REACHED", "Table", "is_rewritable", "objects_of_process", "provide", "rewrite", "rewrite_functions"]

LOG, REACHED = "__nbaccel_log__", "__nbaccel_reached__"
"""Builtins that rewritten code calls: the `LoopLog`, and a function that takes the number of a line."""

_ASKS = "__nbaccel_asks__"
"""Name that a function has for a moment, for `_runs_plain`."""

Table = list[dict[str, Any]]
"""The rewritten places, one for each number, as plain JSON.

Each has: number, kind ("for", "while", "branch", "every" or "compare"), file, line, head (its source text). A branch
has "every", the numbers of its conditions. A comparison has "ends", the numbers of the loops that it ends, "when", the
outcome that ends them, and "is_test": it is in the test of a `while`.
"""

_NOT_REWRITTEN = frozenset({"forward", "__getitem__", "__getitems__", "__len__", "collate_fn"})
"""Functions that train nothing: they are called for each batch or sample, by compiled models or in other processes."""

_COMPILERS = frozenset({"compile", "jit", "njit", "script", "vectorize", "guvectorize", "function", "kernel"})
"""Last names of decorators that translate a function into other code: torch, Numba, JAX, Triton, TensorFlow."""

_OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_LONGEST_HEAD = 80

_MOST_FILES = 200
"""Files whose functions are rewritten, cells first: a library in a folder of the user has more, and takes seconds."""

_MOST_LINES = 20_000
"""Lines of these files, of which some thousands are rewritten in a second; a count is the same in all ranks."""

_MOST_NESTED = 7
"""Loops inside of each other that are rewritten: Python compiles 20 nested blocks, and a rewritten loop is two."""

_FUTURE = 0x1FE0000
"""The bits of `co_flags` for `from __future__` imports."""

_PLACELESS = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)

_Functions = ast.FunctionDef | ast.AsyncFunctionDef
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
            if self._marks_lines and not _must_stay_first(statement, at):
                mark = ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(statement.lineno)], [])
                done.append(_at(ast.Expr(mark), statement))
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
        if isinstance(node, _Functions | ast.ClassDef):
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
        if not isinstance(node, ast.ClassDef) and _is_compiled(node):
            return
        outer, count = (self._is_on, self._loops, self._flags), len(self.table)
        plain = [] if isinstance(node, ast.ClassDef) else _copied(node.body)
        is_plain = isinstance(node, ast.FunctionDef) and node.name not in _NOT_REWRITTEN
        self._is_on, self._loops = is_plain and not _is_generator(node), []
        self._flags = {}
        self._blocks_of(node)
        self._is_on, self._loops, self._flags = outer
        if plain and (self._marks_lines or len(self.table) > count):
            _keep_for_compilers(node, plain)

    def _loop(self, node: ast.For | ast.While) -> ast.stmt:
        if isinstance(node, ast.For):
            kind, head = "for", f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        else:
            kind, head = "while", f"while {ast.unparse(node.test)}"
        number = self._enter(kind, node, head)
        flags, self._flags = self._flags, {**self._flags, **_flag_of(node, number)}
        if isinstance(node, ast.For):
            node.iter = _at(_call("over", ast.Constant(number), node.iter), node.iter)
        else:
            test, _ = self._test(node.test, ([number], False), of_while=True, has_periods=False)
            asked = _at(_call("goes_on", ast.Constant(number)), node.test)
            held = _at(_call("holds", ast.Constant(number), test), node.test)
            node.test = _at(ast.BoolOp(ast.And(), [asked, held]), node.test)
        self._loops.append(number)
        node.body = self.block(node.body)
        self._loops.pop()
        self._flags = flags
        refuses = _raises(node.orelse)
        node.orelse = self.block(node.orelse)
        if refuses:  # `else: raise` of a search that the whole run may end by `break`
            first = node.orelse[0]
            node.orelse = [_at(ast.If(_at(_call("has_ended", ast.Constant(number)), first), node.orelse, []), first)]
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
            asked: ast.expr = _at(_call("every", ast.Constant(number), value, every, remainder), node)
            return (_at(ast.UnaryOp(ast.Not(), asked), node) if is_negated else asked), [number]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            ends = ends and (ends[0], not ends[1])
            node.operand, numbers = self._test(node.operand, ends, of_while, has_periods)
            return node, numbers
        if ends is not None and isinstance(node, ast.Compare) and _is_limit(node):
            number = self._enter("compare", node, ast.unparse(node), ends=ends[0], when=ends[1], is_test=of_while)
            operator = ast.Constant(_OPERATORS[type(node.ops[0])])
            return _at(_call("compare", ast.Constant(number), node.left, operator, node.comparators[0]), node), []
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


def _must_stay_first(statement: ast.stmt, at: int) -> bool:
    """Return whether a statement would lose its meaning behind another one: a docstring, or an import of the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return at == 0 and is_text


def _goes_to_the_next_round(node: ast.If) -> bool:
    """Return whether a statement is `if step % 100: continue`, or the like."""
    is_bare = len(node.body) == 1 and isinstance(node.body[0], ast.Continue) and not node.orelse
    if not is_bare:
        return False
    if _mod(node.test) is not None:
        node.test = _at(ast.Compare(node.test, [ast.NotEq()], [_at(ast.Constant(0), node.test)]), node.test)
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
        return *sides, _at(ast.Constant(0), node), False
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return None
    if (sides := _mod(node.left)) is None:
        return None
    return *sides, node.comparators[0], isinstance(node.ops[0], ast.NotEq)


def _is_limit(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return len(sides) == 2 and type(node.ops[0]) in _OPERATORS and not all(isinstance(s, ast.Constant) for s in sides)


def _copied(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return a copy. Nodes without a place, as of contexts and operators, are one object for all trees, and stay it.

    Not `deepcopy`: it fails at a sum of hundreds of terms, and follows the attribute `parent` that IPython's tracebacks
    give to nodes, by which a whole file would be copied with each function.
    """
    copies = [copy.copy(each) for each in statements]
    pending: list[ast.AST] = [*copies]
    while pending:
        node = pending.pop()
        for name, value in ast.iter_fields(node):
            parts = value if isinstance(value, list) else [value]
            own = [copy.copy(each) if _is_of_one_tree(each) else each for each in parts]
            pending += filter(_is_of_one_tree, own)
            setattr(node, name, own if isinstance(value, list) else own[0])
    return copies


def _is_of_one_tree(part: Any) -> bool:
    return isinstance(part, ast.AST) and not isinstance(part, _PLACELESS)


def _keep_for_compilers(node: ast.stmt, plain: list[ast.stmt]) -> None:
    """Let a function have its plain body where `torch.compile` reads it, which fails at a builtin of ours."""
    rewritten: list[ast.stmt] = getattr(node, "body")  # noqa: B009  # of a function of either kind
    head = plain[: int(_must_stay_first(plain[0], 0))]
    plain, rewritten = plain[len(head) :], rewritten[len(head) :]
    names: dict[type[ast.Global | ast.Nonlocal], dict[str, None]] = {ast.Global: {}, ast.Nonlocal: {}}
    for body in (plain, rewritten):
        _take_declarations(body, names)
    declared = [kind(list(found)) for kind, found in names.items() if found]
    if not plain:
        return
    asks = ast.ImportFrom(__name__, [ast.alias(_runs_plain.__name__, _ASKS)], 0)
    forget = ast.Delete([ast.Name(_ASKS, ast.Del())])
    choice = ast.If(ast.Call(ast.Name(_ASKS, ast.Load()), [], []), plain, [_at(forget, node), *rewritten])
    node.body = [*head, *(_at(each, node) for each in (*declared, asks, choice))]  # type: ignore[attr-defined]


def _take_declarations(body: list[ast.stmt], names: Mapping[type, dict[str, None]]) -> None:
    """Collect the names that a function declares global or nonlocal: they may be declared once, before their use."""
    for at, statement in enumerate(body):
        if isinstance(statement, ast.Global | ast.Nonlocal):
            names[type(statement)].update(dict.fromkeys(statement.names))
            body[at] = _at(ast.Pass(), statement)
        elif not isinstance(statement, _Functions | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                _take_declarations(getattr(statement, field, []), names)
            for part in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
                _take_declarations(part.body, names)


def _is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator translates a function: a compiler does not know the log."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(ast.unparse(each).rpartition(".")[2] in _COMPILERS for each in called)


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


def _is_generator(node: ast.AST) -> bool:
    """Return whether a function yields; functions and lambdas inside of it do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(child, _Functions | ast.Lambda | ast.ClassDef) and _is_generator(child):
            return True
    return False


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(LOG, ast.Load()), method, ast.Load()), list(arguments), [])


def _with(method: str, number: int, body: list[ast.stmt], where: ast.stmt) -> ast.With:
    item = ast.withitem(_at(_call(method, ast.Constant(number)), where), None)
    return ast.copy_location(ast.With([item], body), where)


def _at(node: Any, where: ast.AST) -> Any:
    """Give a new node the place of the user's, as tracebacks shall show it."""
    return ast.copy_location(node, where)


# --- functions that exist -----------------------------------------------------------------------------------------


def is_rewritable(filename: str) -> bool:
    """Return whether code of that file is of the notebook, or of a module beside it: no library, and it has a text."""
    parts = filename.split(os.sep)
    if not is_users(filename) or "site-packages" in parts or "dist-packages" in parts:
        return False
    return bool(linecache.getlines(filename))


def rewrite_functions(first_number: int = 0, is_ours: Callable[[str], bool] = is_rewritable) -> Table:
    """Give all functions of this process whose file `is_ours` accepts code with rewritten loops; return the table.

    A function is left alone if its code does not come from the text that its file has now. Only for a process that is
    thrown away: nothing puts the code back. Modules that are imported later are not rewritten.
    """
    table: Table = []
    files: dict[str, list[types.FunctionType]] = {}
    judged: dict[str, bool] = {}
    for function in _functions():
        name = function.__code__.co_filename
        if name not in judged:
            judged[name] = is_ours(name)
        if judged[name]:
            files.setdefault(name, []).append(function)
    lines = 0
    for name in sorted(files, key=_distance)[:_MOST_FILES]:
        lines += len(linecache.getlines(name))
        if lines > _MOST_LINES and os.path.isfile(name):
            break
        with suppress(SyntaxError, ValueError, RecursionError):  # no text, or not one that can be compiled as a whole
            table += _rewrite_file(name, files[name], first_number + len(table))
    return table


def _distance(name: str) -> tuple[bool, bool, str]:
    """Sort cells before files, and those of the working folder before others."""
    return os.path.isfile(name), not name.startswith(os.path.join(os.getcwd(), "")), name


def objects_of_process() -> list[Any]:
    """Return all objects. A forked rank has frozen those of the notebook for collections; they stay frozen."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = gc.get_objects()
    if was_frozen:
        gc.freeze()
    return found


def _functions() -> list[types.FunctionType]:
    return [each for each in objects_of_process() if type(each) is types.FunctionType]


def _rewrite_file(name: str, functions: Sequence[types.FunctionType], first_number: int) -> Table:
    """Rewrite the functions of one file or cell; return an empty table if none of them has a loop."""
    lines = linecache.getlines(name)
    tree = parsed_lines(lines)
    table = rewrite(tree, first_number, file=name)
    if not table:
        return []
    plain_tree = parsed_lines(lines)
    is_cell = not os.path.isfile(name)
    codes: dict[int, tuple[_Codes, _Codes]] = {}
    count = 0
    for function in functions:
        flags = function.__code__.co_flags & _FUTURE
        if flags not in codes:
            codes[flags] = _codes(plain_tree, name, flags, is_cell), _codes(tree, name, flags, is_cell)
        plain, rewritten = (each.get(_key(function.__code__)) for each in codes[flags])
        if plain is None or rewritten is None or not _uses_log(rewritten):
            continue
        if _is_same(function.__code__, plain) and function.__code__.co_freevars == rewritten.co_freevars:
            function.__code__ = rewritten
            count += 1
    return table if count else []


_Codes = dict[tuple[str, int], types.CodeType | None]


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(tree: ast.Module, name: str, flags: int, is_cell: bool) -> _Codes:
    """Return the code of each function of a file; None where two have one name and line.

    Args:
        is_cell: Compile each statement by itself, as IPython does. Methods of a name are called by other instructions
            where the compiler has seen that it is an imported module.
    """
    found: _Codes = {}
    modules = [ast.Module([node], []) for node in tree.body] if is_cell else [tree]
    how = flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    pending = [compile(module, name, "exec", how, dont_inherit=True) for module in modules]
    while pending:
        for constant in pending.pop().co_consts:
            if isinstance(constant, types.CodeType):
                twin = found.get(_key(constant), constant)
                if twin is not constant:  # the plain body of a rewritten function has functions of its own
                    twin = constant if twin is not None and _uses_log(constant) and not _uses_log(twin) else None
                found[_key(constant)] = twin
                pending.append(constant)
    return found


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether a function has been compiled from this text: its file may have been edited since."""
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames)


def _uses_log(code: types.CodeType) -> bool:
    return LOG in code.co_names or any(isinstance(each, types.CodeType) and _uses_log(each) for each in code.co_consts)
