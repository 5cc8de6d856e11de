"""CellTask: a notebook cell as the work of a rank. Made in the kernel, run in ranks.

IPython's transforms have been applied to the cell's text in the kernel. It runs in the rank's copy of the notebook's
namespace, compiled under the cell's name, so that every traceback says `Cell In[5], line 3`.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import time
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from nbaccel.base.hardware import usable_memory
from nbaccel.base.settings import RunSettings
from nbaccel.errors import CannotSend
from nbaccel.launching.ipc.kernel_state import random_states, set_random_states, take_cell_sources
from nbaccel.launching.ipc.spec import Results, Task
from nbaccel.launching.ipc.user_code import by_reference_of, new_main
from nbaccel.launching.tasks.cell_code import CellSource, execute
from nbaccel.namespace.arrays import TensorChange
from nbaccel.namespace.inventory import Baseline, ObjectPlace, belongs_to_ipython, found_at
from nbaccel.namespace.kind import Change
from nbaccel.namespace.names import (
    forms_group,
    knows_ranks,
    loop_variables,
    made_before_read,
    names_assigned,
    names_in_magics,
    names_read,
    not_read,
    says_first_card,
    seeds,
    with_their_own,
)
from nbaccel.namespace.nbytes import size_of, sizes_of
from nbaccel.namespace.old_values import OldValues
from nbaccel.namespace.parameters import checksums, is_bound_to_its_process, mark, model_in, parameters_of
from nbaccel.namespace.payload import Payload, pack_what_can_travel, unpack_what_can_be_rebuilt
from nbaccel.namespace.sharded_tensors import held_in_shards
from nbaccel.namespace.unpicklable import cannot_be_rebuilt
from nbaccel.namespace.wrappers import PYRO, is_wrapper, kept_apart, modules_in, plain

if TYPE_CHECKING:
    from nbaccel.launching.ipc.shared_namespace import SharedNamespace

__all__ = [
    "RANDOM",
    "RESULT",
    "CellTask",
]

RESULT, RANDOM = "<last expression>", "<random states>"
"""Names under which the last expression's value and the random states are sent; no variable can have these names."""

_ACCELERATOR = "accelerator"
"""The name that a rank's setup binds if the notebook has none."""

_SMALL_BYTES = 1_000_000
_WORTH_MEASURING_BYTES = 100_000_000
_MOST_GRADIENT_BYTES = 64_000_000
"""Largest size of gradients that are sent: a loop has used them already, and they are as large as the model."""

_MOST_OF_MEMORY, _MOST_OF_MEMORY_FOR_A_MODEL = 0.25, 0.75
"""Shares of the free memory: a value made by a cell stays in its rank if it is larger."""

_OF_RANKS = (
    "torch.utils.tensorboard", "tensorboardX", "wandb", "logging", "accelerate", "lightning", "pytorch_lightning",
)  # fmt: skip
_TRAINERS = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer")
"""Packages and modules whose objects know the ranks, and are no data."""


