"""Strategies: distribute one model over the ranks of a run. A registry of strings, imported when chosen."""

from __future__ import annotations

from importlib import import_module

import torch

from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.strategies.single import Strategy
from nbaccel.world import World

__all__ = ["Strategy", "choose_strategy", "strategy_names"]

_REGISTRY = {
    "single": "nbaccel.train.strategies.single:Strategy",
    "replicated": "nbaccel.train.strategies.replicated:Replicated",
}


def choose_strategy(
    world: World, device: torch.device, name: str | None = None, handlers: Handlers | None = None
) -> Strategy:
    """Return the strategy called `name`; without a name, the simplest that makes the ranks of `world` one training.

    Raises:
        ValueError: there is no such strategy; the message names the choices.
    """
    chosen = name or ("replicated" if world.is_distributed else "single")
    if chosen not in _REGISTRY:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, _REGISTRY))}, got {chosen!r}")
    module, _, kind = _REGISTRY[chosen].partition(":")
    strategy: type[Strategy] = getattr(import_module(module), kind)
    return strategy(world, device, handlers)


def strategy_names() -> tuple[str, ...]:
    """Return the names that `choose_strategy` accepts."""
    return tuple(_REGISTRY)
