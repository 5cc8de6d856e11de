"""The names of a cell that rightly differ between ranks or runs: times, and numbers of ranks. Runs in the kernel.

They are found in the text of the cell and of the functions that it calls. What a clock returns is a time, and so is
what arithmetic makes of one, and what a call returns that gets times alone, such as ``format_time(end - start)``. What
a library measures by itself is not known.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["incomparable_names"]

_CLOCKS = frozenset(
    {
        *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "default_timer"),
        *("process_time", "process_time_ns", "thread_time", "now", "utcnow", "today", "elapsed_time"),
        *("ctime", "localtime", "gmtime", "strftime", "timeit", "uuid1", "uuid4"),
    }
)
"""Last names of calls that read a clock, or make a name from it."""

_RANKS = frozenset({"get_rank", "get_node_local_rank", "getpid", "process_index", "local_process_index"})
_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK"})
_OF_RANKS = _RANKS | {"is_main_process", "is_local_main_process", "is_last_process", "local_rank", "global_rank"}
"""Last names of what tells the number of a rank."""

_EXTENDING = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})

_MOST_FUNCTIONS = 50
"""Functions whose text is looked at."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Parts = tuple[bool, ...]
"""Of a function that returns a tuple: which of its values are times; of another one, whether its value is a time."""


def incomparable_names(tree: ast.Module, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names of the cell `tree` that are bound to times, or to the number of a rank.

    Args:
        namespace: Has the functions that the cell calls.

    Example:
        >>> text = "began = time.time(); x = f(1); took = (g() - began) / 60; rank = int(os.environ['RANK'])"
        >>> sorted(incomparable_names(ast.parse(text), {}))
        ['began', 'rank', 'took']
    """
    with suppress(RecursionError):  # a sum of hundreds of terms, in which nobody looks for a time
        return _time_names(tree, namespace) | _rank_names(tree)
    return _rank_names(tree)


def _time_names(tree: ast.Module, namespace: Mapping[str, Any]) -> set[str]:
    functions = _functions_called(tree, namespace)
    clocks: dict[str, _Parts] = dict.fromkeys(_clocks(tree, namespace), (True,))
    timed = clocks
    for _ in functions:  # one that returns a time of another one
        found = {name: parts for name, node in functions.items() if any(parts := _returned_times(node, timed))} | clocks
        if found == timed:
            break
        timed = found
    return {name for name in _Times(timed).names(tree.body) if name.isidentifier()}


def _clocks(tree: ast.Module, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names under which the cell, or the notebook before it, has imported clocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (each.asname for each in node.names if each.asname and each.name in _CLOCKS)
    for name, value in namespace.items():
        if type(value) is types.BuiltinFunctionType and value.__module__ == "time" and value.__name__ in _CLOCKS:
            yield name


class _Times:
    """The names of one block of code that hold times.

    Args:
        functions: Those that return times.
    """

    def __init__(self, functions: Mapping[str, _Parts]) -> None:
        self._functions = functions
        self.found: set[str] = set()

    def names(self, block: Sequence[ast.stmt]) -> set[str]:
        """Return the names that hold times anywhere in a block, whatever the order of its statements."""
        nodes = list(_own_nodes(block))
        before = -1
        while len(self.found) > before:
            before = len(self.found)
            for node in nodes:
                self._look(node)
        return self.found

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and self.is_time(node.iter):
            self._add(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EXTENDING:
            given = [*node.args, *(each.value for each in node.keywords)]
            self._extend(node.func.value, given)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = self.parts(value)
            if len(parts) == len(target.elts):
                for each, is_time in zip(target.elts, parts, strict=True):
                    if is_time:
                        self._add(each)
                return
        if self.is_time(value):
            self._add(target)

    def _extend(self, target: ast.expr, given: Iterable[ast.expr]) -> None:
        if any(map(self.is_time, given)):
            self._add(target)

    def parts(self, value: ast.expr) -> tuple[bool, ...]:
        """Return of each value of a tuple whether it is a time; of anything else, of the whole."""
        if isinstance(value, ast.Tuple | ast.List):
            return tuple(map(self.is_time, value.elts))
        if isinstance(value, ast.Call) and (parts := self._functions.get(_last_name(value.func))):
            return parts
        return (self.is_time(value),)

    def _add(self, target: ast.expr) -> None:
        """Add the names in a target; of `history["time"]`, `history`, and of `self.began`, that with its dot."""
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            while isinstance(each, ast.Subscript | ast.Starred):
                each = each.value
            if isinstance(each, ast.Name | ast.Attribute):
                self.found.add(ast.unparse(each))

    def is_time(self, node: ast.expr) -> bool:
        """Return whether an expression is a time, is computed from one, or contains one."""
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.found:
            return True
        if isinstance(node, ast.Call):
            return self._is_time_of_call(node)
        if isinstance(node, ast.Subscript | ast.Attribute):
            return self.is_time(node.value)
        if isinstance(node, ast.Lambda):
            return False
        if isinstance(node, ast.IfExp):
            return self.is_time(node.body) or self.is_time(node.orelse)
        return any(self.is_time(part) for part in _parts_of(node))

    def _is_time_of_call(self, node: ast.Call) -> bool:
        name = _last_name(node.func)
        if name in _CLOCKS:
            return True
        if name in self._functions:
            return True
        if isinstance(node.func, ast.Attribute) and self.is_time(node.func.value):  # `(end - start).total_seconds()`
            return True
        given = [each for each in (*node.args, *(more.value for more in node.keywords)) if _reads_something(each)]
        return bool(given) and all(map(self.is_time, given))


def _own_nodes(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes of a block, without functions and classes, which bind other names."""
    pending = list(block)[::-1]
    while pending:
        node = pending.pop()
        if not isinstance(node, _Function | ast.ClassDef | ast.Lambda):
            yield node
            pending += list(ast.iter_child_nodes(node))[::-1]


def _parts_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that one consists of, also those of a comprehension."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.comprehension):
            yield child.iter


def _reads_something(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Name | ast.Call) for each in ast.walk(node))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# --- functions -------------------------------------------------------------------------------------------------------


