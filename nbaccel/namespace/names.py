"""Find the names that the code of a cell reads and binds, and the GPU that it means. Runs in the kernel and in ranks.

It runs no code. It reads the bytecode if all possible accesses count, and the text if their order matters. Values that
the code reads are looked at too; those that cannot be read are ignored: their classes may answer in any way, and a
thread may change them meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import dis
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import pairwise
from typing import Any

from nbaccel.base.values import attributes_of

__all__ = [
    "READ_BY_TEXT",
    "codes_of",
    "first_card_in",
    "forms_group",
    "knows_ranks",
    "loop_variables",
    "made_before_read",
    "names_assigned",
    "names_in_magics",
    "names_read",
    "names_used",
    "not_read",
    "read_before_made",
    "says_first_card",
    "seeds",
    "with_their_own",
]

READ_BY_TEXT = frozenset({"eval", "exec", "globals", "locals", "vars"})
"""Functions by which code may read any name."""

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"})
_WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
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
    return {name for code in parts for name in names_used(code, _READS, nested=True)}


def names_used(code: types.CodeType, kinds: frozenset[str], nested: bool) -> Iterator[str]:
    """Yield the names of all instructions of these kinds.

    Args:
        kinds: Kinds whose argument is a place in `co_names`. `dis` describes each instruction, which takes twenty times
            as long, and most instructions are others.
        nested: Read the functions inside the code, too.
    """
    wanted = {dis.opmap[kind] for kind in kinds if kind in dis.opmap}
    extension = 0
    for operation, byte in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extension | byte
        extension = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in wanted:  # of LOAD_GLOBAL, the lowest bit says that a call follows
            yield code.co_names[argument >> 1 if operation == _LOAD_GLOBAL else argument]
    if nested:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from names_used(constant, kinds, nested)


def names_assigned(parts: Sequence[types.CodeType]) -> set[str]:
    """Return names that the code's top level binds."""
    return {name for code in parts for name in names_used(code, _WRITES, nested=False)}


def with_their_own(names: Iterable[str], namespace: Mapping[str, Any]) -> set[str]:
    """Return `names`, and the names that functions and classes of the notebook behind them read, and so on."""
    found = set(names)
    to_read = list(found)
    while to_read:
        for code in codes_of(namespace.get(to_read.pop())):
            more = names_read([code]) - found
            found |= more
            to_read += more
    return found


def seeds(parts: Sequence[types.CodeType], namespace: Mapping[str, Any]) -> bool:
    """Return whether the code, or a function of the notebook that it may call, seeds random generators."""
    return _calls(_SEEDS, parts, namespace)


def forms_group(parts: Sequence[types.CodeType], namespace: Mapping[str, Any]) -> bool:
    """Return whether the code, or a function of the notebook that it may call, forms torch's process group by itself.

    Example:
        >>> forms_group([compile("dist.init_process_group('gloo')", "", "exec")], {})
        True
    """
    return _calls({"init_process_group"}, parts, namespace)


def knows_ranks(parts: Sequence[types.CodeType], namespace: Mapping[str, Any], others: Collection[str] = ()) -> bool:
    """Return whether the code, or a value that it reads, is written for several ranks, judging by names.

    Args:
        others: Names that the cell mentions beside its code.

    Example:
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
        or any(_is_of_ranks(_home_of(value)) or _is_trainer(value) for value in values.values())
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
        return _home_of(values[root])[0] in _HAVE_TRAINERS
    return root in _HAVE_TRAINERS or any(other[0] in _HAVE_TRAINERS for other in paths)


def _is_trainer(value: Any) -> bool:
    classes = type.mro(value if issubclass(type(value), type) else type(value))
    return any(each.__name__.endswith("Trainer") and _home_of(each)[0] in _HAVE_TRAINERS for each in classes)


def _home_of(value: Any) -> tuple[str, ...]:
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


def _calls(functions: Set[str], parts: Sequence[types.CodeType], namespace: Mapping[str, Any]) -> bool:
    called = (namespace.get(name) for name in with_their_own(names_read(parts), namespace))
    codes = (*parts, *(code for value in called for code in codes_of(value)))
    return any(functions & _all_names(code) for code in codes)


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

    Example:
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


def made_before_read(code: str, namespace: Mapping[str, Any] | None = None) -> set[str]:
    """Return the names that the cell always binds before it reads them: their earlier values are not needed.

    Args:
        namespace: The notebook's; a name of a function or class in it counts as reading all that its code reads.

    Example:
        >>> sorted(made_before_read("model = build()\\nmodel.train()\\nif x:\\n    y = 1\\nprint(y)"))
        ['model']
    """
    order = _Order(namespace or {})
    order.follow(_statements_of(code))
    return order.made


def read_before_made(code: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that the cell may read before it has bound them, also in functions of the notebook.

    Example:
        >>> sorted(read_before_made("score = run(x)\\nif x:\\n    best = max(best, score)", {}))
        ['best', 'max', 'run', 'x']
    """
    order = _Order(namespace)
    order.follow(_statements_of(code))
    return order.read


