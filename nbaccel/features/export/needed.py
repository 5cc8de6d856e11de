"""Find the cells without which a script would give another result than the cell that trained. Runs in the kernel.

The history of the kernel is a program that has run from top to bottom, whatever the order of the cells on the page. So
cells are taken in the order in which they ran, and one that ran twice is two. Going back from the cell that trained, a
cell is needed if it binds a name that is read after it, may change a value that is (`model.apply(init)`), draws random
numbers between a seed and the training, or acts on a package or the system (`torch.set_default_dtype`, `os.makedirs`).
Definitions that nobody reads, and what only shows values, are left out.

What the history cannot tell is refused, each in one sentence with the name and the cell.
"""

from __future__ import annotations

import ast
import builtins
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from nbaccel.features.export.code_facts import GENERATORS
from nbaccel.features.export.ran_cell import RanCell, names_of
from nbaccel.features.source.code_text import mark_of_code
from nbaccel.namespace.parameters import parameters_of

__all__ = ["Needed", "needed_cells"]

_BY_TEXT = ("exec", "eval", "globals", "locals")
_ASK = {"input": "input()", "getpass": "getpass", "ipywidgets": "a widget", "google": "Colab's own interface"}
"""What asks a person, by the builtin or the package."""

_LONGEST_VALUE = 40
_FUTURE = 0x1FE0000
"""The bits of `co_flags` for `from __future__` imports."""

_GIVEN = frozenset({*dir(builtins), "__name__", "__file__", "__doc__", "__builtins__", "accelerator", "display"}) - {
    "get_ipython"  # IPython makes it a builtin
}
_OF_IPYTHON = re.compile(r"In|Out|_{1,3}|_i{1,3}|_[iod]h|_i?\d+")
"""Names of the history, and of values that cells have shown."""


@dataclass(frozen=True, slots=True)
class Needed:
    """The cells of a script.

    Args:
        above: The cells that run before the one that trains, in their order.
        left_out: Those that ran before it and are not in the script.
        trained: The cell that trains.
    """

    above: tuple[RanCell, ...]
    left_out: tuple[RanCell, ...]
    trained: RanCell

    @property
    def all(self) -> tuple[RanCell, ...]:
        """Return the cells of the script."""
        return (*self.above, self.trained)

    @property
    def is_seeded(self) -> bool:
        """Return whether a cell seeds random numbers."""
        return any(cell.facts.seeds for cell in self.all)

    @property
    def installs(self) -> list[str]:
        """Return the commands by which the notebook has installed packages."""
        cells = sorted((*self.left_out, *self.all), key=lambda cell: cell.number)
        return list(dict.fromkeys(command for cell in cells for command in cell.installs))

    @property
    def shell_lines(self) -> list[str]:
        """Return what a shell has run, with the cells: it may have made files that the script reads."""
        cells = sorted((*self.left_out, *self.all), key=lambda cell: cell.number)
        return [f"{line} ({cell})" for cell in cells for line in cell.shell_lines]


def needed_cells(
    cells: Sequence[RanCell],
    trained: RanCell,
    namespace: Mapping[str, Any],
    failed: Collection[int] = (),
    *,
    has_own_seed: bool = False,
    leaves_no_trace: Collection[int] = (),
) -> Needed:
    """Return the cells of which a script of the cell `trained` consists.

    Args:
        cells: All that have run.
        namespace: The notebook's names as they are now.
        failed: Numbers of cells that ended with an error.
        has_own_seed: The cell's ranks were seeded before it, all generators.
        leaves_no_trace: Numbers of cells that ran in ranks and changed nothing of the notebook, such as a check.

    Raises:
        UsageError: The script's result could be another one. The message names what is not known, and its cell.
    """
    before = [cell for cell in cells if cell.number < trained.number and cell.number not in leaves_no_trace]
    search = _Search(cells, before, trained, namespace, has_own_seed)
    kept = search.kept()
    _refuse_unwritable(before, kept, trained, failed)
    search.refuse_other_ranks(kept)
    search.refuse_missing(kept)
    search.refuse_asked(kept)
    _refuse_prepared(kept, trained, namespace)
    _refuse_changed(cells, trained, kept, search.inputs - search.imports.keys())
    _refuse_other_values(cells, trained, kept, namespace)
    return Needed(tuple(kept), tuple(cell for cell in before if cell not in kept), trained)