def _functions_called(tree: ast.Module, namespace: Mapping[str, Any]) -> dict[str, _Function]:
    """Return the functions that a cell defines, and those of the notebook that it and they call by name."""
    found: dict[str, _Function] = {node.name: node for node in ast.walk(tree) if isinstance(node, _Function)}
    pending: list[ast.AST] = [tree]
    while pending and len(found) < _MOST_FUNCTIONS:
        for node in ast.walk(pending.pop()):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            value = namespace.get(name)
            if name and name not in found and isinstance(value, types.FunctionType):
                with suppress(Exception):  # it has no text, or one that is no Python
                    (function,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
                    if isinstance(function, _Function):
                        found[name] = function
                        pending.append(function)
    return found


def _returned_times(function: _Function, timed: Mapping[str, _Parts]) -> _Parts:
    """Return which of the values that a function returns are times.

    Args:
        timed: The functions that return some.
    """
    times = _Times(timed)
    times.names(function.body)
    returned = [node.value for node in _own_nodes(function.body) if isinstance(node, ast.Return) and node.value]
    of_each = [times.parts(value) for value in returned]
    if len(set(map(len, of_each))) > 1:
        return (any(map(any, of_each)),)
    return tuple(map(any, zip(*of_each, strict=True)))


# --- ranks -----------------------------------------------------------------------------------------------------------


def _rank_names(tree: ast.Module) -> set[str]:
    """Return the names that are bound to what tells the number of a rank, and to nothing that is computed further."""
    return {
        target.id
        for node in _own_nodes(tree.body)
        for target, value in _bindings(node)
        if isinstance(target, ast.Name) and _tells_rank(value)
    }


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what an assignment binds with what it binds it to; of `a, b = f(), g()`, both parts."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _tells_rank(node: ast.expr) -> bool:
    """Return whether an expression is `dist.get_rank()`, `int(os.environ["RANK"])`, `rank == 0`, or the like."""
    if isinstance(node, ast.Call):
        name = _last_name(node.func)
        if name in _RANKS:
            return True
        if name in ("get", "getenv") and node.args:
            return isinstance(node.args[0], ast.Constant) and node.args[0].value in _RANK_VARIABLES
        return name in ("int", "str", "bool", "device") and any(map(_tells_rank, node.args))
    if isinstance(node, ast.Compare):
        return _tells_rank(node.left)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in _RANK_VARIABLES
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(each, ast.FormattedValue) and _tells_rank(each.value) for each in node.values)
    return _last_name(node) in _OF_RANKS | {"rank"}
