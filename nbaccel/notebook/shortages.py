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

from nbaccel.errors import LaunchRefused
from nbaccel.hardware import Survey
from nbaccel.launch.ipc.nbytes import size_of, sizes_on_devices
from nbaccel.launch.kernel_models import QUANTISED, KernelHolding, SetAside
from nbaccel.launch.plan import LaunchPlan, amount
from nbaccel.quantities import listed

__all__ = ["Loader", "MadeAt", "loaders_in", "refuse_what_cannot_fit", "shortages", "where_made"]

_MUCH_OF_A_DEVICE = 0.1
"""Share of a device's available memory from which on the notebook's own part is reported before a run."""

_WORTH_A_WORD_BYTES = 1_000_000

_PYTHON_HERE = ("%%time", "%%capture", "%%prun")
"""Cell magics whose cells bind names of the notebook."""


@dataclass(frozen=True, slots=True)
class MadeAt:
    """The place where the notebook made a name: the cell's number, the line in it (from 1) and its text."""

    cell: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line} of Cell In[{self.cell}], `{self.text}`"


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader that the cell uses.

    name: its name in the cell, or the line that makes it.  workers: its `num_workers`.
    dataset: the data that it reads; None if the text does not show it.
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
    aside: SetAside,
) -> Iterator[str]:
    """Yield a line for each thing that the run of a cell will run short of.

    code: the cell, as plain Python.  names: values that it reads of the notebook.  holdings: the notebook's memory on
    devices.  aside: the part of it that can be moved.
    """
    if plan.start.method != "inline":
        yield from _devices_held(plan, holdings, aside)
    if plan.devices.device_type == "cpu" and plan.devices.num_processes > 1:
        yield from _models_on_the_host(plan.devices.num_processes, names, survey)
    yield from _workers(plan.devices.num_processes, loaders_in(code, names), survey)


def refuse_what_cannot_fit(
    plan: LaunchPlan, names: Mapping[str, Any], survey: Survey, history: Sequence[str], aside: SetAside
) -> list[str]:
    """Return a line for each model of the notebook that is on a device and is copied to the ranks.

    names: values that the cell reads of the notebook.  history: the notebook's cells, as typed; a cell's number is its
    index.
    aside: objects that the notebook can move away from the devices.

    Raises:
        LaunchRefused: a model cannot be moved to the ranks' devices, or does not fit beside the notebook's own copy,
        or what has to be copied is more than the host's memory.
    """
    if plan.start.method != "zygote":
        return []
    lines = [
        line
        for name, model in names.items()
        if _is_module(model) and (on_device := _bytes_by_device(name, model))
        if (line := _carried(plan, name, model, on_device, where_made(name, history), aside))
    ]
    available = survey.ram.available_bytes
    if 0 < available < plan.bytes_to_copy:
        largest = max(names, key=lambda name: size_of(names[name]))
        place = where_made(largest, history)
        raise LaunchRefused(
            f"the names that the cell reads are {amount(plan.bytes_to_copy)}, which has to be copied for ranks that "
            f"start from a clean process, and the host has {amount(available)} available. The largest is {largest}: "
            f"{_move(place, largest)}."
        )
    return lines


def where_made(name: str, history: Sequence[str]) -> MadeAt | None:
    """Return the last assignment to `name` in the notebook's cells; None if the text shows none.

    >>> where_made("model", ["", "import torch", "x = 1\\nmodel = torch.nn.Linear(2, 1).cuda()"])
    MadeAt(cell=2, line=2, text='model = torch.nn.Linear(2, 1).cuda()')
    """
    for number in range(len(history) - 1, 0, -1):
        tree = _parsed(history[number])
        if tree is None:
            continue
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assign) and _binds(node, name)]
        if lines:
            return MadeAt(number, lines[-1], history[number].splitlines()[lines[-1] - 1].strip())
    return None