class _Search:
    """Goes back from the cell that trained.

    Attributes:
        imports: See `imports_in`.
        generators: The random generators that any cell seeds; the numbers of others nobody can repeat.
        inputs: Names whose values the cell that trained, or a function that it calls, reads and does not make.
    """

    def __init__(
        self,
        cells: Sequence[RanCell],
        before: Sequence[RanCell],
        trained: RanCell,
        namespace: Mapping[str, Any],
        has_own_seed: bool,
    ) -> None:
        self._before = before
        self._trained = trained
        self._namespace = namespace
        everything = (*before, trained)
        self._names = names_of([cell.code for cell in cells], namespace)
        self.imports = self._names.imports
        self._later = _joined(cell.facts.later for cell in everything)
        self._stores = _joined(cell.facts.stores for cell in everything)
        made_of = _joined(cell.facts.made_of for cell in everything)
        self._made_of = {name: self._reach(parts) for name, parts in made_of.items()}
        seeded = {name for cell in before for name in cell.facts.seeds}
        self.generators = frozenset(seeded)
        own = trained.facts.seeds | (frozenset(GENERATORS.values()) if has_own_seed else frozenset())
        self.inputs = self._reach(trained.facts.needs) - trained.facts.makes
        self._wanted = self.inputs | (self.generators - own)
        self._all = self._everything_wanted()
        self._values = self._with_aliases(self._all)

    def kept(self) -> list[RanCell]:
        """Return the cells that are needed, in their order, without those whose names were bound anew unread."""
        called = frozenset(read for name in self._all for read in self._later.get(name, ()))
        live = {*self._wanted, *called}
        found: list[RanCell] = []
        for cell in reversed(self._before):
            if not self._is_needed(cell, live, self._values):
                continue
            found.append(cell)
            live -= cell.facts.makes | (cell.facts.seeds & self.generators)
            live |= self._reads(cell)
            if cell.facts.is_loud:  # it may call a function that was defined before
                live |= called
        return found[::-1]

    def _everything_wanted(self) -> frozenset[str]:
        """Return the names that the cell that trained needs, those that the cells need which bind these, and so on."""
        wanted = set(self._wanted)
        while True:
            values = self._with_aliases(wanted)
            more = {
                name for cell in self._before if self._is_needed(cell, wanted, values) for name in self._reads(cell)
            }
            if more <= wanted:
                return frozenset(wanted)
            wanted |= more

    def _is_needed(self, cell: RanCell, wanted: Collection[str], values: Collection[str]) -> bool:
        """Return whether a cell binds a name of `wanted`, may change one of `values`, or acts beside names."""
        if cell.flags is not None:  # see `refuse_other_ranks`
            return False
        facts = cell.facts
        if facts.acts or any(name in wanted for name in facts.binds | facts.seeds):
            return True
        if facts.draws and any(name in wanted for name in self.generators):
            return True
        reached = self._reach(facts.reads) if facts.is_loud else frozenset()
        if any(stored in wanted for name in reached for stored in self._stores.get(name, ())):
            return True
        return any(name in values and self._names.can_change(name) for name in reached)

    def _with_aliases(self, names: Collection[str]) -> frozenset[str]:
        """Return `names`, and those that may lead to objects behind them: `view = x[0]`."""
        found = set(names)
        while True:
            values = {name for name in found if self._names.can_change(name)}
            more = {name for name, parts in self._made_of.items() if name not in found and not values.isdisjoint(parts)}
            if not more:
                return frozenset(found)
            found |= more

    def _reads(self, cell: RanCell) -> frozenset[str]:
        draws = self.generators if cell.facts.draws else frozenset()
        return (self._reach(cell.facts.needs) - cell.facts.makes) | draws

    def _reach(self, names: Collection[str]) -> frozenset[str]:
        """Return `names`, and those that the functions of the notebook behind them read, and so on."""
        found = set(names)
        to_read = list(found)
        while to_read:
            more = self._later.get(to_read.pop(), frozenset()) - found
            found |= more
            to_read += more
        return frozenset(found)

    def refuse_other_ranks(self, kept: Sequence[RanCell]) -> None:
        """Refuse what an earlier cell in ranks has made, trained or drawn: a script has one such cell.

        Raises:
            UsageError: It matters to the cell that trained.
        """
        others = [cell for cell in self._before if cell.flags is not None]
        for other in reversed(others):
            after = [cell for cell in kept if cell.number > other.number]
            wanted = set(self._wanted)
            for cell in reversed(after):
                wanted -= cell.facts.makes | cell.facts.seeds
                wanted |= self._reads(cell)
            again = f"run the cells that make it again before {self._trained}, or restart the kernel and run all once"
            if made := sorted(other.facts.binds & wanted - self.imports.keys()):
                raise UsageError(
                    f"{other} ran in ranks too, and has left {made[0]}, which {self._trained} needs: a script has one "
                    f"such cell, so join the two, or {again}."
                )
            if trained := [name for name in sorted(self._reach(other.facts.reads) & wanted) if self._is_trained(name)]:
                raise UsageError(
                    f"{other} ran in ranks too, and may have trained {trained[0]}, with which {self._trained} went on: "
                    f"a script would begin with an untrained one; {again}."
                )
            if (drawn := self.generators & wanted) and other.facts.draws:
                raise UsageError(
                    f"{other} ran in ranks too, and drew random numbers ({_listed(drawn)}) after the seed and before "
                    f"{self._trained}: run the cell with the seed again before it, or seed in {self._trained}."
                )

    def _is_trained(self, name: str) -> bool:
        if name in self.imports or name not in self._namespace:
            return False
        try:
            return any(True for _ in parameters_of(self._namespace[name]))
        except Exception:  # a class of the user's may raise anything
            return False

    def refuse_missing(self, kept: Sequence[RanCell]) -> None:
        """Refuse a name that the script would lack.

        Raises:
            UsageError: It stands in no cell.
        """
        bound: set[str] = set()
        by_any = {name for cell in (*kept, self._trained) for name in cell.facts.binds}
        for cell in (*kept, self._trained):
            called = {name for each in cell.facts.later.values() for name in each}
            at_once = cell.facts.needs - called - cell.facts.binds - bound
            later = {name for name in self._reach(cell.facts.needs) - by_any if name in self._namespace}
            for name in sorted(at_once | later - cell.facts.binds):
                if name in _GIVEN or name in bound:
                    continue
                raise UsageError(self._where_from(name, cell))
            bound |= cell.facts.binds

    def _where_from(self, name: str, reader: RanCell) -> str:
        """Return the sentence about a name that no cell binds by plain code."""
        if name == "get_ipython":
            return f"{reader} asks for get_ipython(), which a script has not: leave it out, and run the cell again."
        if _OF_IPYTHON.fullmatch(name):
            return f"{reader} reads {name}, the value of an earlier cell: give it a name there, and run both again."
        for cell in reversed(self._before):
            if line := (cell.made_by or {}).get(name):
                return f"{name} comes from {line} in {cell}, which a script has not: make it by Python."
        for cell in reversed(self._before):
            if cell.refused and name in cell.words:
                return f"{name} may come from {cell}, and {cell.refused}: make it by Python."
        return (
            f"{reader} reads {name}, and no cell of this kernel has made it (a file of dill, a start-up file, another "
            "program?): make it in a cell, and run that again."
        )

    def refuse_asked(self, kept: Sequence[RanCell]) -> None:
        """Refuse values that a person has given.

        Raises:
            UsageError: A cell asks.
        """
        for cell in (*kept, self._trained):
            for name in sorted(cell.facts.reads):
                package = "input" if name == "input" else self.imports.get(name, "").partition(".")[0]
                if package in _ASK and (package != "google" or "colab" in self.imports[name]):
                    raise UsageError(
                        f"{_bound_by(name, cell)} comes from {_ASK[package]} in {cell}, which nobody answers in a "
                        "script: assign the value in a cell instead."
                    )


