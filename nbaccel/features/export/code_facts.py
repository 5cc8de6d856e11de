"""Read from a cell's text which names its code reads and binds, and what it may change beside that. Runs in the kernel.

Whether a call changes something cannot be read in general. So a few calls are known to look only (`print(x)`,
`plt.plot(x)`, `x.mean()`), and every other one may change what it can reach, and draw random numbers.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.namespace.names import made_before_read, names_assigned, names_read, names_used

__all__ = ["GENERATORS", "CodeFacts", "NotebookNames", "is_constant", "names_bound"]

GENERATORS = {"torch": "<torch's random numbers>", "numpy": "<NumPy's random numbers>", "random": "<Python's numbers>"}
"""Names, which no variable can have, for the states of the random generators: cells read and change them."""

_SEEDS_OF = {"torch": {"manual_seed", "manual_seed_all"}, "numpy": {"seed"}, "random": {"seed"}}
_SEED_ALL = frozenset({"seed_all", "seed_everything", "set_seed"})

_SHOW = frozenset(
    {"matplotlib", "seaborn", "plotly", "bokeh", "altair", "IPython", "pprint", "rich", "torchinfo", "torchsummary"}
)
"""Packages that show values, and change none."""

_DRAW_NOTHING = _SHOW | frozenset(
    {
        *(
            "abc",
            "argparse",
            "collections",
            "contextlib",
            "copy",
            "csv",
            "dataclasses",
            "datetime",
            "enum",
            "functools",
        ),
        *(
            "gc",
            "glob",
            "hashlib",
            "inspect",
            "io",
            "itertools",
            "json",
            "logging",
            "math",
            "operator",
            "os",
            "pathlib",
        ),
        *("pickle", "platform", "re", "shutil", "string", "subprocess", "sys", "tempfile", "textwrap", "time", "tqdm"),
        *("types", "typing", "urllib", "warnings"),
    }
)
_TORCH_DRAWS_NOTHING = frozenset(
    {
        *("arange", "as_tensor", "cat", "cuda", "device", "device_count", "empty", "eye", "from_numpy", "full"),
        *("get_device_name", "is_available", "linspace", "load", "no_grad", "ones", "save", "stack", "tensor", "zeros"),
    }
)
_LOOK = frozenset(
    {
        *("abs", "any", "all", "bool", "bytes", "callable", "dict", "dir", "enumerate", "float", "format", "getattr"),
        *("hasattr", "help", "id", "int", "isinstance", "issubclass", "len", "list", "max", "min", "print", "range"),
        *("repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "zip", "display"),
    }
)
"""Builtins that change nothing. Some iterate over their arguments, which a loader notices: see `_iterates`."""

_ITERATE = frozenset({"any", "all", "dict", "enumerate", "list", "max", "min", "set", "sorted", "sum", "tuple", "zip"})
_READ = frozenset(
    {
        *("argmax", "argmin", "children", "copy", "count", "cpu", "describe", "detach", "dim", "endswith", "float"),
        *("format", "get", "head", "index", "info", "isna", "item", "items", "join", "keys", "lower", "max", "mean"),
        *("min", "modules", "named_modules", "named_parameters", "numel", "numpy", "parameters", "size", "split"),
        *("startswith", "std", "strip", "sum", "tail", "tolist", "upper", "value_counts", "values", "var"),
    }
)
"""Methods that change nothing."""

_PLAIN = frozenset({"builtins", "numpy", "pandas", "torch"})
"""Packages of values that can be iterated and indexed without drawing: lists, arrays, tables, tensors."""

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, type)
_CODE = (types.FunctionType, types.BuiltinFunctionType)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_STORED = frozenset({"STORE_GLOBAL"})


def names_bound(tree: ast.Module) -> set[str]:
    """Return the names that statements bind where they stand, without those of imports."""
    running = list(_running(tree.body))
    defined = {node.name for node in running if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    return defined | {node.id for node in running if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def is_constant(value: Any) -> bool:
    """Return whether nothing can change within a value: a number, a text, a module, a function, or tuples of these."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    home = str(type(value).__module__).partition(".")[0]
    return issubclass(type(value), (*_CONSTANT, *_CODE)) or (home == "torch" and type(value).__name__ in _TORCH_WORDS)


_TORCH_WORDS = frozenset({"device", "dtype", "Size", "memory_format"})


