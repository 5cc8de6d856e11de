"""The notebook's functions: their trees, and other code put into them while they exist. Runs in ranks.

Checks of cells and checkpoints of cells rewrite loops, each for its own purpose, in functions of earlier cells and of
local modules. Here is what both need: which functions these are, what of a tree is left as it is, and how a function
gets the code of a rewritten tree. Rewritten code calls a builtin, by whose name it is known.
"""

from __future__ import annotations

import ast
import copy
import gc
import itertools
import linecache
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nbaccel.base.notices import is_users
from nbaccel.features.source.code_text import parsed_lines
from nbaccel.namespace.names import READ_BY_TEXT

__all__ = [
    "FUTURE",
    "NOT_REWRITTEN",
    "Codes",
    "Functions",
    "Replaced",
    "codes_of",
    "copied",
    "functions_by_file",
    "functions_reached",
    "is_compiled",
    "is_generator",
    "is_rewritable",
    "keep_for_compilers",
    "key_of",
    "must_stay_first",
    "objects_of_process",
    "placed",
    "replace_codes",
    "take_declarations",
    "uses_name",
]

NOT_REWRITTEN = frozenset({"forward", "__getitem__", "__getitems__", "__len__", "collate_fn"})
"""Functions that train nothing: they are called for each batch or sample, by compiled models or in other processes."""

_COMPILERS = frozenset({"compile", "jit", "njit", "script", "vectorize", "guvectorize", "function", "kernel"})
"""Last names of decorators that translate a function into other code: torch, Numba, JAX, Triton, TensorFlow."""

_MOST_FILES = 200
"""Files whose functions are rewritten, cells first: a library in a folder of the user has more, and takes seconds."""

_MOST_LINES = 20_000
"""Lines of these files, of which some thousands are rewritten in a second; a count is the same in all ranks."""

FUTURE = 0x1FE0000
"""The bits of `co_flags` for `from __future__` imports."""

_ASKS = "__nbaccel_asks__"
"""Name that a function has for a moment, for the question which of its bodies runs."""

_PLACELESS = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)

Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Replaced(NamedTuple):
    """A function that has rewritten code, and the code that it had."""

    function: types.FunctionType
    plain: types.CodeType


# --- trees --------------------------------------------------------------------------------------------------------


def copied(statements: list[ast.stmt]) -> list[ast.stmt]:
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


def keep_for_compilers(node: ast.stmt, plain: list[ast.stmt], runs_plain: Callable[[], bool]) -> None:
    """Let a function have its plain body where `torch.compile` reads it, which fails at a builtin of ours.

    Args:
        runs_plain: Returns whether the plain body is to run. It is imported where it is asked, by its module and name.
    """
    rewritten: list[ast.stmt] = getattr(node, "body")  # noqa: B009  # of a function of either kind
    head = plain[: int(must_stay_first(plain[0], 0))]
    plain, rewritten = plain[len(head) :], rewritten[len(head) :]
    names: dict[type[ast.Global | ast.Nonlocal], dict[str, None]] = {ast.Global: {}, ast.Nonlocal: {}}
    for body in (plain, rewritten):
        take_declarations(body, names)
    declared = [kind(list(found)) for kind, found in names.items() if found]
    if not plain:
        return
    asks = ast.ImportFrom(runs_plain.__module__, [ast.alias(runs_plain.__name__, _ASKS)], 0)
    forget = ast.Delete([ast.Name(_ASKS, ast.Del())])
    choice = ast.If(ast.Call(ast.Name(_ASKS, ast.Load()), [], []), plain, [placed(forget, node), *rewritten])
    node.body = [*head, *(placed(each, node) for each in (*declared, asks, choice))]  # type: ignore[attr-defined]


