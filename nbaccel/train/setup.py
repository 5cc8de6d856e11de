"""Setup: the steps that a launcher runs in every rank before the user's code. It names `setup_rank` by a string.

This module is imported before ranks are forked. It imports what the parts of an Accelerator import when they first
need it, so that all ranks share these modules, and none imports one later, when its memory may be short.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbaccel.base.aborting import on_renewal
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.train.accelerator import Accelerator
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.distributed.rng import set_seed
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.rank_streams import use_own_device
from nbaccel.train.strategies import strategy_class

if TYPE_CHECKING:
    from nbaccel.train.raw_loop.changes_by_flags import LoopChange
    from nbaccel.train.raw_loop.lone_loop import LoneLoop

__all__ = ["load_for_ranks", "loop_changes", "setup_rank"]

_AT_FIRST_USE = (
    "nbaccel.base.missing_names",
    "nbaccel.base.storage",
    "nbaccel.train.checkpoint.loading",
    "nbaccel.train.checkpoint.model_weights",
    "nbaccel.train.checkpoint.saving",
    "nbaccel.train.data.dispatch",
    "nbaccel.train.data.order_comparison",
    "nbaccel.train.data.unprepared",
    "nbaccel.train.distributed.shared_messages",
    "nbaccel.train.oom.memory.free_memory",
    "nbaccel.train.prepare.unaveraged",
    "nbaccel.train.step.recompute",
    "nbaccel.train.strategies.replicated",
)
"""Modules that a script loads when it first needs one of them: a checkpoint, several ranks, a stream, blocks to
recompute, the sentence about a name of Accelerate's."""

for _module in _AT_FIRST_USE:
    importlib.import_module(_module)


def load_for_ranks(settings: RunSettings, world_size: int) -> None:
    """Load what so many ranks with these settings would load: in the kernel, for them to share."""
    if world_size == 1:
        importlib.import_module("nbaccel.train.raw_loop.single_rank")
    if settings.changes_loops:
        importlib.import_module("nbaccel.train.raw_loop.lone_loop")
    if (settings.split or 1) > 1:
        importlib.import_module("nbaccel.train.oom.split_batches")
    with suppress(Exception):  # the ranks meet it again
        loop_changes(settings)
    with suppress(Exception):
        strategy_class(World(0, world_size, 0, world_size), settings.strategy)


def setup_rank(namespace: dict[str, Any] | None, binds_accelerator: bool = True) -> RawLoopTraining | LoneLoop | None:
    """Seed this rank's generators, and give a cell its `accelerator`, process group included. Collective then.

    Return the object that trains loops that prepare nothing, or watches them where there is one rank; None where they
    must not be trained so.

    Args:
        namespace: The cell's names; None for a function. A name `accelerator` that the user defined is left alone: an
            Accelerator made in the kernel finds this rank's world at its first use.
        binds_accelerator: False when the cell defines that name itself.
    """
    settings, world = RunSettings.from_env(), current_world()
    if world.is_distributed:
        use_own_device(world)
    if settings.seed is not None:
        set_seed(settings.seed, device_specific=not settings.seeds_alike)
    if namespace is not None and binds_accelerator and "accelerator" not in namespace:
        namespace["accelerator"] = Accelerator()
    if world.is_distributed:
        on_renewal(lambda source, number: feature("groups of ranks that stay")(source, number))
    changes = loop_changes(settings)
    if settings.independent or settings.strict:
        if not (changes and settings.independent):
            return None
        from nbaccel.train.raw_loop.lone_loop import LoneLoop  # see `load_for_ranks`

        return LoneLoop(changes, world.is_main_process)
    if world.is_distributed:
        return RawLoopTraining(world, settings, changes)
    from nbaccel.train.raw_loop.single_rank import SingleRankWatch  # see `load_for_ranks`

    return SingleRankWatch(changes)


def loop_changes(settings: RunSettings) -> tuple[LoopChange, ...]:
    """Return what flags change of a loop that prepares nothing; where the feature is not there, what refuses it."""
    if not settings.changes_loops:
        return ()
    try:
        changes: tuple[LoopChange, ...] = feature("-p or -a above an unmodified loop")(settings)
    except FeatureMissing as error:
        from nbaccel.train.raw_loop.changes_by_flags import RefusedLoop

        return (RefusedLoop(error),)
    return changes
