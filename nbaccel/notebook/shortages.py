"""Finds what a cell's run will run short of, before anything starts. Runs in the kernel; changes nothing.

It examines the names that the cell reads and the cell's text: models that are on a device already, data loaders with
more workers than there are cores, memory that the notebook itself holds. What cannot work is refused with the line to
move; what may be slow or tight gets one line each. Objects that the cell makes itself cannot be known here.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import amount, listed, plural
from nbaccel.errors import LaunchRefused
from nbaccel.launching.earlier_models import EarlierModel, MadeAt, parsed, refuse_what_stays_here, where_made
from nbaccel.launching.kernel_holdings import KernelHolding, Unmoved
from nbaccel.launching.plan import LaunchPlan
from nbaccel.namespace.nbytes import size_of

__all__ = ["Loader", "loaders_in", "refuse_what_cannot_fit", "shortages"]

_MUCH_OF_A_DEVICE = 0.1
"""Share of a device's available memory from which on the notebook's own part is reported before a run."""

_MUCH_MORE = 1.1
"""Ratio of what the cell reads on devices to a model from which on the rest is said: an optimizer's states, data."""

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


def shortages(
    plan: LaunchPlan,
    code: str,
    names: Mapping[str, Any],
    survey: Survey,
    holdings: Sequence[KernelHolding],
    aside: Unmoved,
) -> Iterator[str]:
    """Yield a line for each thing that the run of a cell will run short of.

    Args:
        code: The cell, as plain Python.
        names: Values that it reads of the notebook.
        holdings: The notebook's memory on devices.
        aside: The part of it that can be moved.
    """
    if plan.start.method != "inline":
        yield from _devices_held(plan, holdings, aside)
    if plan.devices.device_type == "cpu" and plan.devices.num_processes > 1:
        yield from _models_on_the_host(plan.devices.num_processes, names, survey)
    yield from _workers(plan.devices.num_processes, loaders_in(code, names), survey)


def refuse_what_cannot_fit(
    plan: LaunchPlan, names: Mapping[str, Any], survey: Survey, history: Sequence[str], aside: Unmoved
) -> list[str]:
    """Return a line for each model of the notebook that is on a device and is copied to the ranks.

    Args:
        names: Values that the cell reads of the notebook.
        history: The notebook's cells, as typed; a cell's number is its index.
        aside: Objects that the notebook can move away from the devices.

    Raises:
        LaunchRefused: A model cannot be moved to the ranks' devices, or does not fit beside the notebook's own copy, or
            what has to be copied is more than the host's memory.
    """
    refuse_what_stays_here(plan.left_out, plan.devices.num_processes, history)
    if plan.start.method != "zygote":
        return []
    lines = [
        line
        for model in plan.models
        if (line := _carried(plan, model, where_made(model.own_name or model.name, history), aside))
    ]
    stay = {name: nbytes for name, nbytes in aside.names.items() if name not in names}
    _refuse_a_full_host(plan, names, survey, history, sum(stay.values()) if plan.options.free_kernel else 0)
    return lines


def _refuse_a_full_host(
    plan: LaunchPlan, names: Mapping[str, Any], survey: Survey, history: Sequence[str], moved_bytes: int
) -> None:
    """Refuse a copy that the host cannot hold: one of all memory, which ranks share, and of the rest one in each.

    Args:
        moved_bytes: Those that come to the host from the devices for other reasons. Models that the ranks get and that
            leave their device for the run are there once.
    """
    ranks, available = plan.devices.num_processes, survey.ram.available_bytes
    if not names or not 0 < available < plan.bytes_to_copy + ranks * plan.bytes_of_each + moved_bytes:
        return
    largest = max(names, key=lambda name: size_of(names[name]))
    in_each = f", {amount(plan.bytes_of_each)} of it in each of {plural(ranks, 'rank')} too" * (plan.bytes_of_each > 0)
    raise LaunchRefused(
        f"the names that the cell reads are {amount(plan.bytes_to_copy)}, which has to be copied for ranks that "
        f"start from a clean process{in_each}, and the host has {amount(available)} available. The largest is "
        f"{largest}: {_move(where_made(largest, history), largest)}."
    )