@dataclass(frozen=True, slots=True)
class NotebookNames:
    """The names of a notebook: what is known beside the text of one cell.

    Args:
        imports: Names that any cell imports, with the path of what they are.
        namespace: The notebook's names as they are now.
        rebound: Names that several cells have bound: their values of before may have been of another kind.
    """

    imports: Mapping[str, str]
    namespace: Mapping[str, Any]
    rebound: frozenset[str] = frozenset()

    def package(self, name: str) -> str:
        """Return the package that a name comes from by an import; empty for any other name."""
        return self.imports.get(name, "").partition(".")[0]

    def can_change(self, name: str) -> bool:
        """Return whether the value of a name may be changed by who has it."""
        if name in self.imports or name in GENERATORS.values():
            return False
        return name not in self.namespace or name in self.rebound or not is_constant(self.namespace[name])

    def shows(self, name: str) -> bool:
        """Return whether the value of a name is something that was drawn or printed."""
        return type(self.namespace.get(name)).__module__.partition(".")[0] in _SHOW

    def is_plain(self, name: str) -> bool:
        """Return whether the value can be iterated and indexed without running code of the user's."""
        kind = type(self.namespace.get(name))
        is_loader = kind.__module__.startswith("torch.utils")
        return (
            name in self.namespace
            and name not in self.rebound
            and kind.__module__.partition(".")[0] in _PLAIN
            and not is_loader
        )


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Facts about a piece of code.

    Args:
        reads: Names that it may read, also in functions that it defines.
        needs: Those of them that have to be bound before it. A loop is taken to run at least once.
        binds: Names that it may bind.
        makes: Those of them that it binds for certain, before it reads them.
        later: For names that it binds: what functions behind them read once they are called.
        made_of: For names that it binds: what is read where they are bound; they may lead to the same objects.
        stores: For names that it binds: what functions behind them bind by `global`.
        deletes: Names that it deletes.
        is_loud: It may change values that it can reach.
        acts: It calls something of a package for its effect alone (`os.makedirs("out")`), or sets something there.
        draws: It may draw random numbers.
        seeds: The generators, of `GENERATORS`, that it seeds.
        awaits: It awaits at its top level.
        asks_for_locals: It calls `vars()`.
    """

    reads: frozenset[str]
    needs: frozenset[str]
    binds: frozenset[str]
    makes: frozenset[str]
    later: Mapping[str, frozenset[str]]
    made_of: Mapping[str, frozenset[str]]
    stores: Mapping[str, frozenset[str]]
    deletes: frozenset[str]
    is_loud: bool
    acts: bool
    draws: bool
    seeds: frozenset[str]
    awaits: bool
    asks_for_locals: bool

    @classmethod
    def of(cls, code: str, known: NotebookNames, flags: int = 0) -> CodeFacts:
        """Return the facts about a text.

        Args:
            flags: Compiler flags of the notebook.

        Raises:
            SyntaxError: It is no Python.
        """
        tree = ast.parse(code)
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        reads: set[str] = set()
        binds: set[str] = set()
        later: dict[str, frozenset[str]] = {}
        made_of: dict[str, frozenset[str]] = {}
        stores: dict[str, frozenset[str]] = {}
        for statement in tree.body:
            part = compile(ast.Module([statement], []), "", "exec", flags, dont_inherit=True)
            bound = names_assigned([part])
            inner = [each for each in part.co_consts if isinstance(each, types.CodeType)]
            by_functions = {name for each in inner for name in names_used(each, _STORED, nested=True)}
            reads |= names_read([part])
            binds |= bound | by_functions | _starred(statement, known)
            for name in bound:
                later[name] = later.get(name, frozenset()) | names_read(inner)
                made_of[name] = made_of.get(name, frozenset()) | names_read([part])
                stores[name] = stores.get(name, frozenset()) | by_functions
        running = list(_running(tree.body))
        deletes = {node.id for node in running if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)}
        course = _Course()
        course.follow(tree.body)
        called = {name for names in later.values() for name in names} - course.made
        calls = [node for node in running if isinstance(node, ast.Call)]
        sounds = [call for call in calls if not _only_looks(call, known)]
        changes = [node for node in running if _changes(node)]
        steps = [node for node in running if _goes_through(node, known)]
        return cls(
            reads=frozenset(reads),
            needs=frozenset(reads & (course.needs | called)),
            binds=frozenset(binds),
            makes=frozenset(made_before_read(code, known.namespace)),
            later=later,
            made_of=made_of,
            stores=stores,
            deletes=frozenset(deletes),
            is_loud=bool(sounds or changes or steps or deletes),
            acts=any(_acts(node, known) for node in running),
            draws=bool(steps) or any(_may_draw(call, known) and not {*_seeded(call, known)} for call in sounds),
            seeds=frozenset(name for call in calls for name in _seeded(call, known)),
            awaits=any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in running),
            asks_for_locals=any(_path(call.func) == ("vars",) and not call.args for call in calls),
        )


class _Course:
    """Follows statements in the order in which they run.

    Attributes:
        made: Names that are bound by now.
        needs: Names that were read before they were in `made`.
    """

    def __init__(self, made: frozenset[str] = frozenset()) -> None:
        self.made = set(made)
        self.needs: set[str] = set()

    def follow(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.If():
                    self._take([statement.test])
                    self._either([statement.body, statement.orelse])
                case ast.Match():
                    self._take([statement.subject])
                    self._either([*(case.body for case in statement.cases), []])
                case ast.Try() | ast.TryStar():
                    for handler in statement.handlers:
                        self._branch([handler])
                    self.follow([*statement.body, *statement.orelse, *statement.finalbody])
                case ast.For() | ast.AsyncFor():
                    self._take([statement.iter, statement.target])
                    self.follow([*statement.body, *statement.orelse])
                case ast.While():
                    self._take([statement.test])
                    self.follow([*statement.body, *statement.orelse])
                case ast.With() | ast.AsyncWith():
                    self._take(list(statement.items))
                    self.follow(statement.body)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._take([statement])
                    self.made.add(statement.name)
                case ast.Import() | ast.ImportFrom():
                    self.made |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
                case ast.AugAssign():
                    self._take([statement.value])
                    self._read(_root(statement.target))
                    self._take([statement.target])
                case _:
                    self._take([statement])

    def _either(self, branches: Sequence[Sequence[ast.AST]]) -> None:
        self.made = set.intersection(*(self._branch(branch) for branch in branches))

    def _branch(self, nodes: Sequence[ast.AST]) -> set[str]:
        """Return the names that are bound after one branch."""
        other = _Course(frozenset(self.made))
        for node in nodes:
            if isinstance(node, ast.stmt):
                other.follow([node])
            elif isinstance(node, ast.ExceptHandler):
                other.made |= {node.name} if node.name else set()
                other.follow(node.body)
        self.needs |= other.needs
        return other.made

    def _read(self, name: str) -> None:
        self.needs |= {name} - self.made

    def _take(self, nodes: Sequence[ast.AST]) -> None:
        names = [node for node in _running(nodes) if isinstance(node, ast.Name)]
        for name in names:
            if not isinstance(name.ctx, ast.Store):
                self._read(name.id)
        self.made |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        self.made -= {name.id for name in names if isinstance(name.ctx, ast.Del)}


def _running(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the parts of code that run where they stand, and not when a function is called."""
    for node in nodes:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
            yield from _running([*getattr(node, "decorator_list", ()), *defaults])
        else:
            yield from _running(list(ast.iter_child_nodes(node)))


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return `a.b.c` part by part; the first is empty where it does not begin with a name: `f().c`, `x[0].c`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else "", *reversed(parts))


