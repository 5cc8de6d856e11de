"""Where the user's frames are: the statement of each, found when it is asked for, and why a run could not go on there.

A frame says by itself which call it is in (`co_positions`), so nothing is counted while it runs. Runs in ranks.

A run goes on in a frame by running its statement again. So that has to lead to the next frame by itself: a call of a
plain function, in an expression, an assignment or a return, that holds no other value meanwhile.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.notices import PACKAGE_DIR
from nbaccel.features.cell_checkpoints.marked_loops import CELL, LoopSite, Path, UsersFunction, UsersProgram, blocks_of

__all__ = ["NoPosition", "Standing", "locals_of", "path_of", "users_frames"]

_PASSES_ON = (
    (os.path.join("torch", "utils", "_contextlib.py"), "decorate_context"),  # @torch.no_grad()
    ("contextlib.py", "inner"),
    (os.path.join("nn", "modules", "module.py"), "_wrapped_call_impl"),
    (os.path.join("nn", "modules", "module.py"), "_call_impl"),
)
"""Functions of libraries that call a function of the user's once, and hold nothing meanwhile that counts."""

_IN_A_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

_ELSE = "and a run could not go on in it"


class NoPosition(Exception):
    """A run could not go on where its frames are; the message is the sentence for the user."""


@dataclass(frozen=True)
class Standing:
    """A frame of the user's.

    Args:
        next: The frame that its call has begun, also one of a library; None for the frame of the loop itself.
    """

    frame: types.FrameType
    function: UsersFunction
    next: types.FrameType | None


def users_frames(program: UsersProgram, frame: types.FrameType, cell: str, is_strict: bool = False) -> list[Standing]:
    """Return the user's frames from the cell to `frame`.

    Args:
        cell: The name of the cell.
        is_strict: Refuse frames that lead on and are none of them.

    Raises:
        NoPosition: A frame in between is no plain function of the user's. Only with `is_strict`.
    """
    frames: list[types.FrameType] = []
    each: types.FrameType | None = frame
    while each is not None:
        frames.append(each)
        if each.f_code.co_filename == cell and each.f_code.co_name == CELL:
            break
        each = each.f_back
    else:
        if is_strict:
            raise NoPosition(
                f"the loop in line {frame.f_lineno} does not run in the cell, but in a thread or a callback"
            )
    frames.reverse()
    found: list[Standing] = []
    for at, here in enumerate(frames):
        function = program.function_of(here.f_code)
        following = frames[at + 1] if at + 1 < len(frames) else None
        if function is not None and (function.name == CELL or not here.f_code.co_flags & _IN_A_FRAME):
            found.append(Standing(here, function, following))
        elif is_strict and not _passes_on(here):
            raise NoPosition(_leads(found[-1] if found else None, here))
    return found


def locals_of(standing: Standing) -> dict[str, Any]:
    """Return the locals of a frame; names of its closure belong to the frame that made them."""
    free = {*standing.frame.f_code.co_freevars}
    return {
        name: value
        for name, value in standing.frame.f_locals.items()
        if name not in free and not name.startswith(("__", "."))
    }


def path_of(standing: Standing, site: LoopSite | None, is_inside: bool) -> Path:
    """Return the path to the statement that a frame is in.

    Args:
        site: The loop that is about to begin a round, in the last frame; None for a frame that waits for a call.
        is_inside: A loop is open around that statement.

    Raises:
        NoPosition: A run could not go on there.
    """
    if site is not None:
        return _allowed(standing, site.path)
    place = _place(standing)
    path, statement = _found(standing.function.body, place)
    if statement is None or not isinstance(
        statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return
    ):
        line = statement.lineno if statement is not None else standing.frame.f_lineno
        raise NoPosition(
            f"{_line(standing, line)}, the head of a statement leads to the training, {_ELSE}. A line of its own "
            "(result = train()) can."
        )
    _check_call(standing, statement, place, is_inside)
    return _allowed(standing, path)


_Place = tuple[int, int, int, int]
"""First line and column, last line and column."""


