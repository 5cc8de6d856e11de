"""LeftByCell: brings the changes that a cell left in the result rank into the notebook. Runs in the kernel.

Everything has arrived and is prepared before the first object is changed; then all is written at once, and an interrupt
waits for that. Then a line says which names the notebook has now, and which not.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from nbaccel.base.quantised import TrainedTensors
from nbaccel.base.quantities import amount, listed, short_count
from nbaccel.base.values import attributes_of
from nbaccel.launching.ipc.kernel_state import set_random_states
from nbaccel.launching.processes.interaction import uninterrupted
from nbaccel.launching.processes.rank_results import Returned
from nbaccel.launching.tasks.cell_task import RANDOM, CellTask
from nbaccel.namespace.inventory import ObjectPlace, found_at, writes_of

__all__ = ["LeftByCell"]

_MOST_REASONS = 3
_OF_NO_NEWS = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, logging.Logger)
_DIFFERS = "as before: the ranks differ"
_CANNOT = " cannot be sent to another process"
_KNOWS, _HINT = " that knows its rank", ": make it anew, or use it in the cell that makes it"


class LeftByCell:
    """The results that came back from one cell.

    Args:
        facts: The facts of the result rank.
        missing: Names that could not come, with the reason.
        told: Names of which an earlier cell said that they were not compared; new ones are added.
        from_gpus: The ranks computed on GPUs; new objects come to the CPU, and others stay where they are.
    """

    def __init__(
        self,
        returned: Returned,
        facts: Mapping[str, Any],
        missing: Mapping[str, str],
        task: CellTask,
        told: set[str],
        *,
        from_gpus: bool,
    ) -> None:
        self._returned = returned
        self._facts = facts
        self._task = task
        self._namespace = task.namespace
        self._leftovers = task.leftovers()
        left = {*returned.values, *facts.get("changed", ()), *facts.get("deleted", ()), *told}
        unlooked = {name: why for name, why in facts.get("unlooked", {}).items() if name not in left}
        told |= unlooked.keys()
        self._not_come = {
            **{name: why for name, why in missing.items() if name not in self._leftovers},
            **facts.get("stayed", {}),
            **unlooked,
            **{facts["changed"][number]: why for number, why in returned.lost.items()},
        }
        self._from_gpus = from_gpus
        self._trained: dict[str, Any] = {}  # models, by their place
        self._others: dict[str, Any] = {}  # other names in the notebook now, and new models

    def enter(self, *, only_new: bool = False) -> None:
        """Bring everything into the notebook.

        Args:
            only_new: Leave everything that the notebook has already as it is: ranks differ on it.

        Raises:
            KeyboardInterrupt: Raised once everything is there.
        """
        namespace, values = self._namespace, self._returned.values
        places = {key: ObjectPlace(*change.token) for key, change in self._returned.changes.items()}
        gone = {place.name for place in places.values() if not self._task.has_still(place.name)}
        self._not_come |= dict.fromkeys(gone, "another object by now")
        changes = {key: change for key, change in self._returned.changes.items() if places[key].name not in gone}
        random_states = values.pop(RANDOM, None)
        bound = {name: value for name, value in values.items() if not (only_new and name in namespace)}
        writes, refused = writes_of(changes, self._task.placed)
        self._not_come |= {str(places[key]): why for key, why in refused.items() if why}
        self._note({key: places[key] for key in changes if key not in refused})
        with uninterrupted():
            for write in [] if only_new else writes:
                try:
                    write()
                except Exception as error:  # for example no memory on a device
                    self._not_come.setdefault("a part", str(error))
            namespace.update(bound)
            if random_states is not None and not only_new:
                set_random_states(random_states)
            for name in [] if only_new else self._facts.get("deleted", ()):
                namespace.pop(name, None)
        if only_new:
            named = [*self._trained, *self._others, *(name for name in values if name not in bound)]
            stay = {name: _DIFFERS for name in named if not name.startswith("_")}
            parts = tuple(f"{name}{step}" for name in stay for step in ".[")  # parts of these names stay too
            besides = {name: why for name, why in self._not_come.items() if not name.startswith(parts)}
            self._not_come = {**stay, **{name: why for name, why in besides.items() if name not in stay}}
            self._trained, self._others = {}, {}
        trained = set(map(id, self._trained.values()))  # another name for one of them is not listed
        others = {name: value for name, value in bound.items() if id(value) not in trained}
        self._others |= {name: value for name, value in others.items() if self._is_worth_a_word(name, value)}

    def line(self, whence: str = "") -> str:
        """Return the line on the names that the notebook has now, and those it lacks; "" if there are none.

        Args:
            whence: " from the failed run".
        """
        others = {name: value for name, value in self._others.items() if name not in self._not_come}
        trained = {place: model for place, model in self._trained.items() if not _is_module(others.get(place))}
        came = [f"{place} trained in place ({self._size(model)})" for place, model in trained.items()]
        came += [f"{name} ({self._size(value)})" for name, value in others.items() if _is_module(value)]
        came += [_describe_value(name, value) for name, value in others.items() if not _is_module(value)]
        by_reason: dict[str, list[str]] = {}
        for name, why in self._not_come.items():
            why = f"{why}{_HINT}" if why.endswith(_KNOWS) else why
            by_reason.setdefault(why.removesuffix(_CANNOT).removeprefix(f"{name} is "), []).append(name)
        not_come = [f"{listed(names)} ({why})" for why, names in by_reason.items()]
        not_come += [f"{name}, {amount(size)}: add --out {name}" for name, size in self._facts.get("huge", {}).items()]
        without = [
            f"{name} came without {listed(list(dict.fromkeys(parts)), _MOST_REASONS)}"
            for name, parts in self._facts.get("lacks", {}).items()
            if name in self._others
        ]
        said = [f"brought back{whence}: {listed(came)}"] if came else []
        said += [f"not brought back: {listed(not_come, _MOST_REASONS)}"] if not_come else []
        return "; ".join([*said, *without[:_MOST_REASONS]])

    def _note(self, places: Mapping[str, ObjectPlace]) -> None:
        """Record to which names changes belong: models by themselves, and all others by the name that leads there."""
        namespace, changes = self._namespace, self._returned.changes
        objects = {key: self._task.placed(changes[key].token) for key in places}
        stepped = {key for key in places if _has_stepped(objects[key], changes[key].content)}
        parameters = {id(objects[key]) for key in stepped}
        for name, model in self._models([places[key] for key in stepped]):
            own = set(map(id, _parameters(model)))
            if own & parameters:
                self._trained[name] = model
                parameters -= own
        for key, place in places.items():
            is_in_words = key in stepped and id(objects[key]) not in parameters
            if is_in_words or set(changes[key].entries()) == {"training"} or place.name in self._trained:
                continue
            if self._is_worth_a_word(place.name, namespace[place.name]):
                self._others.setdefault(place.name, None)

    def _models(self, places: Collection[ObjectPlace]) -> list[tuple[str, Any]]:
        """Return the models: those of names, then of attributes, then those on the paths; of nested ones the outer.

        Args:
            places: Of parameters.
        """
        named = [
            (name, each) for name, each in self._namespace.items() if _is_module(each) and not name.startswith("_")
        ]
        holders = {place.name: self._namespace[place.name] for place in places}
        inner = [
            (f"{name}.{attribute}", value)
            for name, holder in sorted(holders.items())
            for attribute, value in (attributes_of(holder) or {}).items()
            if not _is_module(holder) and _is_module(value)
        ]
        ways = {ObjectPlace(place.name, place.steps[:end]) for place in places for end in range(2, len(place.steps))}
        deeper = [(str(place), found_at(place, self._namespace)) for place in ways]
        deeper = [(place, value) for place, value in deeper if _is_module(value)]
        pairs = (
            sorted(each, key=lambda pair: (-len(_parameters(pair[1])), pair[0])) for each in (named, inner, deeper)
        )
        return list(chain.from_iterable(pairs))

    def _size(self, model: Any) -> str:
        parameters = _parameters(model)
        is_moved = self._from_gpus and parameters and all(each.device.type == "cpu" for each in parameters)
        return f"{_size(model)}, on the CPU" if is_moved else _size(model)

    def _is_worth_a_word(self, name: str, value: Any) -> bool:
        return not (
            name.startswith("_")
            or name in self._leftovers
            or name == "accelerator"
            or issubclass(type(value), _OF_NO_NEWS)
            or _is_loader(value)
        )


def _describe_value(name: str, value: Any) -> str:
    if type(value) is TrainedTensors:
        return f"{name} (what was trained, {amount(value.nbytes)}; the quantised base stays in the ranks)"
    return name


def _parameters(module: Any) -> list[Any]:
    return list(sys.modules["torch"].nn.Module.parameters(module))


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Module)


def _has_stepped(value: Any, content: Any) -> bool:
    """Return whether it is a parameter whose values have changed, and not only its gradient."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Parameter) and content.values is not None


def _is_lazy(parameter: Any) -> bool:
    return issubclass(type(parameter), sys.modules["torch"].nn.parameter.UninitializedTensorMixin)


def _is_loader(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.utils.data.DataLoader | torch.utils.data.Sampler)


def _size(module: Any) -> str:
    """Return the number of parameters in words.

    Example:
        >>> _size(__import__("torch").nn.Linear(1000, 1200))
        '1.2 M parameters'
    """
    count = sum(parameter.numel() for parameter in _parameters(module) if not _is_lazy(parameter))
    return f"{short_count(count)} parameter{'s' * (count != 1)}"
