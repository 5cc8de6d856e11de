"""Strategies: distribute one model over the ranks of a run. A registry of strings, imported when chosen. In ranks.

Imports `base`, `train/distributed`, `train/step` and the table of `features`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from nbaccel.base.settings import PARTITIONING, STRATEGY_ENTRY_POINTS, installed_strategies
from nbaccel.base.world import World
from nbaccel.features import feature
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.strategies.single import Strategy

__all__ = ["AUTO", "Strategy", "choose_strategy", "plugin_class", "strategy_class", "strategy_names"]

AUTO = "auto"
"""The simplest strategy that makes the ranks of a run one training: "single" or "ddp", never one that was not asked."""

_REGISTRY = {
    "single": "nbaccel.train.strategies.single:Strategy",
    "ddp": "nbaccel.train.strategies.replicated:Replicated",
}


def choose_strategy(
    world: World, device: torch.device, name: str | None = None, handlers: Handlers | None = None, plugin: Any = None
) -> Strategy:
    """Return the strategy called `name`; for None or "auto" the simplest that makes the ranks of `world` one training.

    Args:
        plugin: Its options, `FullyShardedDataParallelPlugin` for "fsdp".

    Raises:
        ValueError: There is no such strategy; the message names the choices.
    """
    return strategy_class(world, name)(world, device, handlers, plugin)


def strategy_class(world: World, name: str | None = None) -> type[Strategy]:
    """Return the class of the strategy that `choose_strategy` makes, without a device.

    A single process has nobody to share a model with, so it has the strategy "single", also where another one is named
    that does not serve one process.

    Raises:
        ValueError: There is no such strategy; the message names the choices.
    """
    chosen = name or AUTO
    ours = (AUTO, *_REGISTRY, *PARTITIONING)
    if chosen not in ours and chosen not in installed_strategies():  # the latter takes milliseconds
        raise ValueError(f"strategy must be one of {', '.join(map(repr, (AUTO, *strategy_names())))}, got {chosen!r}")
    if chosen == AUTO:
        chosen = "ddp" if world.is_distributed else "single"
    elif chosen == "single" and world.is_distributed:
        raise ValueError(
            f"strategy='single' is for one process, and there are {world.world_size}: each would train a model of its "
            "own. Use 'ddp', or 'auto'"
        )
    kind = _class_of(chosen)
    return kind if world.is_distributed or kind.serves_one_process else Strategy


def _class_of(chosen: str) -> type[Strategy]:
    kind: type[Strategy]
    if chosen in PARTITIONING:
        kind = feature(f"--strategy {chosen}")
        return kind
    if chosen not in _REGISTRY:
        from importlib.metadata import entry_points  # as slow to import as this whole package

        (found,) = entry_points(group=STRATEGY_ENTRY_POINTS, name=chosen)
        kind = found.load()
        return kind
    module, _, of_the_class = _REGISTRY[chosen].partition(":")
    kind = getattr(import_module(module), of_the_class)
    return kind


def plugin_class(name: str) -> type[Any] | None:
    """Return the class of the options of the strategy called `name`; None where it has none."""
    return _class_of(name).plugin_class


def strategy_names() -> tuple[str, ...]:
    """Return the names that `choose_strategy` accepts besides "auto": ours, then those of installed packages."""
    return (*_REGISTRY, *PARTITIONING, *installed_strategies())
