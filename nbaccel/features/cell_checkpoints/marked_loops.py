"""Trees of a cell whose loops are marked, so that a run can be saved between their rounds, and goes on there. Pure.

A marked program asks one object, the builtin `LOOPS` (`marked_cell.MarkedCell`), before each round of a loop that may
train::

    for batch in loader:          with __nbaccel_loops__.loop(7):
        train(batch)                  for batch in __nbaccel_loops__.over(7, loader):
                                          train(batch)

    while step < 1000:            with __nbaccel_loops__.loop(8):
        train(step)                   while __nbaccel_loops__.turn(8) and step < 1000:
                                          train(step)

A program that goes on at a position has this version beside the marked one: statements before the outermost loop run
as ever, the names of the saved run are bound at its head, each open loop passes over what it has had, and each block
begins at the statement of the position. A function on the way has both bodies, and is told which one to run.

Loops that cannot come to a step stay as they are: none of the functions that they name calls `step` or `backward`.
"""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nbaccel.features.source.code_text import mark_of_tree
from nbaccel.features.source.users_functions import (
    NOT_REWRITTEN,
    copied,
    is_compiled,
    is_generator,
    keep_for_compilers,
    must_stay_first,
    placed,
)
from nbaccel.namespace.names import READ_BY_TEXT

__all__ = [
    "CELL",
    "LOOPS",
    "READS_BY_TEXT",
    "GoesOnAt",
    "LoopSite",
    "Path",
    "UsersFunction",
    "UsersProgram",
    "ahead",
    "blocks_of",
    "bound_by",
    "marked",
]

READS_BY_TEXT = READ_BY_TEXT | {"get_ipython"}
"""Functions by which code may read any name; a magic is a call of the last."""

LOOPS = "__nbaccel_loops__"
"""The builtin that marked code calls."""

CELL = "<module>"
"""The name of a cell's own code."""

Path = tuple[tuple[int, str], ...]
"""Statements from a function's body to one of them: the place in a block, and the field that holds the next block.

The field of the last one is empty. Fields of parts are numbered: "cases.1".
"""

_TRAINS = frozenset({"step", "backward", "fit"})
"""Methods that a loop which trains calls, itself or in a function that it names."""

_SAME_AGAIN = frozenset({"range", "len", "min", "max", "int"})
"""Functions that a loop's head may call without drawing a random number."""

Loop = ast.For | ast.While


