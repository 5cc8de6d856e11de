"""Strategies: distribute one model over the ranks of a run. A registry of strings, imported when chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from nbaccel.settings import STRATEGIES
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.strategies.single import Strategy
from nbaccel.world import World

__all__ = ["Strategy", "choose_strategy", "strategy_names"]

_REGISTRY = {
    "single": "nbaccel.train.strategies.single:Strategy",
    "ddp": "nbaccel.train.strategies.replicated:Replicated",
}

_AUTO = "auto"


def choose_strategy(
    world: World,
    device: torch.device,
    name: str | None = None,
    handlers: Handlers | None = None,
    fsdp_plugin: Any = None,
) -> Strategy:
    """Return the strategy called `name`; for None or "auto" the simplest that makes the ranks of `world` one training.

    A single process has nobody to share a model with, so it has the strategy "single", also where another one is named.
    fsdp_plugin: the options of "fsdp".

    Raises:
        ValueError: there is no such strategy; the message names the choices.
    """
    chosen = "ddp" if name in (None, _AUTO) else name
    if not world.is_distributed and chosen in STRATEGIES:
        chosen = "single"
    if chosen not in _REGISTRY:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, (_AUTO, *_REGISTRY)))}, got {chosen!r}")
    module, _, kind = _REGISTRY[chosen].partition(":")
    strategy: type[Strategy] = getattr(import_module(module), kind)
    return strategy(world, device, handlers)


def strategy_names() -> tuple[str, ...]:
    """Return the names that `choose_strategy` accepts."""
    return tuple(_REGISTRY)