def not_read(code: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names whose values of before the cell does not need, though it may name them first to delete them.

    Example:
        >>> sorted(not_read("del model\\nmodel = build()\\nmodel.train()", {}))
        ['model']
        >>> sorted(not_read("print(model)\\ndel model", {}))
        []
    """
    order = _Order(namespace, needs_to_delete=False)
    order.follow(statements := _statements_of(code))
    in_magics = with_their_own(names_in_magics(code), namespace) if statements else set()
    return (order.made | order.deleted) - order.read - in_magics


def _statements_of(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except SyntaxError:  # compiling gives a better error
        return []


class _Order:
    """The names of a cell in the order of its text.

    Args:
        needs_to_delete: Deleting a name reads its value; otherwise it is like binding it.

    Attributes:
        read: Those that are read before they are in `made`.
        made: Those that are bound for certain before that.
        deleted: Those that are deleted anywhere.
    """

    def __init__(self, namespace: Mapping[str, Any], needs_to_delete: bool = True) -> None:
        self.read: set[str] = set()
        self.made: set[str] = set()
        self.deleted: set[str] = set()
        self._namespace = namespace
        self._binds = (ast.Store,) if needs_to_delete else (ast.Store, ast.Del)

    def follow(self, body: list[ast.stmt]) -> None:
        """Take the statements one after the other."""
        for statement in body:
            match statement:
                case ast.With() | ast.AsyncWith():
                    self._take(statement.items)
                    self.follow(statement.body)
                case ast.For() | ast.AsyncFor() | ast.While() | ast.If() | ast.Try() | ast.Match():
                    outside = set(self.made)
                    for part in ast.iter_child_nodes(statement):
                        if not isinstance(part, ast.stmt):
                            self._take([part])
                        else:
                            self.follow([part])
                    self.made = outside
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._take([statement])
                    self.made |= {statement.name} - self.read
                case ast.Import() | ast.ImportFrom():
                    bound = {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
                    self.made |= bound - self.read
                case _:
                    self._take([statement])

    def _take(self, nodes: Sequence[ast.AST]) -> None:
        """Account for the names in `nodes`: those that are read first, then those that are bound."""
        names = [leaf for node in nodes for leaf in ast.walk(node) if isinstance(leaf, ast.Name)]
        changed = {
            part.target.id
            for node in nodes
            for part in ast.walk(node)
            if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)
        }
        self.deleted |= {name.id for name in names if isinstance(name.ctx, ast.Del)}
        read = {name.id for name in names if not isinstance(name.ctx, self._binds)} | changed
        self.read |= with_their_own(read - self.made, self._namespace) - self.made
        if not any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in nodes):
            self.made |= {name.id for name in names if isinstance(name.ctx, self._binds)} - self.read


_FIRST = "cuda:0"
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps by which transformers fills the visible GPUs, from the first on."""

_RANK_NAMES = frozenset(
    {"rank", "local_rank", "process_index", "local_process_index", "get_rank", "get_local_rank", "RANK", "LOCAL_RANK"}
)
_TAKE_A_CARD = frozenset({"cuda", "to", "set_device"})
_COUNT_CARDS = frozenset({"deepspeed", "lightning", "lightning_fabric", "pytorch_lightning"})
"""Packages that give each rank the GPU of its number, among all of the machine."""

_MOST_SETTINGS = 1000
"""Largest number of entries of a dictionary that is searched: a larger one holds data."""

_SILENT = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
"""Instructions between a call and its arguments that carry no value."""

_CONSTANT, _NAME, _END = "constant", "name", "end"
_Token = tuple[str, Any]


def says_first_card(parts: Sequence[types.CodeType], namespace: Mapping[str, Any], others: Collection[str] = ()) -> str:
    """Return the words by which the code, or what it reads of the notebook, names the first GPU that it sees.

    "cuda:0" means the GPU of each rank if a rank sees only its own, and the first of all GPUs if it sees all of them; a
    GPU chosen by the rank's number needs all of them visible. The program is read in its bytecode and in the values
    that it reads, but not executed: numbers that it computes, or that a library holds, are not found.

    Return an empty text if it names none, or if it, or a library in it, chooses GPUs by the rank's number: then every
    rank has to see all of them.

    Args:
        others: Names that the cell mentions beside its code.

    Example:
        >>> says_first_card([compile("model.to('cuda:0')", "", "exec")], {})
        '"cuda:0"'
        >>> says_first_card([compile("model.to('cuda')", "", "exec")], {})
        ''
        >>> says_first_card([compile("model.to('cuda:0').to(f'cuda:{local_rank}')", "", "exec")], {})
        ''
    """
    with suppress(Exception):
        names = with_their_own({*names_read(parts), *others}, namespace)
        values = {name: namespace[name] for name in names if name in namespace}
        words = [_Words(code) for code in (*parts, *(code for value in values.values() for code in codes_of(value)))]
        if _count_cards(values) or any(each.count_cards() for each in words):
            return ""
        said = (each.first_card() for each in words)
        return next(filter(None, said), "") or first_card_in(values)
    return ""


def first_card_in(values: Mapping[str, Any]) -> str:
    """Return the words for a value of the notebook that names the first GPU.

    Return an empty text if no value does, or if there is one of a library that counts GPUs, or one that names another
    GPU.

    Example:
        >>> first_card_in({"settings": {"device": "cuda:0"}}), first_card_in({"device": "cuda"})
        ('settings', '')
    """
    with suppress(Exception):
        if _count_cards(values):
            return ""
        for name, value in values.items():
            if name == "device_map" and _fills_cards(value):
                return f"device_map={value!r}"
            if any(_is_first_card(leaf) for leaf in _leaves({name: value})):
                return name
    return ""


def _fills_cards(device_map: Any) -> bool:
    if type(device_map) is dict:
        return list(device_map) == [""] and type(device_map[""]) is int and device_map[""] == 0
    return type(device_map) is str and device_map in _MAPS


def _count_cards(values: Mapping[str, Any]) -> bool:
    is_of_a_library = any(_home_of(value)[0] in _COUNT_CARDS for value in values.values())
    return is_of_a_library or any(map(_is_another_card, _leaves(values)))


class _Words:
    """The constants and names of one function, and of those inside it, in the order of the code."""

    def __init__(self, code: types.CodeType) -> None:
        self._tokens = list(_tokens(code))
        self._texts = set(_texts(code))
        self._names = {value for kind, value in self._tokens if kind == _NAME}

    def first_card(self) -> str:
        """Return the words that mean the first GPU; empty if there are none."""
        if _FIRST in self._texts:
            return f'"{_FIRST}"'
        for before, after in pairwise(self._tokens):
            if after != (_CONSTANT, 0) or type(after[1]) is not int:
                continue
            if before == (_CONSTANT, "cuda"):
                return 'torch.device("cuda", 0)'
            if before[0] == _NAME and before[1] in _TAKE_A_CARD:
                return f".{before[1]}(0)"
            if before == (_CONSTANT, "") and "device_map" in self._texts:
                return 'device_map={"": 0}'
        if "device_map" in self._texts and (filled := self._texts.intersection(_MAPS)):
            return f'device_map="{min(filled)}"'
        return ""

    def count_cards(self) -> bool:
        """Return whether the code distinguishes GPUs."""
        if "device_ids" in self._texts or any(name.partition(".")[0] in _COUNT_CARDS for name in self._names):
            return True
        if "device_map" in self._texts and (self._names | self._texts) & _RANK_NAMES:
            return True
        if any(text.endswith("cuda:") or "cuda:{" in text or "cuda:%" in text for text in self._texts):
            return True
        return any(map(_is_another_card, self._texts)) or any(map(self._counts, range(len(self._tokens))))

    def _counts(self, at: int) -> bool:
        """Return whether the token `at` takes a GPU whose number is computed, not written there."""
        kind, value = self._tokens[at]
        path = self._path(at + 1)
        if (kind, value) == (_CONSTANT, "cuda"):
            return bool(path) and at > 0 and self._tokens[at - 1] == (_NAME, "device")
        if kind != _NAME or value not in _TAKE_A_CARD or not path:
            return False
        return path[0] == "int" or bool(_RANK_NAMES.intersection(path))  # int(os.environ[...])

    def _path(self, at: int) -> list[str]:
        """Return the names from a token on, attribute by attribute."""
        path: list[str] = []
        for kind, value in self._tokens[at:]:
            if kind != _NAME:
                break
            path.append(value)
        return path


def _tokens(code: types.CodeType) -> Iterator[_Token]:
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
            yield _CONSTANT, value
        elif kind.startswith(("LOAD_", "IMPORT_")):
            names = value if isinstance(value, tuple) else (value,)
            yield from ((_NAME, name) for name in names if isinstance(name, str))  # LOAD_BUILD_CLASS has none
        elif kind not in _SILENT:
            yield _END, None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _tokens(constant)


def _texts(constant: Any) -> Iterator[str]:
    """Yield texts among the constants of code, and in tuples of them: names of keywords are such a tuple."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, types.CodeType):
        for each in constant.co_consts:
            yield from _texts(each)
    elif isinstance(constant, (tuple, frozenset)):
        for each in constant:
            yield from _texts(each)


def _leaves(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield values and settings: entries of dictionaries, attributes of namespaces and of the notebook's classes."""
    for value in values.values():
        yield value
        if type(value) is dict:
            yield from list(value.values()) if len(value) <= _MOST_SETTINGS else ()
        elif type(value) in (types.SimpleNamespace, argparse.Namespace) or _home_of(value)[0] == "__main__":
            attributes = vars(value) if issubclass(type(value), type) else attributes_of(value) or {}
            yield from list(attributes.values()) if len(attributes) <= _MOST_SETTINGS else ()


def _is_first_card(value: Any) -> bool:
    return value == _FIRST if type(value) is str else _index(value) == 0


def _is_another_card(value: Any) -> bool:
    if type(value) is str:
        return value.startswith("cuda:") and value[5:].isdecimal() and value != _FIRST
    return bool(_index(value))


def _index(value: Any) -> int | None:
    """Return the number of a CUDA device; None for any other value, and for a device without a number."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.device or value.type != "cuda":
        return None
    index: int | None = value.index
    return index
