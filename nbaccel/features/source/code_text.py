"""The text of compiled code, in one form for all versions of Python. Used in the kernel and in ranks; runs no code.

Two functions are the same if their syntax trees are: comments, layout and most docstrings do not count. The tree is
written here, field by field, since `ast.unparse` and `ast.dump` differ between versions of Python. The tree of a
function is found by compiling the text of its file or cell: the one that gives this very code. So a file that was
edited after its import is not taken for what runs, and of several lambdas in a line the right one is found. Code
without a text, such as that of ``exec``, is known by its instructions alone, which hold for one version of Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

__all__ = [
    "CODE",
    "COMPILED",
    "CodeTexts",
    "canonical",
    "mark_of_code",
    "mark_of_text",
    "mark_of_tree",
    "parsed",
    "parsed_lines",
]

CODE, COMPILED = "code ", "compiled "
"""Beginnings of the marks of code by its text, and by its instructions."""

_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_HAVE_DOCSTRINGS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
_BYTES = 8
_FUTURE = 0x1FE0000
"""The bits of `co_flags` for `from __future__` imports."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# --- one form ---------------------------------------------------------------------------------------------------


def canonical(node: Any) -> str:
    """Return a syntax tree as text, equal for equal trees under all versions of Python.

    A docstring is left out, since few functions read theirs; behind a decorator or a base class it stays, as libraries
    that take it for a prompt get it through these.

    Example:
        >>> canonical(ast.parse("x = f'{a}' 'b'", mode="exec").body[0])
        "Assign(targets=[Name(id=x)],value=JoinedStr(values=[FormattedValue(value=Name(id=a),conversion=-1),'b']))"
    """
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.AST):
        fields = [(name, _field(node, name)) for name in node._fields if name not in _LEFT_OUT]
        return f"{type(node).__name__}({','.join(f'{name}={text}' for name, text in fields if text)})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    return str(node)  # a name, a number, or None in the place of a node


def _field(node: ast.AST, name: str) -> str:
    """Return one field as text; empty if it holds nothing, as fields do that a version does not have."""
    value: Any = getattr(node, name, None)
    if name == "body" and isinstance(node, _HAVE_DOCSTRINGS) and _is_docstring(value) and not _may_be_read(node):
        value = value[1:] or [ast.Pass()]
    elif isinstance(node, ast.JoinedStr) and name == "values":
        value = list(_joined(value))
    elif name == "format_spec" and value is not None and not list(_joined(value.values)):
        value = None
    return "" if value is None or value == [] else canonical(value)


def _is_docstring(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr) and _is_text(body[0].value)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _may_be_read(node: ast.AST) -> bool:
    return bool(getattr(node, "decorator_list", None) or getattr(node, "bases", None))


def _joined(values: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Yield the parts of an f-string with its constants joined, and without empty ones: versions cut them otherwise."""
    text = ""
    for part in values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        if text:
            yield ast.Constant(text)
        text = ""
        yield part
    if text:
        yield ast.Constant(text)


def _constant(value: Any) -> str:
    """Return a constant as text that tells its type; in ASCII, since versions differ in what is printable."""
    return hex(value) if type(value) is int else ascii(value)  # Python refuses to write long numbers in decimals


def mark_of_tree(node: Any) -> str:
    """Return the mark of a syntax tree."""
    return CODE + hashlib.blake2b(canonical(node).encode(), digest_size=_BYTES).hexdigest()


def mark_of_text(text: str) -> str:
    """Return the mark of one function or lambda that was printed by `ast.unparse`; empty if it is something else."""
    with suppress(SyntaxError, ValueError):
        (statement,) = parsed(text).body
        node = statement.value if isinstance(statement, ast.Expr) else statement
        if isinstance(node, _Function):
            return mark_of_tree(node)
    return ""


def parsed(text: str) -> ast.Module:
    """Return the tree of a text, without the warnings that Python gave when the user's code was compiled.

    Raises:
        SyntaxError: It is no Python.
    """
    with _no_warnings():
        return ast.parse(text)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Let Python give no warnings, in all threads: for as short as one text needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- the tree of a function -------------------------------------------------------------------------------------


class CodeTexts:
    """The texts of the files and cells that were asked for, each parsed once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int], _Text] = {}

    def tree_of(self, code: types.CodeType, names: Mapping[str, Any]) -> _Function | None:
        """Return the tree of a function's code; None if there is no text that gives this code.

        Args:
            names: The globals of the function; the loader of a module in an archive is found there.
        """
        key = code.co_filename, code.co_flags & _FUTURE
        text = self._texts.get(key) or _Text(_lines_of(code, names), key[1])
        found = text.tree_of(code)
        if found is None:  # the file may have been loaded anew; what was read before is not dropped earlier
            linecache.checkcache(code.co_filename)
            if (lines := _lines_of(code, names)) != text.lines:
                text = _Text(lines, key[1])
                found = text.tree_of(code)
        self._texts[key] = text
        return found


