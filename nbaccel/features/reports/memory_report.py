"""Memory: the answers of `%accelerate memory` and `%accelerate estimate`. Runs in the kernel; changes nothing.

The first is a table of processes by host and device memory, and the notebook's own names with the memory they keep
alive: tensors, NumPy arrays, frames of pandas and polars. It imports none of their libraries and makes no CUDA context:
what is not loaded holds nothing. The second says what a
training of the notebook's model would take, and computes nothing; `nbaccel.features.batch_size.estimate` counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from nbaccel.base.events import Memory
from nbaccel.base.gpu_holders import is_holder
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.base.quantities import amount
from nbaccel.namespace.nbytes import sizes_of
from nbaccel.notebook.rank_memory import RankMemory

__all__ = [
    "Held",
    "Processes",
    "held_by_names",
    "memory_report",
    "report_of_memory",
]

_MOST_NAMES = 12
_ARRAYS = (
    ("numpy", "ndarray"),
    *(("pandas", name) for name in ("DataFrame", "Series", "Index")),
    *(("polars", name) for name in ("DataFrame", "Series")),
)
"""Types of host memory that a name holds, beside tensors."""


class Held(NamedTuple):
    """Bytes that a name of the notebook keeps alive on a device."""

    name: str
    bytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Processes:
    """Bytes that the kernel and the processes started by it hold.

    Args:
        kernel_bytes, started_bytes: Resident memory.
        started: Number of processes, without those in `helpers`.
        devices: Bytes of the kernel's tensors by device, without those of the host.
        helpers: Resident memory of the project's own processes, by their purpose.
    """

    pid: int
    kernel_bytes: int
    started_bytes: int = 0
    started: int = 0
    devices: dict[str, int] = field(default_factory=dict)
    helpers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls, helpers: Mapping[int, str] = MappingProxyType({})) -> Processes:
        """Measure these processes.

        Args:
            helpers: Purposes of the project's processes, by process id.
        """
        import psutil

        kernel = psutil.Process()
        sizes = {child.pid: _resident_bytes(child) for child in kernel.children(recursive=True)}
        there = {pid: size for pid, size in sizes.items() if size is not None}
        ours = {what: there.pop(pid) for pid, what in helpers.items() if pid in there}
        return cls(kernel.pid, kernel.memory_info().rss, sum(there.values()), len(there), _bytes_on_devices(), ours)


def report_of_memory(
    survey: Survey, helpers: Mapping[int, str], ranks: RankMemory, names: Mapping[str, Any], *, are_gone: bool
) -> str:
    """Measure the processes and the notebook's names, and return the report.

    Args:
        helpers: Purposes of the project's processes, by process id.
        names: The notebook's variables.
        are_gone: The run of `ranks` is over, and no process of it is left.
    """
    return memory_report(survey, Processes.now(helpers), ranks, held_by_names(names), are_gone=are_gone)


def memory_report(
    survey: Survey, processes: Processes, ranks: RankMemory, held: Sequence[Held], *, are_gone: bool = False
) -> str:
    """Return the table, the machine's memory, and the names in `held`.

    Args:
        are_gone: The run of `ranks` is over, and no process of it is left.
    """
    rows = [("", "host", "device"), *_rows(processes, ranks, are_gone)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"{name:<{widths[0]}}  {host:<{widths[1]}}  {device}".rstrip() for name, host, device in rows]
    return "\n".join([*table, *_machine(survey, processes.pid), *_names(held)])


def held_by_names(names: Mapping[str, Any]) -> list[Held]:
    """Return what the notebook's names and outputs keep alive, the largest first.

    Args:
        names: The notebook's variables, of which arrays and frames are looked for; those inside of other values, and
            memory that an array shares with a tensor, are not told apart.

    Example:
        >>> import numpy
        >>> array = numpy.zeros(1000)
        >>> [held for held in held_by_names({"array": array, "view": array[1:]}) if held.name in ("array", "view")]
        [Held(name='array', bytes=8000, device='cpu')]
    """
    held = _arrays(names)
    if "torch" in sys.modules:
        from nbaccel.train.oom.memory.holdings import named_holdings

        held += [Held(*holding) for holding in named_holdings()]
    return sorted(held, key=lambda one: -one.bytes)


def _arrays(names: Mapping[str, Any]) -> list[Held]:
    """Return the arrays and frames that are values of names; memory of views counts once, under the first name."""
    loaded = [(sys.modules.get(module), name) for module, name in _ARRAYS]
    kinds = tuple(kind for module, name in loaded if isinstance(kind := getattr(module, name, None), type))
    roots: dict[int, tuple[str, Any]] = {}
    for name, value in names.items():
        if not name.startswith("_") and issubclass(type(value), kinds):
            root = value
            while issubclass(type(root), kinds[:1]) and issubclass(
                type(base := getattr(root, "base", None)), kinds[:1]
            ):
                root = base
            roots.setdefault(id(root), (name, root))
    return [Held(name, size) for name, size in sizes_of(dict(roots.values())).items()]


def _rows(processes: Processes, ranks: RankMemory, are_gone: bool) -> Iterator[tuple[str, str, str]]:
    on_devices = ", ".join(f"{device} {amount(count)}" for device, count in processes.devices.items())
    yield "kernel", amount(processes.kernel_bytes), on_devices or "none used"
    if processes.started:
        plural = "es" if processes.started > 1 else ""
        yield f"{processes.started} process{plural} it started", amount(processes.started_bytes), ""
    for what, size in processes.helpers.items():
        yield what, amount(size), ""
    for rank, memory in sorted(ranks.latest.items()):
        host = f"{amount(memory.host_bytes)}, at most {amount(memory.host_peak_bytes)}"
        yield f"{'gone: ' * are_gone}rank {rank} of {ranks.cell}", host, _on_device(memory)


def _on_device(memory: Memory) -> str:
    if memory.device_bytes is None:
        return "none used"
    most = memory.device_peak_bytes or memory.device_bytes
    limit = f" of {amount(memory.device_limit_bytes)}" if memory.device_limit_bytes else ""
    return f"{amount(memory.device_bytes)} in tensors, at most {amount(most)}{limit} reserved"


def _machine(survey: Survey, pid: int) -> Iterator[str]:
    yield f"machine: {amount(survey.ram.available_bytes)} of {amount(survey.ram.total_bytes)} host memory available"
    for gpu in survey.gpus:
        used = f"{amount(gpu.used_bytes)} of {amount(gpu.total_bytes)} in use"
        yield f"cuda:{gpu.index} {gpu.name}: {used}{_own(gpu, pid)}"


def _own(gpu: Gpu, pid: int) -> str:
    """Return this kernel's part as the driver counts it: with the CUDA context, which no allocator includes."""
    own = [count for holder, count in gpu.processes if holder == pid and count and is_holder(pid)]
    return f", {amount(sum(own))} of it by this kernel" if own else ""