def take_declarations(body: list[ast.stmt], names: Mapping[type, dict[str, None]]) -> None:
    """Collect the names that a function declares global or nonlocal: they may be declared once, before their use."""
    for at, statement in enumerate(body):
        if isinstance(statement, ast.Global | ast.Nonlocal):
            names[type(statement)].update(dict.fromkeys(statement.names))
            body[at] = placed(ast.Pass(), statement)
        elif not isinstance(statement, Functions | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                take_declarations(getattr(statement, field, []), names)
            for part in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
                take_declarations(part.body, names)


def must_stay_first(statement: ast.stmt, at: int) -> bool:
    """Return whether a statement would lose its meaning behind another one: a docstring, or an import of the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return at == 0 and is_text


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator translates a function: a compiler does not know the log."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(ast.unparse(each).rpartition(".")[2] in _COMPILERS for each in called)


def is_generator(node: ast.AST) -> bool:
    """Return whether a function yields; functions and lambdas inside of it do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(child, Functions | ast.Lambda | ast.ClassDef) and is_generator(child):
            return True
    return False


def placed(node: Any, where: ast.AST) -> Any:
    """Give a new node the place of the user's, as tracebacks shall show it."""
    return ast.copy_location(node, where)


# --- functions that exist -----------------------------------------------------------------------------------------


def is_rewritable(filename: str) -> bool:
    """Return whether code of that file is of the notebook, or of a module beside it: no library, and it has a text."""
    return is_users(filename) and bool(linecache.getlines(filename))


def functions_by_file(
    is_ours: Callable[[str], bool] = is_rewritable, functions: Iterable[types.FunctionType] | None = None
) -> dict[str, list[types.FunctionType]]:
    """Return functions by their file or cell, of those files that `is_ours` accepts, cells first.

    Some thousands of lines at most. Functions of modules that are imported later are not among them.

    Args:
        functions: By default all of this process.
    """
    files: dict[str, list[types.FunctionType]] = {}
    judged: dict[str, bool] = {}
    for function in _functions() if functions is None else functions:
        name = function.__code__.co_filename
        if name not in judged:
            judged[name] = is_ours(name)
        if judged[name]:
            files.setdefault(name, []).append(function)
    found: dict[str, list[types.FunctionType]] = {}
    lines = 0
    for name in sorted(files, key=_distance)[:_MOST_FILES]:
        lines += len(linecache.getlines(name))
        if lines > _MOST_LINES and os.path.isfile(name):
            break
        found[name] = files[name]
    return found


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


_NO_WAY = (types.ModuleType, types.CodeType, types.FrameType)
"""Types of objects that lead to no function, or to all: a module of a library, a frame."""

_OF_THE_NOTEBOOK = ("IPython.", "ipykernel.", "traitlets.", "zmq.", "nbaccel.", "torch._C.", "logging.")
"""Modules whose objects lead to all names of the notebook, or to those of the process."""

_MOST_ELEMENTS = 10_000
"""Elements of a container that are looked at."""


def functions_reached(
    parts: Iterable[types.CodeType], namespace: dict[str, Any], is_ours: Callable[[str], bool] = is_rewritable
) -> list[types.FunctionType]:
    """Return the functions that code may call: those to which the names in it lead, in `namespace`.

    What it does not name is not looked at. To list all objects of the process takes seconds where a notebook has
    millions, and a forked rank would get a copy of the memory of each.

    Args:
        parts: The code of a cell.
        is_ours: Returns whether a file, or a cell, is of the notebook.
    """
    judged: dict[str, bool] = {}

    def of_ours(file: Any) -> bool:
        if file not in judged:
            judged[file] = is_ours(str(file))
        return judged[file]

    names = {name for part in parts for name in _names_in(part)}
    waiting = (
        list(namespace.values()) if READ_BY_TEXT & names else [namespace[name] for name in names & namespace.keys()]
    )
    seen: dict[int, Any] = {id(namespace): namespace, id(sys.modules): sys.modules}
    found = []
    while waiting:
        obj = waiting.pop()
        kind = type(obj)
        if id(obj) in seen or not (gc.is_tracked(obj) or issubclass(kind, dict | tuple)):
            continue
        seen[id(obj)] = obj
        if kind is types.FunctionType:
            found.append(obj)
            waiting += [obj.__closure__, obj.__defaults__, obj.__kwdefaults__, obj.__dict__]
            if of_ours(obj.__code__.co_filename):
                waiting += [obj.__globals__[name] for name in _names_in(obj.__code__) if name in obj.__globals__]
        elif kind is types.ModuleType and of_ours(getattr(obj, "__file__", None) or ""):
            waiting += vars(obj).values()
        elif issubclass(kind, type):
            own = type.__dict__["__dict__"].__get__(obj)
            home = sys.modules.get(own.get("__module__", ""))
            if own.get("__module__") == "__main__" or of_ours(getattr(home, "__file__", None) or ""):
                waiting += [*own.values(), *type.__dict__["__bases__"].__get__(obj)]
        elif issubclass(kind, _NO_WAY) or f"{kind.__module__}.".startswith(_OF_THE_NOTEBOOK):
            continue
        elif kind in (list, tuple, set, frozenset, deque):
            waiting += itertools.islice(obj, _MOST_ELEMENTS)
        elif kind is dict:
            waiting += itertools.islice(obj.values(), _MOST_ELEMENTS)
        else:
            waiting += gc.get_referents(obj)
    return found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def replace_codes(name: str, functions: Sequence[types.FunctionType], tree: ast.Module, builtin: str) -> list[Replaced]:
    """Give functions of one file or cell the code of its rewritten tree; return those that got it.

    A function is left alone if its code does not come from the text that its file has now.

    Args:
        tree: The rewritten tree.
        builtin: The name that rewritten code calls.

    Raises:
        SyntaxError, ValueError, RecursionError: The file has no text, or not one that can be compiled as a whole.
    """
    plain_tree = parsed_lines(linecache.getlines(name))
    is_cell = not os.path.isfile(name)
    codes: dict[int, tuple[Codes, Codes]] = {}
    replaced = []
    for function in functions:
        flags = function.__code__.co_flags & FUTURE
        if flags not in codes:
            plain_codes = codes_of(plain_tree, name, flags, is_cell, builtin)
            codes[flags] = plain_codes, codes_of(tree, name, flags, is_cell, builtin)
        plain, rewritten = (each.get(key_of(function.__code__)) for each in codes[flags])
        if plain is None or rewritten is None or not uses_name(rewritten, builtin):
            continue
        if _is_same(function.__code__, plain) and function.__code__.co_freevars == rewritten.co_freevars:
            replaced.append(Replaced(function, function.__code__))
            function.__code__ = rewritten
    return replaced


Codes = dict[tuple[str, int], types.CodeType | None]
"""The code of each function of a file, by its qualified name and line."""


def key_of(code: types.CodeType) -> tuple[str, int]:
    """Return the key of a function in `Codes`."""
    return code.co_qualname, code.co_firstlineno


def codes_of(tree: ast.Module, name: str, flags: int, is_cell: bool, builtin: str) -> Codes:
    """Return the code of each function of a file; None where two have one name and line.

    Args:
        is_cell: Compile each statement by itself, as IPython does. Methods of a name are called by other instructions
            where the compiler has seen that it is an imported module.
        builtin: The name that rewritten code calls.
    """
    found: Codes = {}
    modules = [ast.Module([node], []) for node in tree.body] if is_cell else [tree]
    how = flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    pending = [compile(module, name, "exec", how, dont_inherit=True) for module in modules]
    while pending:
        for constant in pending.pop().co_consts:
            if isinstance(constant, types.CodeType):
                twin = found.get(key_of(constant), constant)
                if twin is not constant:  # the plain body of a rewritten function has functions of its own
                    twin = (
                        constant
                        if twin is not None and uses_name(constant, builtin) and not uses_name(twin, builtin)
                        else None
                    )
                found[key_of(constant)] = twin
                pending.append(constant)
    return found


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether a function has been compiled from this text: its file may have been edited since."""
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames)


def uses_name(code: types.CodeType, name: str) -> bool:
    """Return whether code, or a function in it, uses a global name."""
    return name in code.co_names or any(
        isinstance(each, types.CodeType) and uses_name(each, name) for each in code.co_consts
    )