def _root(node: ast.AST) -> str:
    """Return the name at which `a.b[0].c` begins; empty if it is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _only_looks(call: ast.Call, known: NotebookNames) -> bool:
    root, *rest = _path(call.func)
    if not rest:
        return (root in _LOOK and not _iterates(call, known)) or known.package(root) in _SHOW
    return known.package(root) in _SHOW or known.shows(_root(call.func)) or rest[-1] in _READ


def _iterates(call: ast.Call, known: NotebookNames) -> bool:
    names = [each.id for each in call.args if isinstance(each, ast.Name)]
    return _path(call.func)[0] in _ITERATE and not all(map(known.is_plain, names))


def _changes(node: ast.AST) -> bool:
    """Return whether a node sets or deletes a part of a value, or changes one in place."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.AugAssign)


def _goes_through(node: ast.AST, known: NotebookNames) -> bool:
    """Return whether a node iterates over, or takes one of, what runs code of its own: a loader, a data set."""
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name):
        return not known.is_plain(node.iter.id)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        root = _root(node)
        return root in known.namespace and root not in known.imports and not known.is_plain(root)
    return False


def _acts(node: ast.AST, known: NotebookNames) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        package = known.package(_root(node.value.func))
        return package not in ("", *_SHOW) and not _only_looks(node.value, known)
    if _changes(node) and not isinstance(node, ast.AugAssign):
        return known.package(_root(node)) not in ("", *_SHOW)
    return False


def _may_draw(call: ast.Call, known: NotebookNames) -> bool:
    path = _path(call.func)
    package = known.package(path[0])
    if package in _DRAW_NOTHING:
        return False
    full = (*known.imports.get(path[0], path[0]).split("."), *path[1:])
    if package == "numpy":
        return "random" in full
    if package == "pandas":
        return "sample" in full
    return not (package == "torch" and full[-1] in _TORCH_DRAWS_NOTHING)


def _seeded(call: ast.Call, known: NotebookNames) -> Iterator[str]:
    """Yield the generators that a call seeds."""
    path = _path(call.func)
    full = (*known.imports.get(path[0], path[0]).split("."), *path[1:])
    if full[-1] in _SEED_ALL:
        yield from GENERATORS.values()
    elif full[-1] in _SEEDS_OF.get(full[0], ()) and (full[0] != "numpy" or "random" in full):
        yield GENERATORS[full[0]]


def _starred(statement: ast.stmt, known: NotebookNames) -> set[str]:
    """Return the names that `from module import *` has bound, as far as they still are what they were."""
    import sys

    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            module = sys.modules.get(node.module or "")
            listed = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
            found |= {name for name in listed if module is not None and name in known.namespace}
    return found
