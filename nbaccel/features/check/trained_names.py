"""Find names whose values come from one rank's part of the data, such as losses of the training. Runs in the kernel.

These differ between ranks in a right program, and a score over all samples does not. Text alone tells them apart, by
the loop or the function that binds a name; where it cannot, a name counts as a score.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["trained_names"]

_BACKWARD = "backward"

_Loop = ast.For | ast.AsyncFor | ast.While


def trained_names(tree: ast.Module, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that are bound or extended where the cell trains, and those that are computed from them alone.

    Args:
        namespace: Has the functions that the cell calls.

    Example:
        >>> sorted(trained_names(ast.parse('''
        ... for x in loader:
        ...     loss = model(x)
        ...     loss.backward()
        ... for x in test_loader:
        ...     right += model(x)
        ... accuracy = right / 100
        ... shown = loss.item()
        ... '''), {}))
        ['loss', 'shown']
    """
    training = {name for name, value in namespace.items() if _trains_by_code(value)}
    training |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _trains(node, training)}
    trained: set[str] = set()
    measured: set[str] = set()
    others: list[ast.stmt] = []
    for loop, statement in _statements(tree, None):
        if _trains(statement, training) or (loop is not None and _trains_directly(loop, training)):
            trained |= _bound(statement)
        elif loop is not None and not _trains(loop, training):
            measured |= _bound(statement)
        else:
            others.append(statement)
    trained -= measured
    for _ in others:
        for statement in others:
            loaded = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if loaded & trained and not loaded & measured:
                trained |= _bound(statement)
    return trained


def _statements(node: ast.AST, loop: _Loop | None) -> Iterator[tuple[_Loop | None, ast.stmt]]:
    """Yield the simple statements of a block, each with the innermost loop around it; none of functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            yield loop, child
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child, child if isinstance(child, _Loop) else loop)


def _trains_directly(loop: _Loop, training: set[str]) -> bool:
    return any(of is loop and _trains(statement, training) for of, statement in _statements(loop, loop))


def _trains(node: ast.AST, training: set[str]) -> bool:
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    names = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called)
    return any(name == _BACKWARD or name in training for name in names)


def _trains_by_code(value: Any) -> bool:
    return type(value) is types.FunctionType and _names_backward(value.__code__)


def _names_backward(code: types.CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return _BACKWARD in code.co_names or any(map(_names_backward, inner))


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, and those whose object it extends: `losses.append(x)`, `by[x] = y`."""
    found = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(statement):
        owner = node.func if isinstance(node, ast.Call) else node
        is_changed = isinstance(node, ast.Call) or isinstance(getattr(node, "ctx", None), ast.Store)
        if is_changed and isinstance(owner, ast.Attribute | ast.Subscript) and isinstance(owner.value, ast.Name):
            found.add(owner.value.id)
    return found