class CellTask(Task):
    """Runs a cell and sends back its changes to the notebook, or the names in `out`.

    Args:
        namespace: The notebook's globals; a fork runs in its copy of them.
        out: Names to bring back, of the result rank; None for all that the cell has bound, deleted and changed.
            Persistent ranks keep their changes, and send only these names.
        extra: Names that the cell reads only dynamically and that are to be sent too (`--in`).
        home: The names of persistent ranks.
        speaker: The rank whose names go back.
        debugged: See `Task`.
        is_copy: Whether `namespace` is the notebook's own, or a fork's copy of it; else it was made of names that were
            sent.

    Attributes:
        leaves_all: Whether everything that the same cell would leave in the notebook goes back.
        random: The notebook's random states, if the cell continues with them, see `draw_as_here`.
    """

    reference = "nbaccel.launching.tasks.cell_task:CellTask"

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] | None = None,
        extra: tuple[str, ...] = (),
        *,
        home: SharedNamespace | None = None,
        result_rank: int = 0,
        debugged: int | None = None,
        is_copy: bool = True,
    ) -> None:
        self.source = source
        self.debugged = debugged
        self.namespace: dict[str, Any] = namespace
        self.leaves_all = out is None and home is None
        self.out = out or ()
        self.extra = extra
        self.home = home
        self.result_rank = result_rank
        self._by_reference = by_reference_of(namespace) if home is None else home.by_reference
        self._parts = source.compile()
        self._started_with = {name: id(value) for name, value in namespace.items()}
        self._is_copy = is_copy
        self._marks: dict[str, int] = {}
        self._to_rebind: dict[str, weakref.ref[Any]] = {}
        self._old = OldValues((), namespace, "", ())
        self._baseline: Baseline | None = None
        self._looked_at: list[str] = []
        self._last: Any = None
        self._has_last = False
        self._unsent: dict[str, str] = {}  # names that the notebook has and this process lacks, with the reason
        self.random: dict[str, Any] | None = None
        self._kept_apart: dict[str, Any] = {}

    # --- in a rank ---------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        if self.random is not None:
            set_random_states(self.random)
        if rank == self.result_rank and self.leaves_all:
            self._kept_apart = kept_apart()
            mentioned = self.names_mentioned() & self._started_with.keys() & self.namespace.keys()
            self._looked_at = sorted(mentioned, key=lambda name: (_turn(plain(self.namespace[name])), name))
            self._baseline = Baseline(self.namespace, self._looked_at, is_copy=self._is_copy)

    def run(self) -> None:
        shown = self.source.shown or self.source.code
        linecache.cache[self.source.name] = (len(shown), None, shown.splitlines(keepends=True), self.source.name)
        if not self.leaves_all:
            with suppress(Exception):  # as in `results`
                self._marks = self._marked()
            for name in self.binds() & self.namespace.keys():
                with suppress(TypeError):  # numbers, texts and containers have no weak references
                    self._to_rebind[name] = weakref.ref(self.namespace[name])
        if self.home is None:  # persistent ranks keep their own variables
            is_swept = RunSettings.from_env().swept_values is not None
            self._old = OldValues(self.out, self.namespace, self.source.code, self._parts, is_swept)
        began = time.monotonic()
        statements, *expression = self._executed()
        try:
            with self._old.compared():
                execute(statements, self.namespace)
                if expression:
                    self._last = execute(expression[0], self.namespace)
                    self._has_last = self._last is not None
        except NameError as error:
            if why := self._unsent.get(str(error.name)):
                error.add_note(f"the notebook's {error.name} was not sent to the ranks, as the cell binds it: {why}")
            raise
        if self.source.is_timed:
            print(f"Wall time: {time.monotonic() - began:.3g} s")

    def _executed(self) -> list[types.CodeType]:
        """Return the code that runs: the statements, and the last expression if its value is to be shown."""
        return self._parts

    def results(self, rank: int) -> Results:
        found: dict[str, Any] = {}
        with suppress(Exception):  # facts about names matter less than the names themselves
            sums, found["holders"] = self._trained()
            found["checksums"] = sums
            if rank == self.result_rank and self.home is not None:
                found["stays"] = self._data_not_asked_for()
                found["kept"] = checksums({name: self.namespace[name] for name in self._mentioned()})
            elif rank == self.result_rank and not self.leaves_all:
                found |= self._left_here(sums)
        if rank != self.result_rank:
            return Results(facts=found, parts=self._named())
        here = self.results_here() if self._baseline is None else self._all_that_is_left(self._baseline)
        # Otherwise the notebook's random numbers continue as if the cell had not run.
        if self.random is not None or (self.leaves_all and seeds(self._parts, self.namespace)):
            states = {RANDOM: random_states()}
            here = replace(here, values={**here.values, **states}, optional=here.optional | {RANDOM})
        return replace(here, facts={**here.facts, **found})

    def _all_that_is_left(self, baseline: Baseline) -> Results:
        """Return the changes that the same cell would make in the notebook."""
        shards = held_in_shards({name: self.namespace[name] for name in self._looked_at if name in self.namespace})
        delta, inventory = baseline.delta(), baseline.inventory
        bound = {name: plain(value) for name, value in delta.bound.items()}
        if _ACCELERATOR not in self._started_with and _ACCELERATOR in self.names_mentioned():
            bound.setdefault(_ACCELERATOR, self.namespace.get(_ACCELERATOR))  # ours: later cells may use it
        huge = _huge({name: value for name, value in bound.items() if inventory.place(value) is None})
        here = self.results_here()
        changes = [change for change in delta.changes if ObjectPlace(*change.token).name not in shards]
        unlooked = dict(delta.unlooked)
        if kept_apart() != self._kept_apart:
            unlooked |= [PYRO]
        if _gradient_bytes(changes, bound) > _MOST_GRADIENT_BYTES:
            inventory.takes_gradients = False
            unlooked |= {f"gradients of {name}": "larger than 64 MB" for name in _only_gradients(changes)}
            changes = list(_without_gradients(changes))
        changed = [ObjectPlace(*change.token).name for change in changes]
        facts: dict[str, Any] = {"changed": changed, "deleted": delta.deleted, "unlooked": unlooked, "huge": huge}
        facts["leaves"] = bool(changes or delta.deleted or bound.keys() - self.leftovers())
        values = {name: value for name, value in bound.items() if name not in huge} | dict(here.values)
        return Results(
            values,
            {**delta.staying, **shards},
            optional=here.optional,
            facts={**here.facts, **facts},
            changes=changes,
            places=inventory,
            may_lack=True,
        )

    def _left_here(self, sums: Mapping[str, int]) -> dict[str, list[str] | dict[str, str]]:
        """Return names that the cell changed or made, which of them hold a model, and which cannot leave the process.

        Args:
            sums: Names that have parameters.
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
        """Return the names in `--out` and the last expression's display; enough in the notebook's own process."""
        values = self._named()
        facts: dict[str, Any] = {"sizes": sizes_of(values)}
        if self._has_last:
            facts["result"] = _formatted(self._last)
            if _is_small_data(self._last):
                values[RESULT] = self._last
        missing = {name: "the cell ended without assigning it" for name in self.out if name not in values}
        return Results(values, missing, optional=frozenset({RESULT}), facts=facts, may_lack=True)

    def _named(self) -> dict[str, Any]:
        """Return the values of the names in `--out` that the cell has left."""
        names = [name for name in self.out if name in self.namespace and name not in self._old.untouched]
        return {name: plain(self.namespace[name]) for name in names}

    def _trained(self) -> tuple[dict[str, int], list[str]]:
        """Return numbers by which ranks, and the notebook, compare the parameters that a cell trained.

        They cover the names in `--out`, and names that the notebook had before and the cell's code mentions: these were
        equal in all ranks. Also return the names that only hold parameters of other names.
        """
        names = set(self.out)
        if self.home is None:
            names |= self._mentioned()
        return checksums({name: self.namespace[name] for name in names if name in self.namespace})

    def _marked(self) -> dict[str, int]:
        """Return marks of the notebook's containers and objects that the cell's code mentions."""
        if self.home is not None:
            return {}
        found: dict[str, int] = {}
        for name in self._mentioned():
            with suppress(Exception):  # a class of the user's may raise anything
                value = plain(self.namespace[name])
                if _is_data(value) and not _is_loader(value) and (own := mark(value)) is not None:
                    found[name] = own
        return found

    def names_mentioned(self) -> set[str]:
        """Return names that the cell's code reads or binds, also in functions of the notebook, and in magics."""
        return with_their_own(self._reads | self._assigns | self._in_magics, self.namespace)

    # Each costs a disassembly of the code, or a parse of its text, and is asked for a dozen times in a cell.

    @cached_property
    def _reads(self) -> frozenset[str]:
        return frozenset(names_read(self._parts))

    @cached_property
    def _assigns(self) -> frozenset[str]:
        return frozenset(names_assigned(self._parts))

    @cached_property
    def _in_magics(self) -> frozenset[str]:
        return frozenset(names_in_magics(self.source.code))

    @cached_property
    def _leftovers(self) -> frozenset[str]:
        return frozenset(loop_variables(self.source.code))

    @cached_property
    def _made_before_read(self) -> frozenset[str]:
        return frozenset(made_before_read(self.source.code))

    def _mentioned(self) -> set[str]:
        """Return those of these names that the notebook had before."""
        names = self.names_mentioned() & self._started_with.keys() & self.namespace.keys()
        return names - self._leftovers

    def _data_not_asked_for(self) -> list[str]:
        """Return names the cell bound to data that `--out` did not list; no modules, functions or loop variables."""
        return [
            name
            for name in sorted(self.binds() - set(self.out))
            if not name.startswith("_")
            and name in self.namespace
            and self._is_new(name)
            and _is_data(self.namespace[name])
            and not _is_loader(self.namespace[name])
            and not self._holds_only_what_was_there(self.namespace[name])
        ]

    def _is_new(self, name: str) -> bool:
        """Return whether the cell has bound `name` to an object that was not there before.

        A second tensor may lie where the first one was, and has its id then.
        """
        value, before = self.namespace[name], self._to_rebind.get(name)
        return id(value) != self._started_with.get(name) or (before is not None and before() is not value)

    def _holds_only_what_was_there(self, value: Any) -> bool:
        """Return whether `value` is a tuple or list of the notebook's objects, such as a launcher's arguments."""
        there = self._started_with.values()
        return type(value) in (tuple, list) and len(value) > 1 and {id(part) for part in value} <= set(there)

    def left_behind(self) -> tuple[str, dict[str, Any]]:
        names = sorted(self._assigns)
        return self.source.name, {name: self.namespace[name] for name in names if name in self.namespace}

    def by_reference(self) -> dict[int, str]:
        return self._by_reference

    # --- in the kernel -----------------------------------------------------------------------------------------

    @cached_property
    def knows_ranks(self) -> bool:  # type: ignore[override]  # found out where it is asked first
        return knows_ranks(self._parts, self.namespace, self._in_magics)

    @cached_property
    def binds_accelerator(self) -> bool:  # type: ignore[override]
        if not self.knows_ranks or _ACCELERATOR in self.names_mentioned():
            return True
        return not forms_group(self._parts, self.namespace)

    @cached_property
    def first_card(self) -> str:  # type: ignore[override]  # found out where it is asked first
        return says_first_card(self._parts, self.namespace, self._in_magics)

    def draw_as_here(self) -> None:
        """Continue, in all ranks, with the random numbers of this process, and bring their states back."""
        self.random = random_states()

    def names_read(self) -> set[str]:
        """Return names that must exist before the cell: those it reads and does not bind itself."""
        return set(self._reads - self._assigns)

    def binds_here(self) -> set[str]:
        """Return names that the cell's top level binds."""
        return set(self._assigns)

    def binds(self) -> set[str]:
        """Return names that may be results: those the cell binds, without leftovers of loops and `with`."""
        return set(self._assigns - self._leftovers)

    def leftovers(self) -> set[str]:
        """Return names that loops and `with` bind."""
        return set(self._leftovers)

    def names_to_send(self) -> list[str]:
        """Return the names that a process other than a copy of the kernel needs: read by the cell, in --out or --in."""
        wanted = self._reads | self._in_magics | set(self.out)
        wanted = (wanted - self._made_before_read) | set(self.extra)
        if self.home is not None:
            wanted -= self.home.there
        return sorted(name for name in wanted if name in self.namespace and not belongs_to_ipython(name))

    def values_to_send(self) -> dict[str, Any]:
        names = with_their_own(self.names_to_send(), self.namespace) - self._not_needed
        there = [name for name in sorted(names) if name in self.namespace and not belongs_to_ipython(name)]
        return {name: self.namespace[name] for name in there}

    def own_codes(self) -> list[types.CodeType]:
        return self._parts

    @cached_property
    def _not_needed(self) -> set[str]:
        """Return names whose values the ranks do not need: the cell makes them anew, or only deletes them."""
        if self.home is not None:  # later cells may need what this one does not
            return set()
        brought_back = set(self.out) - self._made_before_read
        return not_read(self.source.code, self.namespace) - {*brought_back, *self.extra}

    def pack(self) -> Payload:
        out = None if self.leaves_all else self.out
        head: dict[str, Any] = {"source": self.source, "out": out, "result_rank": self.result_rank, "unsent": {}}
        head |= {"debugged": self.debugged, "random": self.random, "knows_ranks": self.knows_ranks}
        head["binds_accelerator"] = self.binds_accelerator
        head["flags"] = self.flags
        head["cells"] = {} if self.home is None else self.home.new_cells()
        head["own"] = self._own_facts()
        return self._packed(head)

    def _own_facts(self) -> Mapping[str, Any]:
        """Return further keyword arguments with which a subclass is made in the rank."""
        return {}

    def _packed(self, head: dict[str, Any]) -> Payload:
        unneeded = self._not_needed
        values = {  # a name that is deleted has to be there, with any value
            f"in:{name}": None if name in unneeded else self.namespace[name]
            for name in self.names_to_send()
            if name not in head["unsent"]
        }
        by_reference = None if self.home is None else self.home.by_reference
        payload, refused = pack_what_can_travel(
            {"head": head} | values,
            by_reference=by_reference,
            namespace=self.namespace,
            unneeded=modules_in({name: self.namespace.get(name) for name in unneeded}),
        )
        if self.home is not None:  # the ranks may not need these names: the cell may be about to make them
            came = {name.removeprefix("in:"): value for name, value in values.items() if name not in refused}
            self.home.learn(came)
            return payload
        names = {name.removeprefix("in:"): reason for name, reason in refused.items()}
        if not names:
            return payload
        os.close(payload.fd)
        if not head["unsent"] and names.keys() <= self.binds_here() - {*self.out, *self.extra}:
            return self._packed(head | {"unsent": names})  # most likely left by an earlier run of the same loop
        listed = "\n".join(f"  {name}: {reason}" for name, reason in names.items())
        raise CannotSend(
            "the cell reads names that cannot travel to the ranks, which here start from a clean process:\n"
            f"{listed}\nCreate {'it' if len(names) == 1 else 'them'} inside the cell, or use --start fork if no cell "
            "has used CUDA yet.",
            names,
        )

    @classmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        namespace = new_main() if home is None else home.namespace
        values, refused = unpack_what_can_be_rebuilt(
            fd, namespace=namespace, anchored=None if home is None else home.find
        )
        if refused and home is None:  # a persistent rank may not need them
            raise cannot_be_rebuilt(refused)
        head = values.pop("head")
        take_cell_sources(head["cells"])
        came = {name.removeprefix("in:"): value for name, value in values.items()}
        if home is not None:
            home.learn(came)
        for name, value in came.items():
            namespace.setdefault(name, value)
        task = cls(
            head["source"],
            namespace,
            head["out"],
            home=home,
            result_rank=head["result_rank"],
            debugged=head["debugged"],
            is_copy=False,
            **head["own"],
        )
        task._unsent, task.random, task.knows_ranks = head["unsent"], head["random"], head["knows_ranks"]
        task.binds_accelerator = head["binds_accelerator"]
        task.flags = head["flags"]
        return task

    def anchored(self, name: str) -> Any:
        if self.home is not None:
            return self.home.find(name)
        kind, _, of = name.partition(":")
        return type(self.namespace[of]) if kind == "type" else self.namespace[of]

    def placed(self, token: Any) -> Any:
        return found_at(ObjectPlace(*token), self.namespace)

    def has_still(self, name: str) -> bool:
        """Return whether the notebook's name has the object that it had when the task was made."""
        return name in self.namespace and id(self.namespace[name]) == self._started_with.get(name)