def blocks_of(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the blocks of a statement, each with the field that holds it; none of a function or a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield name, block
    for name in ("handlers", "cases"):
        for number, part in enumerate(getattr(node, name, ())):
            yield f"{name}.{number}", part.body


def block_at(node: ast.stmt, name: str) -> list[ast.stmt]:
    """Return the block of a statement that a field holds."""
    return dict(blocks_of(node))[name]


def _set_block(node: ast.stmt, name: str, block: list[ast.stmt]) -> None:
    parts, _, number = name.partition(".")
    if number:
        getattr(node, parts)[int(number)].body = block
    else:
        setattr(node, name, block)


def ahead(block: Sequence[ast.stmt], path: Path) -> Iterator[Sequence[ast.stmt]]:
    """Yield statements that may run from a position on; each list runs in its order, from its begin or not at all."""
    (at, name), *rest = path
    node = block[at]
    if rest:
        yield from ahead(block_at(node, name), tuple(rest))
        if isinstance(node, Loop):
            yield [node]
        elif isinstance(node, ast.Try):
            yield from (other for where, other in blocks_of(node) if where != name)
    else:
        yield [node]
    yield block[at + 1 :]


def bound_by(node: ast.AST) -> set[str]:
    """Return the names that a statement may bind, in its blocks too, and not in functions within it."""
    found: set[str] = set()
    pending: list[ast.AST] = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(each.name)
            continue
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        if not isinstance(each, ast.Lambda):
            pending += ast.iter_child_nodes(each)
    return found


# --- what is there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UsersFunction:
    """A function of the user's, or the cell itself.

    Args:
        file: The name of its file or cell.
        name: Its qualified name; of a cell `CELL`.
        line: Where its code begins.
        body: Its statements, which nothing changes.
        is_marked: Its loops are marked: it is no generator, no coroutine, and nothing compiles it.
    """

    file: str
    name: str
    line: int
    body: list[ast.stmt]
    is_marked: bool

    @cached_property
    def mark(self) -> str:
        """The mark of its source, alike in all processes."""
        return mark_of_tree(self.body)

    @cached_property
    def text(self) -> list[str]:
        """Its statements in one form, for the sentence that says where two texts differ."""
        return [line for statement in self.body for line in ast.unparse(statement).splitlines()]

    @property
    def said(self) -> str:
        """Its name in a sentence."""
        return "the cell" if self.name == CELL else f"`{self.name.rpartition('.')[2]}`"


@dataclass(frozen=True, eq=False)
class LoopSite:
    """A loop of the text that is marked.

    Args:
        number: Its number in marked code.
        path: Where it is in `function`.
        is_quiet: Its head draws no random numbers when it is evaluated; `iter` of its value may.
    """

    number: int
    function: UsersFunction
    path: Path
    node: Loop
    is_quiet: bool

    @property
    def line(self) -> int:
        """Its line in the file or cell."""
        return self.node.lineno


class UsersProgram:
    """The texts of a cell and of the notebook's functions, and the loops in them that may train.

    Args:
        trees: The trees of files and cells, by name. They are annotated, and stay otherwise as they are.

    Attributes:
        sites: The marked loops, by their numbers.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.trees = trees
        self.sites: list[LoopSite] = []
        self._functions: dict[tuple[str, str, int], UsersFunction] = {}
        for name, tree in trees.items():
            self._add(UsersFunction(name, CELL, 1, tree.body, is_marked=True))
            self._collect(name, tree.body, "")
        self._mentions = {each: _mentions(each.body) for each in self._functions.values()}
        self._leading = _names_that_lead(self._mentions)
        for function in self._functions.values():
            if function.is_marked:
                self._find_loops(function, function.body, ())

    def function_of(self, code: types.CodeType) -> UsersFunction | None:
        """Return the function that code was compiled from; None for one that is not of these texts, as a lambda."""
        if code.co_name == CELL:
            return self._functions.get((code.co_filename, CELL, 1))
        return self._functions.get((code.co_filename, code.co_qualname, code.co_firstlineno))

    def named(self, name: str, mark: str) -> list[UsersFunction]:
        """Return the functions of a name and source; a cell that ran twice leaves two."""
        return [each for each in self._functions.values() if each.name == name and each.mark == mark]

    def of_cell(self, file: str) -> list[UsersFunction]:
        """Return the text of a cell."""
        return [self._functions[file, CELL, 1]]

    def with_name(self, name: str) -> list[UsersFunction]:
        """Return the functions of a name."""
        return [each for each in self._functions.values() if each.name == name]

    def mentioned_elsewhere(self, function: UsersFunction) -> set[str]:
        """Return the names in all other functions, and of those of `READS_BY_TEXT` in this one, too."""
        named = (self._mentions[each] for each in self._functions.values() if each is not function)
        return set().union(*named, READS_BY_TEXT & self._mentions[function])

    def is_marked(self, file: str) -> bool:
        """Return whether a file has a loop that is marked."""
        return any(site.function.file == file for site in self.sites)

    def _add(self, function: UsersFunction) -> UsersFunction:
        self._functions[function.file, function.name, function.line] = function
        return function

    def _collect(self, file: str, block: Iterable[ast.stmt], prefix: str) -> None:
        for node in block:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                is_plain = isinstance(node, ast.FunctionDef) and node.name not in NOT_REWRITTEN
                is_marked = is_plain and not is_generator(node) and not is_compiled(node)
                node.nbaccel_function = self._add(UsersFunction(file, name, line, node.body, is_marked))  # type: ignore[union-attr]
                self._collect(file, node.body, f"{name}.<locals>.")
            elif isinstance(node, ast.ClassDef):
                self._collect(file, node.body, f"{prefix}{node.name}.")
            else:
                for _, inner in blocks_of(node):
                    self._collect(file, inner, prefix)

    def _find_loops(self, function: UsersFunction, block: Sequence[ast.stmt], path: Path) -> None:
        for at, node in enumerate(block):
            if isinstance(node, Loop) and not self._leading.isdisjoint(_mentions([node])):
                site = LoopSite(len(self.sites), function, (*path, (at, "")), node, _is_quiet(node))
                node.nbaccel_site = site  # type: ignore[union-attr]
                self.sites.append(site)
            for name, inner in blocks_of(node):
                self._find_loops(function, inner, (*path, (at, name)))


def _names_that_lead(mentions: Mapping[UsersFunction, set[str]]) -> set[str]:
    """Return the names by which a text comes to a step: methods of optimizers, and functions that name such a name."""
    leading = {f".{name}" for name in _TRAINS}
    while True:
        found = {
            function.name.rpartition(".")[2]
            for function, named in mentions.items()
            if function.name != CELL and not leading.isdisjoint(named)
        }
        if found <= leading:
            return leading
        leading |= found


def _mentions(body: Sequence[ast.AST]) -> set[str]:
    """Return the names in statements; of attributes both with a dot and without."""
    found: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, body)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr, f".{node.attr}"}
    return found


def _is_quiet(node: Loop) -> bool:
    if isinstance(node, ast.While):
        return True
    return all(
        isinstance(each.func, ast.Name) and each.func.id in _SAME_AGAIN
        for each in ast.walk(node.iter)
        if isinstance(each, ast.Call)
    )


# --- the marked version -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoesOnAt:
    """One frame of the position at which a program goes on.

    Args:
        number: Of the frame; the cell's is 0.
        path: The statement that it is in.
        is_inside: A loop of a frame above is open.
        first_loop: The number of the first open loop of this frame, among those of the position.
        names: Its locals.
        deleted: Locals that it had at the head and has no more.
        made_again: Names that no file could hold: statements that bind them run again.
        is_filled: Some of them are filled afterwards.
        over: Paths of its statements that have trained and are over.
    """

    number: int
    path: Path
    is_inside: bool = False
    first_loop: int = 0
    names: Collection[str] = ()
    deleted: Collection[str] = ()
    made_again: Collection[str] = ()
    is_filled: bool = False
    over: Sequence[Path] = ()


@dataclass
class _Marking:
    """Marks statements, and gives functions on the way a second body.

    Args:
        goes_on: The frames of the position, by function; the cell's is not among them.
        runs_plain: See `keep_for_compilers`.
    """

    goes_on: Mapping[UsersFunction, Sequence[GoesOnAt]]
    runs_plain: Callable[[], bool]
    _count: int = field(default=0, init=False)

    def block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        return [self.statement(each) for each in statements]

    def statement(self, node: ast.stmt) -> ast.stmt:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node)
            return node
        if isinstance(node, ast.ClassDef):
            node.body = self.block(node.body)
            return node
        for name, inner in [*blocks_of(node)]:
            _set_block(node, name, self.block(inner))
        site: LoopSite | None = getattr(node, "nbaccel_site", None)
        if site is None or not isinstance(node, Loop):
            return node
        number = ast.Constant(site.number)
        if isinstance(node, ast.For):
            node.iter = placed(_call("over", number, node.iter), node.iter)
        else:
            asked = placed(_call("turn", number), node.test)
            node.test = placed(ast.BoolOp(ast.And(), [asked, node.test]), node.test)
        return self.opened(site, [node], node)

    def opened(self, site: LoopSite, body: list[ast.stmt], where: ast.stmt) -> ast.stmt:
        self._count += 1
        item = ast.withitem(placed(_call("loop", ast.Constant(site.number)), where), None)
        return ast.copy_location(ast.With([item], body), where)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        function: UsersFunction = node.nbaccel_function  # type: ignore[union-attr]
        if is_compiled(node):
            return
        plain, count = copied(node.body), self._count
        entries = self.goes_on.get(function, ())
        resumed = [_GoingOn(self, entry).body(copied(node.body)) for entry in entries]
        first = int(must_stay_first(node.body[0], 0))  # a docstring
        body = self.block(node.body)
        for entry, other in zip(entries, resumed, strict=True):
            body[first:] = [ast.If(_call("enters", ast.Constant(entry.number)), other, body[first:])]
        node.body = body
        if entries or self._count > count:
            keep_for_compilers(node, plain, self.runs_plain)


class _GoingOn:
    """Makes the version of one function's body that goes on at a position.

    Args:
        marking: Marks the rest.
        here: The frame of the position.
    """

    def __init__(self, marking: _Marking, here: GoesOnAt) -> None:
        self._marking = marking
        self._here = here
        self._next_loop = here.first_loop

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        begin = self._names(statements[0]) if self._here.is_inside else []
        return begin + self._block(statements, self._here.path, (), is_outer=not self._here.is_inside)

    def _block(self, statements: list[ast.stmt], path: Path, above: Path, is_outer: bool) -> list[ast.stmt]:
        """Return a block that begins at the statement of the position.

        Args:
            path: From this block to that statement.
            above: From the function's body to this block.
            is_outer: No loop is open yet: what stands before runs as ever.
        """
        (at, name), *rest = path
        done: list[ast.stmt] = []
        for number, each in enumerate(statements[:at]):
            if is_outer and self._is_over((*above, (number, ""))):
                done += [*_made("leave_out()", each), *self._names(each)]
            elif is_outer or _defines(each) or not bound_by(each).isdisjoint(self._here.made_again):
                done.append(self._marking.statement(each))
        here = statements[at]
        done += self._statement(here, name, tuple(rest), (*above, (at, name)), is_outer)
        return done + self._marking.block(statements[at + 1 :])

    def _is_over(self, path: Path) -> bool:
        depth = len(path)
        return any(each[: depth - 1] == path[:-1] and each[depth - 1][0] == path[-1][0] for each in self._here.over)

    def _statement(self, node: ast.stmt, name: str, rest: Path, above: Path, is_outer: bool) -> list[ast.stmt]:
        if isinstance(node, Loop) and name in ("", "body"):
            head = [*_made("head()", node), *self._names(node), *self._deletions(node)] if is_outer else []
            return [*head, self._loop(node, rest, above)]
        if not rest:  # the call that leads to the next frame
            arms = _made(f"arm({self._here.number + 1})", node)
            return [*(self._filled(node) or self._names(node)), *arms, self._marking.statement(node)]
        inner = self._block(block_at(node, name), rest, above, is_outer)
        if isinstance(node, Loop):  # its `else`: the loop is over
            return inner
        if isinstance(node, ast.If):
            return [*([placed(ast.Expr(node.test), node)] if is_outer else []), *inner]
        if isinstance(node, ast.Match) and not is_outer:
            return inner
        for other, block in [*blocks_of(node)]:
            if other != name:
                is_done = isinstance(node, ast.Try) and name == "orelse" and other == "body"
                _set_block(node, other, [placed(ast.Pass(), node)] if is_done else self._marking.block(block))
        _set_block(node, name, inner)
        return [node]

    def _loop(self, node: Loop, rest: Path, above: Path) -> ast.stmt:
        site: LoopSite = node.nbaccel_site  # type: ignore[union-attr]
        number, self._next_loop = self._next_loop, self._next_loop + 1
        arrives: list[ast.stmt] = []
        if rest:
            first = [*self._names(node), *self._block(copied(node.body), rest, above, is_outer=False)]
            asked = placed(_call("is_first", ast.Constant(number)), node)
            node.body = [placed(ast.If(asked, first, self._marking.block(node.body)), node)]
        else:
            node.body = self._marking.block(node.body)
            arrives = self._filled(node)
        node.orelse = self._marking.block(node.orelse)
        if isinstance(node, ast.For):
            begins = placed(_call("begin", ast.Constant(number)), node.iter)
            goes_on = _call("rest", ast.Constant(site.number), begins, node.iter, ast.Constant(not rest))
            node.iter = placed(goes_on, node.iter)
            return self._marking.opened(site, [*arrives, node], node)
        turn: ast.expr = placed(_call("turn", ast.Constant(site.number)), node.test)
        test: ast.expr = placed(ast.BoolOp(ast.And(), [turn, node.test]), node.test)
        if rest:
            again = placed(_call("is_again", ast.Constant(number)), node.test)
            test = placed(ast.BoolOp(ast.Or(), [again, test]), node.test)
        else:
            arrives = [*arrives, *_made("arrive()", node)]
        node.test = test
        return self._marking.opened(site, [*arrives, node], node)

    def _names(self, where: ast.stmt) -> list[ast.stmt]:
        """Return statements that bind the names of this frame."""
        frame = self._here.number
        if frame == 0:
            return _made("bind_globals()", where)
        done: list[ast.stmt] = []
        for name in self._here.names:
            value = _made(f"value({frame}, {name!r})", where, target=name)
            done.append(placed(ast.If(_call("has", ast.Constant(frame), ast.Constant(name)), value, []), where))
        return done

    def _deletions(self, where: ast.stmt) -> list[ast.stmt]:
        names = self._here.deleted if self._here.number else ()
        return [placed(ast.Delete([placed(ast.Name(name, ast.Del()), where)]), where) for name in names]

    def _filled(self, where: ast.stmt) -> list[ast.stmt]:
        return [*_made("fill()", where), *self._names(where)] if self._here.is_filled else []


def marked(
    program: UsersProgram, file: str, goes_on: Sequence[tuple[UsersFunction, GoesOnAt]], runs_plain: Any
) -> ast.Module:
    """Return the tree of one file or cell with marked loops.

    Args:
        goes_on: The frames of the position at which the program goes on, the cell's first; empty for a run that begins.
        runs_plain: Returns whether a function runs its plain body: see `keep_for_compilers`.
    """
    by_function: dict[UsersFunction, list[GoesOnAt]] = {}
    for function, entry in goes_on:
        by_function.setdefault(function, []).append(entry)
    body = copied(program.trees[file].body)
    marking = _Marking(by_function, runs_plain)
    cell = [entry for function, entry in goes_on if function.name == CELL and function.file == file]
    tree = ast.Module(_GoingOn(marking, cell[0]).body(body) if cell else marking.block(body), [])
    return ast.fix_missing_locations(tree)


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(LOOPS, ast.Load()), method, ast.Load()), list(arguments), [])


def _made(call: str, where: ast.stmt, target: str = "") -> list[ast.stmt]:
    """Return a statement that calls a method of `LOOPS`, in the place of another."""
    found = ast.parse(f"{target} = {LOOPS}.{call}" if target else f"{LOOPS}.{call}").body
    for node in ast.walk(found[0]):
        if hasattr(node, "lineno"):
            ast.copy_location(node, where)
    return found
