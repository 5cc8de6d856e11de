"""Finds what a cell's run will run short of on devices, before anything starts. Runs in the kernel; changes nothing.

Models of the notebook that are on a device already, and memory that the notebook itself holds. What cannot work is
refused with the line to move; what may be tight gets one line each. It is loaded for a run on GPUs, for ranks to which
models are copied, and where a model cannot leave the notebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import amount, listed, plural
from nbaccel.errors import LaunchRefused
from nbaccel.launching.earlier_models import EarlierModel
from nbaccel.launching.kernel_holdings import KernelHolding, Unmoved
from nbaccel.launching.made_in_cells import MadeAt, refuse_what_stays_here, where_made
from nbaccel.launching.plan import LaunchPlan
from nbaccel.namespace.nbytes import size_of

__all__ = ["devices_held", "refuse_what_cannot_fit"]

_MUCH_OF_A_DEVICE = 0.1
"""Share of a device's available memory from which on the notebook's own part is reported before a run."""

_MUCH_MORE = 1.1
"""Ratio of what the cell reads on devices to a model from which on the rest is said: an optimizer's states, data."""


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


def devices_held(plan: LaunchPlan, holdings: Sequence[KernelHolding], aside: Unmoved) -> Iterator[str]:
    """Yield a line for each device of a run of which the notebook holds much.

    Args:
        holdings: The notebook's memory on devices.
        aside: The part of it that can be moved.
    """
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