def _formatted(value: Any) -> dict[str, Any]:
    """Return the display of the last expression, as the notebook would format it."""
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
    """Return whether a front end could be sent `value`; a class of the user's may return anything as its display."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_small_data(value: Any) -> bool:
    return _is_data(value) and not _is_heavy(value) and size_of(value) <= _SMALL_BYTES


def _is_data(value: Any) -> bool:
    kind = type(value)  # not `isinstance`, which asks a proxy for the class of its object
    if issubclass(kind, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
        return False
    module = str(kind.__module__)
    if f"{module}.".startswith(tuple(f"{name}." for name in (*_OF_RANKS, *_TRAINERS))):
        return False
    if kind is list and value and not any(map(_is_data, value)):
        return False  # for example a list of callbacks
    torch = sys.modules.get("torch")
    comes_from_us = module.startswith("nbaccel.")  # an Accelerator that the cell made
    is_model = torch is not None and issubclass(kind, torch.nn.Module)
    return not comes_from_us or is_model or is_wrapper(value)  # the project's wrappers hold data


def _turn(value: Any) -> int:
    """Return the order of reading: models first, and last optimizers, which lead to the same parameters."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 1
    return 0 if issubclass(type(value), torch.nn.Module) else 1 + issubclass(type(value), torch.optim.Optimizer)