def _lines_of(code: types.CodeType, names: Mapping[str, Any]) -> list[str]:
    with suppress(Exception):  # a loader of the user's may raise anything
        return linecache.getlines(code.co_filename, dict(names))
    return []


class _Text:
    """One file or cell, and its functions.

    Args:
        flags: The flags of `from __future__` imports.
    """

    def __init__(self, lines: list[str], flags: int) -> None:
        self.lines = lines
        self._flags = flags

    def tree_of(self, code: types.CodeType) -> _Function | None:
        for functions in ("_of_file", "_of_cell"):
            found: list[tuple[_Function, int, types.CodeType]] = getattr(self, functions)
            twins = [each for each in found if _does_the_same(each[2], code)]
            if twins:
                return min(twins, key=lambda twin: abs(twin[1] - code.co_firstlineno))[0]
        return None

    @functools.cached_property
    def _of_file(self) -> list[tuple[_Function, int, types.CodeType]]:
        with suppress(SyntaxError, ValueError):
            return list(_compiled(parsed_lines(self.lines), self._flags))
        return []

    @functools.cached_property
    def _of_cell(self) -> list[tuple[_Function, int, types.CodeType]]:
        """The functions as IPython compiles a cell, statement by statement: imports above make no difference then."""
        found: list[tuple[_Function, int, types.CodeType]] = []
        with suppress(SyntaxError, ValueError):
            for statement in parsed_lines(self.lines).body:
                found += _compiled(ast.Module([statement], []), self._flags)
        return found


def _compiled(tree: ast.Module, flags: int) -> Iterator[tuple[_Function, int, types.CodeType]]:
    """Yield all functions of a text: their tree, their line, and their code.

    No position in compiled code says which lambda of a line it belongs to, under all versions. So the text is compiled
    twice, the second time with the number of each function as its line.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    plain = list(_within(_code_of(tree, flags)))
    found = []
    for number, node in enumerate(functions, 1):
        found.append((node, _first_line(node)))
        first_decorator = getattr(node, "decorator_list", ())[:1]  # the code begins in its line
        for each in (node, *first_decorator):
            each.lineno = each.end_lineno = number
            each.col_offset = each.end_col_offset = 0
    numbered = list(_within(_code_of(tree, flags)))
    if len(plain) != len(numbered):  # equal lambdas in one place were one
        plain = numbered
    for code, same in zip(plain, numbered, strict=True):
        if 0 < (number := same.co_firstlineno) <= len(found) and _is_code_of(found[number - 1][0], code):
            yield *found[number - 1], code


def _code_of(tree: ast.Module, flags: int) -> types.CodeType:
    with _no_warnings():
        code: types.CodeType = compile(tree, "", "exec", flags, dont_inherit=True)
    return code


def parsed_lines(lines: list[str]) -> ast.Module:
    """Return the tree of a file or a cell. Of a cell as it was typed, the lines of magics become empty."""
    try:
        return parsed("".join(lines))
    except SyntaxError:
        plain = ["\n" if line.lstrip().startswith(("%", "!", "?")) else line for line in lines]
        return parsed("".join(plain))


def _first_line(node: _Function) -> int:
    first: ast.AST = next(iter(getattr(node, "decorator_list", ())), node)
    return int(getattr(first, "lineno", 0))


def _is_code_of(node: _Function, code: types.CodeType) -> bool:
    return code.co_name == getattr(node, "name", "<lambda>")


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _within(constant)


def _does_the_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether two codes differ in their places at most."""
    return one.co_name == other.co_name and one.co_code == other.co_code and _parts(one) == _parts(other)


def _parts(code: types.CodeType) -> tuple[Any, ...]:
    in_order = [sorted(each, key=repr) if isinstance(each, frozenset) else each for each in code.co_consts]
    constants = [_parts(each) if isinstance(each, types.CodeType) else repr(each) for each in in_order]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, constants


def mark_of_code(code: types.CodeType) -> str:
    """Return the mark of compiled code, for one version of Python. The places of its lines do not count."""
    return COMPILED + hashlib.blake2b(repr(_parts(code)).encode(), digest_size=_BYTES).hexdigest()
