"""CellTask: a notebook cell as the work of a rank. Made in the kernel, run in ranks.

The cell's text has been through IPython's transforms in the kernel. It runs in the rank's copy of the notebook's
namespace, compiled under the cell's name, so that every traceback says `Cell In[5], line 3`.
"""

from __future__ import annotations

import ast
import asyncio
import dis
import inspect
import json
import linecache
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from nbaccel.errors import CannotSend
from nbaccel.launch.home import Home, anchors_of
from nbaccel.launch.rank.parameters import checksums, is_bound_to_its_process, mark, model_in
from nbaccel.launch.spec import Results, Task
from nbaccel.launch.wire.parcel import Parcel, pack_what_can_travel, unpack_what_can_be_rebuilt
from nbaccel.launch.wire.weight import size_of, sizes_of
from nbaccel.launch.wire.wrappers import is_wrapper, plain

__all__ = [
    "RESULT",
    "CellSource",
    "CellTask",
    "names_assigned",
    "names_read",
    "new_main",
]

RESULT = "<last expression>"
"""The name under which the last expression's value travels; no variable can be called so."""

_SMALL_BYTES = 1_000_000
_OF_RANKS = (
    "torch.utils.tensorboard",
    "tensorboardX",
    "wandb",
    "logging",
    "accelerate",
    "lightning",
    "pytorch_lightning",
)
_TRAINERS = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer")
"""Packages and modules whose objects know the ranks, and are no data."""
_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL"})
_WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL"})


@dataclass(frozen=True, slots=True)
class CellSource:
    """The text of a cell.

    code: plain Python, with as many lines above it as the notebook shows above it, so that line numbers agree.
    name: the file name it is compiled under, "Cell In[5]".
    shown: the cell as the user typed it, for tracebacks.
    flags: compiler flags of the notebook (its `from __future__` imports).
    is_timed: a `%%time` stood at the top of the body.
    """

    code: str
    name: str
    shown: str = ""
    flags: int = 0
    is_timed: bool = False

    def compile(self) -> list[types.CodeType]:
        """The statements, and the last expression by itself if there is one whose value is to be shown.

        Raises:
            SyntaxError: with the cell's name and line.
        """
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        module = compile(self.code, self.name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(module, ast.Module)
        body = module.body
        is_shown = bool(body) and isinstance(body[-1], ast.Expr) and not self.code.rstrip().endswith(";")
        split = len(body) - 1 if is_shown else len(body)
        parts = [compile(ast.Module(body[:split], []), self.name, "exec", flags, dont_inherit=True)]
        if is_shown:
            last = body[-1]
            assert isinstance(last, ast.Expr)
            parts.append(compile(ast.Expression(last.value), self.name, "eval", flags, dont_inherit=True))
        return parts


def names_read(parts: list[types.CodeType]) -> set[str]:
    """Global names that the code may read, in nested functions too; names of builtins are among them."""
    return {name for code in parts for name in _names(code, _READS, nested=True)}


def names_assigned(parts: list[types.CodeType]) -> set[str]:
    """Names that the code's top level binds."""
    return {name for code in parts for name in _names(code, _WRITES, nested=False)}


def _names(code: types.CodeType, kinds: frozenset[str], nested: bool) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in kinds:
            yield str(instruction.argval)
    if nested:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant, kinds, nested)