def _place(standing: Standing) -> _Place:
    code = standing.frame.f_code
    line, last_line, column, last_column = next(
        itertools.islice(code.co_positions(), standing.frame.f_lasti // 2, None), (None,) * 4
    )
    if line is None or last_line is None or column is None or last_column is None:
        raise NoPosition(
            f"{_line(standing, standing.frame.f_lineno)}: this Python was started without the columns of its code "
            "(PYTHONNODEBUGRANGES). Start it without that."
        )
    return line, column, last_line, last_column


def _found(body: Sequence[ast.stmt], place: _Place) -> tuple[Path, ast.stmt | None]:
    """Return the path to the innermost statement at a place, and that statement."""
    for at, node in enumerate(body):
        if not _spans(node, node, place):
            continue
        for name, block in blocks_of(node):
            if _spans(block[0], block[-1], place):
                rest, statement = _found(block, place)
                return ((at, name), *rest), statement
        return ((at, ""),), node
    return (), None


def _spans(first: ast.stmt, last: ast.stmt, place: _Place) -> bool:
    end = last.end_lineno or last.lineno, last.end_col_offset or 0
    return (first.lineno, first.col_offset) <= place[:2] < end


def _allowed(standing: Standing, path: Path) -> Path:
    body = standing.function.body
    for at, name in path:
        if name.startswith("handlers") or name == "finalbody":
            raise NoPosition(
                f"{_line(standing, body[at].lineno)}, the training runs in an `except` or `finally` block, {_ELSE}. "
                "Behind that statement it can."
            )
        if name:
            body = dict(blocks_of(body[at]))[name]
    return path


# --- the call -----------------------------------------------------------------------------------------------------


def _check_call(standing: Standing, statement: ast.stmt, place: _Place, is_inside: bool) -> None:
    """Refuse a call that would not lead to the next frame alone if its statement ran again.

    Raises:
        NoPosition: It would not.
    """
    route = next(_routes(statement, place[2:]), None)
    where = _line(standing, statement.lineno)
    if route is None:
        raise NoPosition(
            f"{where}, an operator or an attribute leads to the training, {_ELSE}. A call of a function can."
        )
    for parent, child in itertools.pairwise(route):
        if isinstance(parent, _COMPREHENSIONS):
            raise NoPosition(_comprehension(where, statement, parent))
        if is_inside and not all(map(_stays, _evaluated_before(parent, child))):
            raise NoPosition(
                f"{where} holds a value while its call trains, and a run that goes on would not have it. Give the call "
                "a line of its own: result = train()."
            )
    call = route[-1]
    assert isinstance(call, ast.Call)
    has_calls = any(isinstance(node, ast.Call) for node in ast.walk(call.func))
    if has_calls and not is_inside:
        leads = _last_name(call.func) == standing.next.f_code.co_name if standing.next is not None else False
    else:
        leads = not has_calls and standing.next is not None and standing.next.f_code in _codes(standing, call.func)
    if not leads:
        raise NoPosition(
            f"{where}, `{ast.unparse(call.func)}` leads to the training from within, {_ELSE}. A call of your function "
            "itself, in a `for` if need be, can."
        )


def _routes(node: ast.AST, end: tuple[int, ...]) -> Iterator[list[ast.AST]]:
    """Yield the nodes from `node` to the call that ends at a place. A method in a line of its own begins elsewhere."""
    if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == end:
        yield [node]
    for child in ast.iter_child_nodes(node):
        for route in _routes(child, end):
            yield [node, *route]


def _evaluated_before(parent: ast.AST, child: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node has evaluated and holds when it comes to a child."""
    if isinstance(parent, ast.Assign | ast.AnnAssign):  # the value comes first
        return
    for each in ast.iter_child_nodes(parent):
        if each is child:
            return
        if isinstance(parent, ast.Call) and each is parent.func:
            if any(isinstance(node, ast.Call) for node in ast.walk(each)):
                yield each
        elif isinstance(each, ast.expr):
            yield each


def _stays(node: ast.AST) -> bool:
    """Return whether an expression has the same value again: names of the frame, which waits, and constants."""
    return all(isinstance(each, ast.Name | ast.Constant | ast.expr_context | ast.operator) for each in ast.walk(node))


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _codes(standing: Standing, node: ast.expr) -> Iterator[types.CodeType]:
    """Yield the code that a call of an expression without calls begins."""
    frame = standing.frame
    try:
        value = eval(compile(ast.Expression(node), "<callee>", "eval"), frame.f_globals, {**frame.f_locals})
    except Exception:  # a name that is bound no more, or a property of the user's that raises anything
        return
    for _ in range(8):  # wrappers around wrappers
        if isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif not isinstance(value, types.FunctionType | type) and callable(value):
            value = type(value).__call__
        else:
            break
    if isinstance(value, types.FunctionType):
        yield value.__code__


# --- sentences ----------------------------------------------------------------------------------------------------


def _line(standing: Standing, line: int) -> str:
    return f"line {line}" if standing.function.name == CELL else f"line {line} of {standing.function.said}"


def _passes_on(frame: types.FrameType) -> bool:
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE_DIR):  # the items of a loop, and loaders
        return True
    return any(code.co_filename.endswith(file) and code.co_name == name for file, name in _PASSES_ON)


def _leads(caller: Standing | None, frame: types.FrameType) -> str:
    """Return the sentence about a frame that is no plain function of the user's."""
    code = frame.f_code
    if caller is None:
        return f"{code.co_name} leads to the training, {_ELSE}. The cell, or a function that it calls, can."
    where = _line(caller, caller.frame.f_lineno)
    if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        _, statement = _found(caller.function.body, _place(caller))
        inner = [each for each in ast.walk(statement) if isinstance(each, _COMPREHENSIONS)] if statement else []
        if statement is not None and inner:
            return _comprehension(_line(caller, statement.lineno), statement, inner[0])
    if code.co_name == "<lambda>":
        return f"{where}, a lambda leads to the training, {_ELSE}. A function with `def` can."
    if code.co_flags & _IN_A_FRAME:
        kind = "generator" if code.co_flags & inspect.CO_GENERATOR else "coroutine"
        return f"{where}, the {kind} {code.co_name} leads to the training, {_ELSE}. A function can."
    module = str(frame.f_globals.get("__name__", code.co_filename)).partition(".")[0]
    return (
        f"{where}, {code.co_name} of {module} leads to the training, {_ELSE}. A loop of the cell, or of a function of "
        "yours, can."
    )


def _comprehension(where: str, statement: ast.stmt, node: ast.AST) -> str:
    said = f"{where}, a comprehension leads to the training, {_ELSE}."
    if not isinstance(node, ast.ListComp) or len(node.generators) != 1 or node.generators[0].ifs:
        return f"{said} A `for` can."
    loop, name = node.generators[0], "results"
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
    head = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
    return f"{said} {head}: {name}.append({ast.unparse(node.elt)}) can."
