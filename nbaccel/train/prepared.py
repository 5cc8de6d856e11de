"""What one Accelerator prepared: models, optimizers, schedulers, loaders. Runs in ranks.

It remembers them in the order of `prepare`, moves them, and gives and takes their state; how each of them is
prepared is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn import Module

from nbaccel.train.data import PreparedLoader
from nbaccel.train.optimizer import PreparedOptimizer, PreparedScheduler
from nbaccel.train.strategies import Strategy

__all__ = ["Prepared", "remembered"]

_T = TypeVar("_T")


@dataclass(slots=True)
class Prepared:
    """Prepared objects by kind; false while there are none."""

    models: list[Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.models or self.optimizers or self.schedulers or self.loaders)

    def forget(self) -> None:
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()

    def move_to(self, device: torch.device) -> None:
        """Follow into another process, whose device differs or whose pickled tensors arrived on the CPU."""
        for model in self.models:
            model.to(device)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # casts the state to its parameters' device
        for loader in self.loaders:
            loader.move_to(device)

    def is_one_training(self, models: Sequence[Module], strategy: Strategy) -> bool:
        """Whether `models`, or where none are named the whole program, would train as one on all ranks."""
        known = {id(strategy.unwrap(model)) for model in self.models}
        if models:
            return all(strategy.keeps_together(model) or id(strategy.unwrap(model)) in known for model in models)
        return any(strategy.unwrap(model) is not model for model in self.models) or strategy.finds_parallel()

    def model_states(self, strategy: Strategy) -> list[dict[str, Any]]:
        return [strategy.state_dict(model) for model in self.models]

    def state(self) -> dict[str, Any]:
        """The state of everything but the models."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "iterations": [loader.iteration for loader in self.loaders],
        }

    def load(self, models: list[dict[str, Any]], state: dict[str, Any], strategy: Strategy) -> None:
        """Take what `model_states` and `state` gave.

        Raises:
            ValueError: it was another number of objects.
        """
        for kind, prepared in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            if len(state[kind]) != len(prepared):
                raise ValueError(
                    f"the checkpoint holds {len(state[kind])} {kind}, and {len(prepared)} are prepared: "
                    "prepare the same ones"
                )
        for model, content in zip(self.models, models, strict=True):
            strategy.load_state_dict(model, content)
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        for scheduler, content in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(content)
        # An evaluation that prepares fewer loaders than the training did may load its checkpoint.
        for loader, iteration in zip(self.loaders, state["iterations"], strict=False):
            loader.iteration = iteration


def remembered(thing: _T, among: list[_T]) -> _T:
    """`thing`, which is `among` what is prepared from now on."""
    if not any(thing is known for known in among):
        among.append(thing)
    return thing