def _is_heavy(value: Any) -> bool:
    """Return whether `value` is a module, an optimizer or a figure: its display is wanted, the object itself is not."""
    torch = sys.modules.get("torch")
    figure = sys.modules.get("matplotlib.figure")
    if torch is not None and issubclass(type(value), torch.nn.Module | torch.optim.Optimizer):
        return True
    return figure is not None and issubclass(type(value), figure.FigureBase)


def _gradient_bytes(changes: Iterable[Change], made: Mapping[str, Any]) -> int:
    """Return the bytes of all gradients that the notebook would get."""
    known = sum(change.content.gradient_bytes for change in changes if type(change.content) is TensorChange)
    gradients = [parameter.grad for value in made.values() for parameter in parameters_of(value)]
    return int(known + sum(gradient.nbytes for gradient in gradients if gradient is not None))


def _only_gradients(changes: Iterable[Change]) -> set[str]:
    """Return names of tensors with a new gradient and unchanged values: the user is about to take a step."""
    contents = [(change.token, change.content) for change in changes if type(change.content) is TensorChange]
    return {
        ObjectPlace(*token).name for token, content in contents if content.values is None and content.gradient_bytes
    }


def _without_gradients(changes: Iterable[Change]) -> Iterator[Change]:
    for change in changes:
        if type(change.content) is not TensorChange:
            yield change
        elif change.content.values is not None:
            yield Change(change.token, replace(change.content, gradient=None))


def _huge(made: Mapping[str, Any]) -> dict[str, int]:
    """Return names whose values would fill the memory, with the bytes: the rank and the transfer need them too."""
    large = {name: nbytes for name, nbytes in sizes_of(made).items() if nbytes > _WORTH_MEASURING_BYTES}
    free = usable_memory().available_bytes if large else 0
    return {
        name: nbytes
        for name, nbytes in large.items()
        if nbytes > free * (_MOST_OF_MEMORY_FOR_A_MODEL if _is_heavy(made[name]) else _MOST_OF_MEMORY)
    }


def _is_loader(value: Any) -> bool:
    """Return whether `value` is a loader: it holds no result, since it is made of data that the notebook has."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.utils.data.DataLoader)