def loaders_in(code: str, names: Mapping[str, Any]) -> Iterator[Loader]:
    """Yield the loaders with worker processes that a cell reads, or makes with a number that its text shows.

    Example:
        >>> list(loaders_in("loader = DataLoader(data, 32, num_workers=4)", {}))
        [Loader(name='the DataLoader of line 1', workers=4, dataset=None)]
    """
    for name, value in names.items():
        if _is_of(value, "torch.utils.data", "DataLoader") and value.num_workers > 0:
            yield Loader(name, value.num_workers, value.dataset)
    for node in ast.walk(parsed(code) or ast.Module([], [])):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("DataLoader"):
            continue
        workers = next((_constant(word.value, names) for word in node.keywords if word.arg == "num_workers"), None)
        if isinstance(workers, int) and workers > 0:
            data = node.args[0] if node.args else None
            dataset = names.get(data.id) if isinstance(data, ast.Name) else None
            yield Loader(f"the DataLoader of line {node.lineno}", workers, dataset)


# --- lines ----------------------------------------------------------------------------------------------------------


def _devices_held(plan: LaunchPlan, holdings: Sequence[KernelHolding], aside: Unmoved) -> Iterator[str]:
    used = {f"cuda:{gpu.index}": (rank, gpu) for rank, gpu in plan.devices.each()}
    for holding in holdings:
        if holding.device not in used:
            continue
        rank, gpu = used[holding.device]
        if not gpu.total_bytes:  # the driver does not tell
            continue
        free = max(0, gpu.total_bytes - gpu.used_bytes)
        stays = holding.nbytes - aside.bytes_on(holding.device) * bool(plan.options.free_kernel)
        if stays <= _MUCH_OF_A_DEVICE * (holding.nbytes + free):
            continue
        held = [name for name, _ in holding.names]
        moves = [name for name in aside.names if name in held and not plan.options.free_kernel]
        rest = ", ".join(name for name in held if name.isidentifier() and name not in aside.names)
        ways = [
            f"--free-kernel moves {listed(moves)} to the host for the run" if moves else "",
            f"nbaccel.free_memory({rest}) in a cell before this one gives it back" if rest or not moves else "",
        ]
        yield (
            f"the notebook itself holds {holding}, and {amount(free)} are free there for rank {rank}: "
            f"{'; '.join(filter(None, ways))}"
        )


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


# --- models on devices ----------------------------------------------------------------------------------------------


def _carried(plan: LaunchPlan, model: EarlierModel, place: MadeAt | None, aside: Unmoved) -> str:
    """Return the line about a model that is copied to the devices of all ranks; empty if it is said elsewhere.

    Raises:
        LaunchRefused: It does not fit there beside what the notebook holds.
    """
    name, nbytes = model.own_name or model.name, model.nbytes
    if not nbytes:
        return ""
    total = max(nbytes, plan.bytes_on_device)
    beside = f" and what lies there beside it ({amount(total)})" * (total > _MUCH_MORE * nbytes)
    for rank, gpu in plan.devices.each():
        if not gpu.total_bytes:  # the driver does not tell
            continue
        movable = aside.bytes_on(f"cuda:{gpu.index}")
        free = gpu.total_bytes - gpu.used_bytes
        if total > free + movable * bool(plan.options.free_kernel):
            flag = "" if plan.options.free_kernel or total > free + movable else "add --free-kernel, or "
            raise LaunchRefused(
                f"{name} ({amount(nbytes)}, on {model.where}){beside} would be copied to every rank, and rank {rank}'s "
                f"device, GPU {gpu.index} {gpu.name}, has {amount(free)} of {amount(gpu.total_bytes)} left beside what "
                f"the notebook holds: {flag}{_move(place, name)}, or call {name}.cpu() before it."
            )
    if plan.options.free_kernel and name in aside.names:
        return ""  # the notebook's own model is reported when it moves
    return (
        f"{name} lies on {model.where} ({amount(nbytes)}): each rank gets a copy on its own device, and the notebook's "
        f"stays; to save that, {_move(place, name)}"
    )


def _move(place: MadeAt | None, name: str) -> str:
    return f"move {place} into this cell" if place is not None else f"make {name} in this cell"


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