class CellTask(Task):
    """Runs a cell and sends back what `out` names.

    namespace: the notebook's globals; a fork runs in its copy of them.
    out: names to bring back, from rank 0 only.
    extra: names that the cell reads only dynamically and that shall travel too (`--in`).
    home: of ranks that stay.  speaker: the rank whose names go back.
    debugged: see `Task`.
    """

    reference = "nbaccel.launch.rank.cell:CellTask"

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        *,
        home: Home | None = None,
        speaker: int = 0,
        debugged: int | None = None,
    ) -> None:
        self.source = source
        self.debugged = debugged
        self.namespace: dict[str, Any] = namespace
        self.out = out
        self.extra = extra
        self.home = home
        self.speaker = speaker
        self._anchors = anchors_of(namespace) if home is None else home.anchors
        self._parts = source.compile()
        self._started_with = {name: id(value) for name, value in namespace.items()}
        self._marks: dict[str, int] = {}
        self._last: Any = None
        self._has_last = False

    # --- in a rank ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        shown = self.source.shown or self.source.code
        linecache.cache[self.source.name] = (len(shown), None, shown.splitlines(keepends=True), self.source.name)
        with suppress(Exception):  # as in `results`
            self._marks = self._marked()
        began = time.monotonic()
        statements, *expression = self._parts
        _execute(statements, self.namespace)
        if expression:
            self._last = _execute(expression[0], self.namespace)
            self._has_last = self._last is not None
        if self.source.is_timed:
            print(f"Wall time: {time.monotonic() - began:.3g} s")

    def results(self, rank: int) -> Results:
        found: dict[str, Any] = {}
        with suppress(Exception):  # what is said of names is worth less than the names themselves
            sums, found["holders"] = self._trained()
            found["checksums"] = sums
            if rank == self.speaker and self.home is None:
                found |= self._left_here(sums)
        if rank != self.speaker:
            return Results(facts=found)
        here = self.results_here()
        return replace(here, facts={**here.facts, **found})

    def _left_here(self, sums: Mapping[str, int]) -> dict[str, list[str] | dict[str, str]]:
        """Names of what the cell changed or made, which of them hold a model, and which cannot leave the process.

        sums: names with parameters.
        """
        marks = self._marked()
        changed = sorted(name for name, before in self._marks.items() if marks.get(name, before) != before)
        not_asked = self._data_not_asked_for()
        there = {name: plain(self.namespace[name]) for name in {*sums, *changed, *not_asked} if name in self.namespace}
        return {
            "changed": changed,
            "not_asked": not_asked,
            "models": {name: part for name, value in there.items() if (part := model_in(value)) is not None},
            "bound": [name for name, value in there.items() if is_bound_to_its_process(value)],
        }

    def results_here(self) -> Results:
        """What `--out` names and what the last expression shows; all that matters in the notebook's own process."""
        values = {name: plain(self.namespace[name]) for name in self.out if name in self.namespace}
        facts: dict[str, Any] = {"sizes": sizes_of(values)}
        if self._has_last:
            facts["result"] = _formatted(self._last)
            if _is_small_data(self._last):
                values[RESULT] = self._last
        missing = {name: "the cell ended without assigning it" for name in self.out if name not in self.namespace}
        return Results(values, missing, optional=frozenset({RESULT}), facts=facts)

    def _trained(self) -> tuple[dict[str, int], list[str]]:
        """Numbers by which ranks, and the notebook, compare the parameters that a cell trained.

        Of what `--out` names, and of what the notebook had before and the cell's code mentions: that was equal in all
        ranks. Then the names that only hold what others have.
        """
        names = set(self.out)
        if self.home is None:
            names |= self._mentioned()
        return checksums({name: self.namespace[name] for name in names if name in self.namespace})

    def _marked(self) -> dict[str, int]:
        """Marks of the notebook's containers and objects that the cell's code mentions."""
        if self.home is not None:
            return {}
        found: dict[str, int] = {}
        for name in self._mentioned():
            with suppress(Exception):  # a class of the user's that answers in a way of its own
                value = plain(self.namespace[name])
                if _is_data(value) and not _is_loader(value) and (own := mark(value)) is not None:
                    found[name] = own
        return found

    def _mentioned(self) -> set[str]:
        """Names that the notebook had before, and that the cell reads or binds, also in functions of the notebook."""
        names = names_read(self._parts) | names_assigned(self._parts)
        to_read = list(names)
        while to_read:
            for code in _codes(self.namespace.get(to_read.pop())):
                more = set(_names(code, _READS, nested=True)) - names
                names |= more
                to_read += more
        return (names & self._started_with.keys() & self.namespace.keys()) - _loop_variables(self.source.code)

    def _data_not_asked_for(self) -> list[str]:
        """Names the cell bound to data that `--out` did not list; no modules, functions or loop variables."""
        loop_variables = _loop_variables(self.source.code)
        return [
            name
            for name in sorted(names_assigned(self._parts) - set(self.out) - loop_variables)
            if not name.startswith("_")
            and name in self.namespace
            and id(self.namespace[name]) != self._started_with.get(name)
            and _is_data(self.namespace[name])
            and not _is_loader(self.namespace[name])
            and not self._holds_only_what_was_there(self.namespace[name])
        ]

    def _holds_only_what_was_there(self, value: Any) -> bool:
        """Whether it is a tuple or a list of the notebook's own objects, as of the arguments of a launcher."""
        there = self._started_with.values()
        return type(value) in (tuple, list) and len(value) > 1 and {id(part) for part in value} <= set(there)

    def left_behind(self) -> tuple[str, dict[str, Any]]:
        names = sorted(names_assigned(self._parts))
        return self.source.name, {name: self.namespace[name] for name in names if name in self.namespace}

    def anchors(self) -> dict[int, str]:
        return self._anchors

    # --- in the kernel -----------------------------------------------------------------------------------------

    def names_read(self) -> set[str]:
        """Names that are to be there before the cell: those it reads and does not bind itself."""
        return names_read(self._parts) - names_assigned(self._parts)

    def names_to_send(self) -> list[str]:
        """What a process that is no copy of the kernel needs: the names the cell reads, and those of --out and --in."""
        wanted = names_read(self._parts) | set(self.out) | set(self.extra)
        if self.home is not None:
            wanted -= self.home.there
        return sorted(name for name in wanted if name in self.namespace and not _belongs_to_ipython(name))

    def pack(self) -> Parcel:
        values = {f"in:{name}": self.namespace[name] for name in self.names_to_send()}
        head = {"source": self.source, "out": self.out, "speaker": self.speaker, "debugged": self.debugged}
        anchors = None if self.home is None else self.home.anchors
        parcel, refused = pack_what_can_travel({"head": head} | values, anchors=anchors, namespace=self.namespace)
        if self.home is not None:  # the ranks may have no need of what they lack: the cell may be about to make it
            came = {name.removeprefix("in:"): value for name, value in values.items() if name not in refused}
            self.home.learn(came)
            return parcel
        if not refused:
            return parcel
        os.close(parcel.fd)
        names = {name.removeprefix("in:"): reason for name, reason in refused.items()}
        listed = "\n".join(f"  {name}: {reason}" for name, reason in names.items())
        raise CannotSend(
            "the cell reads names that cannot travel to the ranks, which here start from a clean process:\n"
            f"{listed}\nCreate {'it' if len(names) == 1 else 'them'} inside the cell, or use --start fork if no cell "
            "has used CUDA yet.",
            names,
        )

    @classmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        namespace = new_main() if home is None else home.namespace
        values, refused = unpack_what_can_be_rebuilt(
            fd, namespace=namespace, anchored=None if home is None else home.find
        )
        if refused and home is None:  # a rank that stays may have no need of them
            raise cannot_be_rebuilt(refused)
        head = values.pop("head")
        came = {name.removeprefix("in:"): value for name, value in values.items()}
        if home is not None:
            home.learn(came)
        for name, value in came.items():
            namespace.setdefault(name, value)
        return cls(
            head["source"],
            namespace,
            head["out"],
            home=home,
            speaker=head["speaker"],
            debugged=head["debugged"],
        )

    def anchored(self, name: str) -> Any:
        if self.home is not None:
            return self.home.find(name)
        kind, _, of = name.partition(":")
        return type(self.namespace[of]) if kind == "type" else self.namespace[of]

    def knows(self, name: str) -> bool:
        """Whether the notebook has a name that a rank missed."""
        return name in self.namespace


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function of the notebook, or of the methods of a class of it."""
    kind = type(value)
    if kind is types.FunctionType:
        if value.__module__ == "__main__":
            yield value.__code__
        return
    owner = value if kind is type else kind
    if owner.__module__ == "__main__":
        yield from (part.__code__ for part in vars(owner).values() if type(part) is types.FunctionType)


def _execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        return _completed(value)
    return value


def _completed(coroutine: Any) -> Any:
    """The result of a cell with a top-level `await`."""
    if not _loop_is_running():  # outside of any `except`: an error of the cell has nothing to do with it
        return asyncio.run(coroutine)
    # Inline, in the kernel, whose own loop is running in this thread: the cell gets a loop in another.
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cannot_be_rebuilt(refused: Mapping[str, str]) -> CannotSend:
    """The error of a rank that got names and could not rebuild them."""
    names = {name.removeprefix("in:"): reason for name, reason in refused.items()}
    listed = "".join(f"\n  {name}: {reason}" for name, reason in names.items())
    return CannotSend(
        f"{len(names)} of the names that were sent to the ranks cannot be rebuilt there:{listed}\n"
        "  Make such objects in the cell that uses them, or send the data they were made from.",
        names,
    )


def new_main() -> dict[str, Any]:
    """The names of a new and empty `__main__`, in a rank that is no copy of the notebook."""
    main = types.ModuleType("__main__")
    namespace = vars(main)
    sys.modules["__main__"] = main
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is not None and shell is not None:
        namespace["get_ipython"] = ipython.get_ipython
        shell.user_ns = namespace
        shell.user_module = main
    return namespace


def _formatted(value: Any) -> dict[str, Any]:
    """The display of the last expression, as the notebook would format it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return {"data": {"text/plain": repr(value)}, "metadata": {}}
    data, metadata = shell.display_formatter.format(value)
    return {
        "data": {mime: part for mime, part in data.items() if isinstance(part, str | dict | list) and _is_json(part)},
        "metadata": metadata if _is_json(metadata) else {},
    }