def _joined(mappings: Iterable[Mapping[str, frozenset[str]]]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for mapping in mappings:
        for name, names in mapping.items():
            found[name] = found.get(name, frozenset()) | names
    return found


def _bound_by(name: str, cell: RanCell) -> str:
    """Return the first name that a statement binds which reads `name`."""
    for statement in ast.walk(ast.parse(cell.code)):
        if isinstance(statement, ast.Assign):
            leaves = [leaf for leaf in ast.walk(statement) if isinstance(leaf, ast.Name)]
            bound = [leaf.id for leaf in leaves if isinstance(leaf.ctx, ast.Store)]
            if bound and any(leaf.id == name for leaf in leaves):
                return bound[0]
    return "a value"


def _by_text(cell: RanCell) -> str:
    return next((f"{name}()" for name in _BY_TEXT if name in cell.facts.reads), "vars()")


def _listed(generators: Collection[str]) -> str:
    return ", ".join(sorted(name.strip("<>").partition("'")[0] for name in generators))


def _refuse_unwritable(
    before: Sequence[RanCell], kept: Sequence[RanCell], trained: RanCell, failed: Collection[int]
) -> None:
    """Refuse what cannot be written, or followed by reading.

    Raises:
        UsageError: In one sentence, which cell, and why.
    """
    for cell in before:
        if cell.binds_unknown:
            raise UsageError(
                f"{cell} has {cell.binds_unknown}, which binds names that stand in no cell: import what it makes."
            )
        if cell.facts.reads & {"exec", "globals", "locals"} and cell.facts.is_loud:
            raise UsageError(f"{cell} uses {_by_text(cell)}, and what it binds cannot be read: write it as plain code.")
    for cell in (*kept, trained):
        if cell.facts.reads & {*_BY_TEXT} or cell.facts.asks_for_locals:
            raise UsageError(f"{cell} uses {_by_text(cell)}, and what it reads is unknown: write it as plain code.")
        if cell.refused:
            raise UsageError(
                f"{cell} cannot be in a script: {cell.refused}. Put what the training needs into a cell of plain "
                "Python, and run that again."
            )
        if cell in kept and cell.number in failed:
            raise UsageError(
                f"{cell} ended with an error, so how far it came is not known, and {trained} needs "
                f"{_what_it_gives(cell)}: run it again without the error, and {trained} after it."
            )


def _what_it_gives(cell: RanCell) -> str:
    return ", ".join(sorted(cell.facts.binds)[:3]) or "what it does"


def _refuse_prepared(kept: Sequence[RanCell], trained: RanCell, namespace: Mapping[str, Any]) -> None:
    """Refuse calls of an Accelerator above the training: it was alone there, and its ranks have not made them.

    Raises:
        UsageError: Which call, in which cell.
    """
    for cell in kept:
        for node in ast.walk(ast.parse(cell.code)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and type(namespace.get(owner.id)).__name__ == "Accelerator":
                raise UsageError(
                    f"{cell} calls {owner.id}.{node.func.attr}() in the notebook's own process, which is no rank: put "
                    f"that call into {trained}."
                )


def _refuse_changed(
    cells: Sequence[RanCell], trained: RanCell, kept: Sequence[RanCell], inputs: Collection[str]
) -> None:
    """Refuse if a later cell has given a name of the training another value: which one is meant?

    Raises:
        UsageError: In one sentence, which name, and by which cell.
    """
    known = {cell.code for cell in kept}
    for cell in cells:
        if cell.number <= trained.number or cell.code in known or cell.flags is not None:
            continue
        if changed := sorted(name for name in cell.facts.binds - trained.facts.binds if name in inputs):
            raise UsageError(
                f"{cell} has given {changed[0]} another value after {trained} trained with the one before: run the "
                f"training again with it, or run the cell that made {changed[0]} again."
            )


def _refuse_other_values(
    cells: Sequence[RanCell], trained: RanCell, kept: Sequence[RanCell], namespace: Mapping[str, Any]
) -> None:
    """Refuse if a constant or a function is not what the last cell that bound it says: nothing in a cell changed it.

    Raises:
        UsageError: In one sentence, which name, its value, and the cell.
    """
    later = {name for cell in cells if cell.number >= trained.number for name in cell.facts.binds}
    later |= {name for cell in cells for stored in cell.facts.stores.values() for name in stored}
    last = {name: cell for cell in cells if cell.number < trained.number for name in cell.facts.binds}
    for name, cell in sorted(last.items()):
        if name in later or name not in namespace or cell not in kept:
            continue
        for statement in _last_binding(cell, name):
            if (text := _another_value(statement, namespace[name])) is not None:
                raise UsageError(
                    f"{name} is not what {cell} says{text}, and no cell has changed it (a widget, a magic, exec?): run "
                    f"{cell} again, and {trained} after it."
                )


def _last_binding(cell: RanCell, name: str) -> Iterator[ast.stmt]:
    """Yield the statement of a cell that binds a name by a literal, or as a plain function, if nothing else does."""
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(cell.code)):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(ast.Pass())
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == name:
            found.append(node)
    body = ast.parse(cell.code).body
    if len(found) == 1:
        for statement in body:
            is_literal = (
                isinstance(statement, ast.Assign)
                and [target.id for target in statement.targets if isinstance(target, ast.Name)] == [name]
                and isinstance(statement.value, ast.Constant)
            )
            is_function = isinstance(statement, ast.FunctionDef) and statement.name == name
            if is_literal or (is_function and not getattr(statement, "decorator_list", ())):
                yield statement


def _another_value(statement: ast.stmt, value: Any) -> str | None:
    """Return in words how a value differs from what a statement binds; None if it is the same."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
        said = statement.value.value
        is_same = type(value) is type(said) and value == said
        return None if is_same else f", {said!r}, but {repr(value)[:_LONGEST_VALUE]}"
    if not isinstance(value, types.FunctionType):
        return f", a function, but {repr(value)[:_LONGEST_VALUE]}"
    flags = value.__code__.co_flags & _FUTURE
    whole = compile(ast.Module([statement], []), "", "exec", flags, dont_inherit=True)
    codes = [each for each in whole.co_consts if isinstance(each, types.CodeType)]
    own = mark_of_code(value.__code__)
    return None if any(mark_of_code(code) == own for code in codes) else ""
