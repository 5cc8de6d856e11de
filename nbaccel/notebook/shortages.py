"""Finds what a cell's run will run short of on the host, before anything starts. Runs in the kernel; changes nothing.

It examines the names that the cell reads and the cell's text: models of which each rank comes to hold a copy, data
loaders with more workers than there are cores. What may be slow or tight gets one line each. Objects that the cell
makes itself cannot be known here. What concerns devices is in `device_shortages`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import amount
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_code import tree_as_typed
from nbaccel.namespace.nbytes import size_of

__all__ = ["Loader", "loaders_in", "shortages"]

_WORTH_A_WORD_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader that the cell uses.

    Args:
        name: Its name in the cell, or the line that makes it.
        workers: Its `num_workers`.
        dataset: The data that it reads; None if the text does not show it.
    """

    name: str
    workers: int
    dataset: Any = None


def shortages(plan: LaunchPlan, code: str, names: Mapping[str, Any], survey: Survey) -> Iterator[str]:
    """Yield a line for each thing that the run of a cell will run short of.

    Args:
        code: The cell, as plain Python.
        names: Values that it reads of the notebook.
    """
    if plan.devices.device_type == "cpu" and plan.devices.num_processes > 1:
        yield from _models_on_the_host(plan.devices.num_processes, names, survey)
    yield from _workers(plan.devices.num_processes, loaders_in(code, names), survey)


def loaders_in(code: str, names: Mapping[str, Any]) -> Iterator[Loader]:
    """Yield the loaders with worker processes that a cell reads, or makes with a number that its text shows.

    Example:
        >>> list(loaders_in("loader = DataLoader(data, 32, num_workers=4)", {}))
        [Loader(name='the DataLoader of line 1', workers=4, dataset=None)]
    """
    for name, value in names.items():
        if _is_of(value, "torch.utils.data", "DataLoader") and value.num_workers > 0:
            yield Loader(name, value.num_workers, value.dataset)
    for node in ast.walk(tree_as_typed(code) or ast.Module([], [])):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("DataLoader"):
            continue
        workers = next((_constant(word.value, names) for word in node.keywords if word.arg == "num_workers"), None)
        if isinstance(workers, int) and workers > 0:
            data = node.args[0] if node.args else None
            dataset = names.get(data.id) if isinstance(data, ast.Name) else None
            yield Loader(f"the DataLoader of line {node.lineno}", workers, dataset)


# --- lines ----------------------------------------------------------------------------------------------------------


def _models_on_the_host(ranks: int, names: Mapping[str, Any], survey: Survey) -> Iterator[str]:
    sizes = Counter({name: _bytes_of_weights(model) for name, model in names.items() if _is_module(model)})
    available = survey.ram.available_bytes
    if available and sum(sizes.values()) * ranks > available:
        listed = ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in sizes.most_common(3))
        yield (
            f"{listed}: each of {ranks} ranks that trains on the CPU comes to hold a copy, and gradients beside it, "
            f"while {amount(available)} of host memory are available: fewer ranks (-n), or a smaller model"
        )


def _workers(ranks: int, loaders: Iterator[Loader], survey: Survey) -> Iterator[str]:
    """Yield one line for the loader with the most workers, if they are too many."""
    most = max(loaders, key=lambda loader: loader.workers, default=None)
    if most is None:
        return
    processes = most.workers * ranks
    nbytes = 0 if most.dataset is None else size_of(most.dataset)
    available = survey.ram.available_bytes
    is_too_large = 0 < available < nbytes * processes
    if processes <= survey.cpu_count and not is_too_large:
        return
    cores = f"{survey.cpu_count} core{'' if survey.cpu_count == 1 else 's'}"
    parts = [f"{most.name} has {most.workers} workers in each of {ranks} ranks, {processes} processes on {cores}"]
    if nbytes >= _WORTH_A_WORD_BYTES:
        parts.append(
            f"each may come to hold a copy of its data set ({amount(nbytes)} x {processes} = "
            f"{amount(nbytes * processes)}, {amount(available)} available)"
        )
    fitting = max(1, survey.cpu_count // ranks)
    if is_too_large:
        fitting = min(fitting, max(1, available // (nbytes * ranks)))
    yield f"{'; '.join(parts)}: num_workers={fitting} is what this machine has room for"


def _bytes_of_weights(model: Any) -> int:
    """Return the bytes of the parameters and buffers of a module; reads no attribute that its class may define."""
    module = sys.modules["torch.nn"].Module
    weights = {id(weight): weight for weight in (*module.parameters(model), *module.buffers(model))}
    return sum(weight.nbytes for weight in weights.values())


# --- reading --------------------------------------------------------------------------------------------------------


def _is_of(value: Any, module: str, kind: str) -> bool:
    """Return whether the true type of `value` is `module.kind`, if that is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(type(value), getattr(loaded, kind))


def _is_module(value: Any) -> bool:
    return _is_of(value, "torch.nn", "Module")


def _constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    return node.value if isinstance(node, ast.Constant) else None