def _is_json(value: Any) -> bool:
    """Whether a front end could be sent it; a class of the user's may show itself as anything."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_small_data(value: Any) -> bool:
    return _is_data(value) and not _is_heavy(value) and size_of(value) <= _SMALL_BYTES


def _is_data(value: Any) -> bool:
    kind = type(value)  # not `isinstance`, which asks a proxy for the class of what it stands for
    if issubclass(kind, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
        return False
    module = str(kind.__module__)
    if f"{module}.".startswith(tuple(f"{name}." for name in (*_OF_RANKS, *_TRAINERS))):
        return False
    if kind is list and value and not any(map(_is_data, value)):
        return False  # of callbacks, say
    torch = sys.modules.get("torch")
    comes_from_us = module.startswith("nbaccel.")  # an Accelerator that the cell made
    is_model = torch is not None and issubclass(kind, torch.nn.Module)
    return not comes_from_us or is_model or is_wrapper(value)  # what we wrap is data


def _is_heavy(value: Any) -> bool:
    """Modules, optimizers and figures: their display is wanted, the object itself is not."""
    torch = sys.modules.get("torch")
    figure = sys.modules.get("matplotlib.figure")
    if torch is not None and issubclass(type(value), torch.nn.Module | torch.optim.Optimizer):
        return True
    return figure is not None and issubclass(type(value), figure.FigureBase)


def _is_loader(value: Any) -> bool:
    """A loader holds no result: it is made of data that the notebook has."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.utils.data.DataLoader)


def _loop_variables(code: str) -> set[str]:
    """Names bound by `for` and `with` at the top level and in its blocks: not results, but leftovers."""
    targets: list[ast.AST] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.For | ast.AsyncFor):
            targets.append(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets.append(node.optional_vars)
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _belongs_to_ipython(name: str) -> bool:
    return name in {"In", "Out", "get_ipython", "exit", "quit", "open", "display"} or (
        name.startswith("_") and name.strip("_i0123456789dhost") == ""
    )