def _names(held: Sequence[Held]) -> Iterator[str]:
    if not held:
        yield "no name of the notebook holds a tensor or an array"
        return
    yield "held by names of the notebook:"
    width = max(len(holding.name) for holding in held[:_MOST_NAMES])
    for holding in held[:_MOST_NAMES]:
        yield f"  {holding.name:<{width}}  {amount(holding.bytes):>9}  {holding.device}"
    rest = held[_MOST_NAMES:]
    if rest:
        yield f"  and {len(rest)} more, {amount(sum(holding.bytes for holding in rest))}"
    if any(_is_output(holding.name) for holding in held):
        yield "outputs go with nbaccel.free_memory(history=True), names with del"


def _is_output(name: str) -> bool:
    """Return whether a name is one of IPython's outputs.

    Example:
        >>> [_is_output(name) for name in ("Out[7]", "_7", "_", "_mine")]
        [True, True, True, False]
    """
    return name.startswith("Out[") or not name.strip("_0123456789")


def _resident_bytes(process: Any) -> int | None:
    import psutil

    try:
        size: int = process.memory_info().rss
        return size
    except psutil.Error:  # it has ended meanwhile
        return None


def _bytes_on_devices() -> dict[str, int]:
    if "torch" not in sys.modules:
        return {}
    from nbaccel.train.oom.memory.free_memory import HOST, bytes_in_use

    return {device: count for device, count in bytes_in_use().items() if device != HOST}