def loaders_in(code: str, names: Mapping[str, Any]) -> Iterator[Loader]:
    """Yield the loaders with worker processes that a cell reads, or makes with a number that its text shows.

    >>> list(loaders_in("loader = DataLoader(data, 32, num_workers=4)", {}))
    [Loader(name='the DataLoader of line 1', workers=4, dataset=None)]
    """
    for name, value in names.items():
        if _is_of(value, "torch.utils.data", "DataLoader") and value.num_workers > 0:
            yield Loader(name, value.num_workers, value.dataset)
    for node in ast.walk(_parsed(code) or ast.Module([], [])):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("DataLoader"):
            continue
        workers = next((_constant(word.value, names) for word in node.keywords if word.arg == "num_workers"), None)
        if isinstance(workers, int) and workers > 0:
            data = node.args[0] if node.args else None
            dataset = names.get(data.id) if isinstance(data, ast.Name) else None
            yield Loader(f"the DataLoader of line {node.lineno}", workers, dataset)


# --- lines ----------------------------------------------------------------------------------------------------------


def _devices_held(plan: LaunchPlan, holdings: Sequence[KernelHolding], aside: SetAside) -> Iterator[str]:
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


def _carried(
    plan: LaunchPlan, name: str, model: Any, on_device: Mapping[str, int], place: MadeAt | None, aside: SetAside
) -> str:
    nbytes, where = sum(on_device.values()), " and ".join(on_device)
    ranks = plan.devices.num_processes
    if any(vars(model).get(mark) is True for mark in QUANTISED):
        raise LaunchRefused(
            f"{name} was loaded quantised and lies on {where} ({amount(nbytes)}): its weights cannot be sent to ranks. "
            f"Each rank has to load it onto its own device: {_move(place, name)}, with "
            "device_map={'': accelerator.process_index}."
        )
    if len(on_device) > 1:
        raise LaunchRefused(
            f"{name} is spread over {where}, and each of {ranks} ranks needs it whole on one device: "
            f"{_move(place, name)}, without device_map."
        )
    for rank, gpu in plan.devices.each():
        if not gpu.total_bytes:  # the driver does not tell
            continue
        movable = aside.bytes_on(f"cuda:{gpu.index}")
        free = gpu.total_bytes - gpu.used_bytes
        if nbytes > free + movable * bool(plan.options.free_kernel):
            flag = "" if plan.options.free_kernel or nbytes > free + movable else "add --free-kernel, or "
            raise LaunchRefused(
                f"{name} ({amount(nbytes)}, on {where}) would be copied to every rank, and rank {rank}'s device, "
                f"GPU {gpu.index} {gpu.name}, has {amount(free)} of {amount(gpu.total_bytes)} left beside what the "
                f"notebook holds: {flag}{_move(place, name)}, or call {name}.cpu() before it."
            )
    if plan.options.free_kernel and name in aside.names:
        return ""  # the notebook's own model is reported when it moves
    return (
        f"{name} lies on {where} ({amount(nbytes)}): each rank gets a copy on its own device, and the notebook's "
        f"stays; to save that, {_move(place, name)}"
    )


def _move(place: MadeAt | None, name: str) -> str:
    return f"move {place} into this cell" if place is not None else f"make {name} in this cell"


def _bytes_of_weights(model: Any) -> int:
    """Return the bytes of the parameters and buffers of a module; reads no attribute that its class may define."""
    module = sys.modules["torch.nn"].Module
    weights = {id(weight): weight for weight in (*module.parameters(model), *module.buffers(model))}
    return sum(weight.nbytes for weight in weights.values())


def _bytes_by_device(name: str, model: Any) -> dict[str, int]:
    return {device: sizes[name] for device, sizes in sizes_on_devices({name: model}).items() if device != "meta"}


# --- reading --------------------------------------------------------------------------------------------------------


def _is_of(value: Any, module: str, kind: str) -> bool:
    """Return whether the true type of `value` is `module.kind`, if that is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(type(value), getattr(loaded, kind))


def _is_module(value: Any) -> bool:
    return _is_of(value, "torch.nn", "Module")


def _parsed(text: str) -> ast.Module | None:
    if text.lstrip().startswith("%%") and not text.lstrip().startswith(_PYTHON_HERE):
        return None
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):  # shell commands inside of blocks, or a mistake
        return None


def _binds(node: ast.Assign, name: str) -> bool:
    leaves = [leaf for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
    return any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in leaves)  # not `name.attribute = ...`


def _constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    return node.value if isinstance(node, ast.Constant) else None
