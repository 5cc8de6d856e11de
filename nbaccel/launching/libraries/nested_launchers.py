"""Refuse other libraries' launchers in a rank: each rank would start its own ranks. Runs in ranks and their children.

A launcher is recognised by its actions. One that is built on torch elastic (Accelerate's `notebook_launcher`,
torchrun's `main`) runs an elastic agent in the rank. One that starts processes itself (`torch.multiprocessing.spawn`,
Accelerate's `debug_launcher`) makes them form a process group, by the rank's own addresses and ports. Processes that
form no group are allowed: workers of loaders, pools, the preparation of data.

A process that `multiprocessing` itself spawns, and a program that is started as a command, are not detected.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from nbaccel.base.world import World
from nbaccel.errors import NestedLaunch
from nbaccel.launching.ipc.import_hooks import Assignment, Change, Prepare, Replacement

__all__ = [
    "launchers_refused",
    "refuse_groups_in_children",
]

_AGENTS = "torch.distributed.elastic.agent.server.api"
_SPAWN = "torch.multiprocessing.spawn"  # also the name of a function there, so the module is asked for by its full name


def launchers_refused(world: World) -> list[tuple[str, Prepare]]:
    """Return what makes elastic agents in this process, and groups of processes that it starts, raise `NestedLaunch`.

    `refuse_groups_in_children` is about those that it forks.
    """
    return [(_AGENTS, partial(_refuse_agents, world)), (_SPAWN, partial(_refuse_groups_below, world))]


def refuse_groups_in_children(world: World) -> None:
    """Make process groups in children that this process forks raise `NestedLaunch`. Once per process."""
    os.register_at_fork(after_in_child=partial(_refuse_groups, world))


def _refuse_agents(world: World, module: Any) -> list[Change]:
    def run(agent: Any, *args: Any, **kwargs: Any) -> NoReturn:
        spec = agent.get_worker_group().spec
        name = getattr(spec.entrypoint, "__name__", None)
        raise NestedLaunch(
            f"{_here(world)}: a launcher on torch elastic (Accelerate's notebook_launcher, torchrun) was to start "
            f"{spec.local_world_size} more in each. {_instead(name)}"
        )

    return [Assignment(module.SimpleElasticAgent, "run", run)]


def _refuse_groups_below(world: World, module: Any) -> list[Change]:
    """Refuse groups in the processes that `torch.multiprocessing` starts, which may be new interpreters."""
    return [Replacement([module], "_wrap", partial(_Spawned, world))]


def _refuse_groups(world: World) -> None:
    """Refuse groups in a process that a rank started, before any code of the user's.

    Programs import `init_process_group` by name, so the function itself is changed: the one that torch's decorator
    calls.
    """
    import torch.distributed as dist

    given: list[Any] = []

    def init_process_group(*args: Any, **kwargs: Any) -> NoReturn:
        # A FileStore among them would remove its file when freed, and debug_launcher would fail with another error.
        given.append((args, kwargs))
        raise NestedLaunch(
            f"{_here(world)}: a process that this rank started (by torch.multiprocessing.spawn, say, or Accelerate's "
            f"debug_launcher) called init_process_group. {_instead(None)} Processes that form no group may be started "
            "here."
        )

    function: Any = dist.init_process_group
    for cell in function.__closure__ or ():
        if cell.cell_contents is function.__wrapped__:
            cell.cell_contents = init_process_group


def _here(world: World) -> str:
    return f"this is {world.place} of a run already, and ranks do not launch ranks"


def _instead(name: str | None) -> str:
    """Return the line to change.

    Args:
        name: The name of the function that was to run in every process.
    """
    call = f"{name}(...)" if name else "the function"
    return (
        f"The processes are there already: call {call} directly. Or call the launcher in a cell without %%accelerate, "
        "or in the main program."
    )


class _Spawned:
    """Function that runs in a process that `torch.multiprocessing` starts, which may be a new interpreter."""

    def __init__(self, world: World, torchs: Callable[..., None]) -> None:
        self._world = world
        self._torchs = torchs

    def __call__(self, *args: Any) -> None:
        _refuse_groups(self._world)
        self._torchs(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _spawned, (self._world,)


def _spawned(world: World) -> _Spawned:
    """Rebuild the function in the new interpreter, in which torch's own function is unchanged."""
    return _Spawned(world, importlib.import_module(_SPAWN)._wrap)
