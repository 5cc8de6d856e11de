"""Names: finds the global names that the code of a cell reads and binds. Runs in the kernel and in ranks; runs no code.

It reads the bytecode if all possible accesses count, and the text if their order matters.
"""

from __future__ import annotations

import ast
import dis
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = [
    "codes_of",
    "home_of",
    "knows_ranks",
    "loop_variables",
    "made_before_read",
    "names_assigned",
    "names_in_magics",
    "names_read",
    "seeds",
    "with_their_own",
]

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL"})
_WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_SEEDS = frozenset({"manual_seed", "manual_seed_all", "seed", "seed_all", "seed_everything", "set_seed"})

_OF_RANKS = frozenset(
    {
        *("accelerator", "Accelerator", "notebook_launcher", "PartialState", "AcceleratorState", "Fabric"),
        *("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard", "init_process_group"),
    }
)
"""Names that only a program for several ranks has."""

_MODULES_OF_RANKS = frozenset({"accelerate", "deepspeed", "nbaccel"})
_VARIABLES_OF_RANKS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_HAVE_TRAINERS = frozenset({"accelerate", "catalyst", "lightning", "pytorch_lightning", "transformers", "trl"})


def names_read(parts: Sequence[types.CodeType]) -> set[str]:
    """Return global names that the code may read, in nested functions too; names of builtins are among them."""
    return {name for code in parts for name in _names(code, _READS, nested=True)}


def names_assigned(parts: Sequence[types.CodeType]) -> set[str]:
    """Return names that the code's top level binds."""
    return {name for code in parts for name in _names(code, _WRITES, nested=False)}


def _names(code: types.CodeType, kinds: frozenset[str], nested: bool) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in kinds:
            yield str(instruction.argval)
    if nested:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant, kinds, nested)


def with_their_own(names: Iterable[str], namespace: Mapping[str, Any]) -> set[str]:
    """Return `names`, and the names that functions and classes of the notebook behind them read, and so on."""
    found = set(names)
    to_read = list(found)
    while to_read:
        for code in codes_of(namespace.get(to_read.pop())):
            more = set(_names(code, _READS, nested=True)) - found
            found |= more
            to_read += more
    return found


def seeds(parts: Sequence[types.CodeType], namespace: Mapping[str, Any]) -> bool:
    """Return whether the code, or a function of the notebook that it may call, seeds random generators."""
    called = (namespace.get(name) for name in with_their_own(names_read(parts), namespace))
    return any(_SEEDS & _all_names(code) for code in (*parts, *(code for value in called for code in codes_of(value))))


def knows_ranks(parts: Sequence[types.CodeType], namespace: Mapping[str, Any], others: Collection[str] = ()) -> bool:
    """Return whether the code, or a value that it reads, is written for several ranks, judging by names.

    others: names that the cell mentions beside its code.

    >>> knows_ranks([compile("model = accelerator.prepare(model)", "", "exec")], {})
    True
    >>> knows_ranks([compile("loss.backward()", "", "exec")], {})
    False
    """
    names = with_their_own({*names_read(parts), *others}, namespace)
    values = {name: namespace[name] for name in names if name in namespace}
    codes = [*parts, *(code for value in values.values() for code in codes_of(value))]
    paths = [(name,) for name in others] + [path for code in codes for path in _paths(code)]
    return (
        any(map(_is_of_ranks, paths))
        or any(_VARIABLES_OF_RANKS & _all_texts(code) for code in codes)
        or any(_is_of_ranks(home_of(value)) or _is_trainer(value) for value in values.values())
        or any(_makes_trainer(path, values, paths) for path in paths)
    )


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the paths of names in the code, attribute by attribute: ("torch", "distributed", "get_rank")."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            yield (*path, str(name))
            path = path if kind == "IMPORT_FROM" else (*path, str(name))
        elif kind == "IMPORT_NAME":
            path = tuple(str(name).split("."))
            yield path
        elif kind.startswith("LOAD_") and kind != "LOAD_CONST":
            path = (str(name[-1] if isinstance(name, tuple) else name),)  # two variables may be loaded at once
            yield path
        elif not kind.startswith(("CACHE", "PUSH_NULL", "STORE_")):
            path = ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _paths(constant)


def _is_of_ranks(path: tuple[str, ...]) -> bool:
    return (
        bool(_OF_RANKS.intersection(path))
        or path[0] in _MODULES_OF_RANKS
        or "distributed" in path
        or any(name.startswith("acc") and then == "prepare" for name, then in pairwise(path))
    )


