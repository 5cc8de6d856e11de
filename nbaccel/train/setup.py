"""Setup: the steps that a launcher runs in every rank before the user's code. It names `setup_rank` by a string.

This module is imported before ranks are forked, and so are other modules that every rank would import by itself, so
that all ranks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.aborting import on_renewal
from nbaccel.base.settings import RunSettings
from nbaccel.features.map import MapJob
from nbaccel.features.map.map_worker import work
from nbaccel.train.accelerator import Accelerator
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.distributed.rng import set_seed
from nbaccel.train.oom.retry.outside_retry import renew
from nbaccel.train.raw_loop.loop import ImplicitTraining
from nbaccel.train.raw_loop.rank_streams import use_own_device
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.strategies import replicated  # noqa: F401  # the strategy of several ranks, for them to share

if TYPE_CHECKING:
    from nbaccel.features.check.dry_run_hooks import DryRunParts
    from nbaccel.features.check.gradient_probe import GradientProbe
    from nbaccel.features.check.loop_log import LoopLog

__all__ = ["call_with_accelerator", "dry_run_parts", "gradient_probe", "map_in_rank", "setup_rank"]


def setup_rank(
    namespace: dict[str, Any] | None, binds_accelerator: bool = True
) -> ImplicitTraining | SingleRankWatch | None:
    """Seed this rank's generators, and give a cell its `accelerator`, process group included. Collective then.

    Return the object that trains loops that prepare nothing, or watches them where there is one rank; None where they
    must not be trained so.

    namespace: the cell's names; None for a function. A name `accelerator` that the user defined is left alone:
    an Accelerator made in the kernel finds this rank's world at its first use.
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
        on_renewal(renew)
    if settings.independent or settings.strict:
        return None
    return ImplicitTraining(world, settings) if world.is_distributed else SingleRankWatch()


def map_in_rank(
    job: MapJob,
    items: Any,
    function: Callable[..., Any],
    setup: Callable[..., Any] | None,
    hang_timeout_s: float | None = None,
) -> None:
    """Work on a map in a rank that the launcher starts again if it dies; see `nbaccel.map`."""
    work(Accelerator(), job, items, function, setup, is_restarted=True, hang_timeout_s=hang_timeout_s)


def call_with_accelerator(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of a function that also gets this rank's `accelerator`, by keyword; see `nbaccel.sweep`."""
    return function(*args, **kwargs, accelerator=Accelerator())


def dry_run_parts(log: LoopLog, write: Callable[[Mapping[str, Any]], None], folder: Path) -> DryRunParts:
    """Return what cuts the loaders of this rank in a dry run, and measures; see `%%accelerate --check`."""
    from nbaccel.features.check.dry_run_hooks import DryRunParts
    from nbaccel.features.check.rank_records import SAVES
    from nbaccel.features.check.redirected_checkpoints import redirect_checkpoints

    if (saves := folder.with_name(SAVES)).is_dir():
        redirect_checkpoints(str(saves))
    return DryRunParts(log, write, folder)


def gradient_probe(
    write: Callable[[Mapping[str, Any]], None], path: Path, turns: int, steps: int | None
) -> GradientProbe:
    """Return what records the gradients at the first step of a cell; see `%%accelerate --check full`."""
    from nbaccel.features.check.gradient_probe import GradientProbe

    return GradientProbe(write, path, turns, steps)