def _makes_trainer(path: tuple[str, ...], values: Mapping[str, Any], paths: Iterable[tuple[str, ...]]) -> bool:
    """Return whether the path leads to a Trainer of a library, through its module."""
    root, *rest = path
    if not any(name.endswith("Trainer") for name in rest):
        return False
    if root in values:
        return home_of(values[root])[0] in _HAVE_TRAINERS
    return root in _HAVE_TRAINERS or any(other[0] in _HAVE_TRAINERS for other in paths)


def _is_trainer(value: Any) -> bool:
    classes = type.mro(value if issubclass(type(value), type) else type(value))
    return any(each.__name__.endswith("Trainer") and home_of(each)[0] in _HAVE_TRAINERS for each in classes)


def home_of(value: Any) -> tuple[str, ...]:
    """Return the module that `value` is, or comes from, part by part."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        name = vars(value).get("__name__")
    elif kind is types.FunctionType:
        name = value.__globals__.get("__name__")  # the module of the function's wrapper, not the notebook
    else:
        name = (value if issubclass(kind, type | types.BuiltinFunctionType) else kind).__module__
    return tuple(str(name).split("."))


def _all_texts(code: types.CodeType) -> set[str]:
    inner = (_all_texts(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {constant for constant in code.co_consts if isinstance(constant, str)}.union(*inner)


def _all_names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_all_names, inner))


def codes_of(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function of the notebook, or of the methods of a class of the notebook."""
    kind = type(value)
    if kind is types.FunctionType:
        if value.__module__ == "__main__":
            yield value.__code__
        return
    for owner in type.mro(value if issubclass(kind, type) else kind):
        if owner.__module__ == "__main__":
            yield from (part.__code__ for part in map(_function_in, vars(owner).values()) if part is not None)


def _function_in(part: Any) -> types.FunctionType | None:
    """Return the function that an attribute of a class is, or is made of."""
    for kind, name in ((staticmethod, "__func__"), (classmethod, "__func__"), (property, "fget")):
        if type(part) is kind:
            part = getattr(part, name)
    return part if type(part) is types.FunctionType else None


def names_in_magics(code: str) -> set[str]:
    """Return words in the arguments of magics, of lines or of whole cells: each may be a name.

    >>> sorted(names_in_magics("get_ipython().run_cell_magic('time', '', 'fit(model)')"))
    ['fit', 'model']
    """
    texts = [
        str(text.value)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("run_line_magic", "run_cell_magic", "system", "getoutput")
        for text in (node.args if node.func.attr in ("system", "getoutput") else node.args[1:])
        if isinstance(text, ast.Constant)
    ]
    return {word for text in texts for word in re.findall(r"[^\W\d]\w*", text)}


def loop_variables(code: str) -> set[str]:
    """Return names bound by `for` and `with` at the top level and in its blocks: they are leftovers, not results."""
    targets: list[ast.AST] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.For | ast.AsyncFor):
            targets.append(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets.append(node.optional_vars)
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def made_before_read(code: str) -> set[str]:
    """Return the names that the cell always binds before it reads them: their earlier values are not needed.

    >>> sorted(made_before_read("model = build()\\nmodel.train()\\nif x:\\n    y = 1\\nprint(y)"))
    ['model']
    """
    try:
        body = ast.parse(code).body
    except SyntaxError:  # compiling gives a better error
        return set()
    read: set[str] = set()
    made: set[str] = set()
    _follow(body, read, made)
    return made


def _follow(body: list[ast.stmt], read: set[str], made: set[str]) -> None:
    """Add to `read` the names that `body` reads before they are in `made`, and to `made` what it binds for certain."""
    for statement in body:
        match statement:
            case ast.With() | ast.AsyncWith():
                _take(statement.items, read, made)
                _follow(statement.body, read, made)
            case ast.For() | ast.AsyncFor() | ast.While() | ast.If() | ast.Try() | ast.Match():
                inside = set(made)
                for part in ast.iter_child_nodes(statement):
                    if not isinstance(part, ast.stmt):
                        _take([part], read, inside)
                    else:
                        _follow([part], read, inside)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                _take([statement], read, made)
                made |= {statement.name} - read
            case ast.Import() | ast.ImportFrom():
                bound = {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
                made |= bound - read
            case _:
                _take([statement], read, made)


def _take(nodes: Sequence[ast.AST], read: set[str], made: set[str]) -> None:
    """Account for the names in `nodes`: those that are read first, then those that are bound."""
    names = [leaf for node in nodes for leaf in ast.walk(node) if isinstance(leaf, ast.Name)]
    changed = {
        node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    read |= ({name.id for name in names if not isinstance(name.ctx, ast.Store)} | changed) - made
    if not any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in nodes):
        made |= {name.id for name in names if isinstance(name.ctx, ast.Store)} - read
