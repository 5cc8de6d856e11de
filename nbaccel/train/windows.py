"""The contexts of a step: `accumulate`, `no_sync` and `hold_gradients`. Run in ranks, entered for every batch.

They bring three parts together for the length of a block: the accumulation that decides, the strategy that can
hold gradients back, and the models it is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.accumulation import Accumulation
from nbaccel.train.strategies import Strategy

__all__ = ["Accumulating", "Local", "NoSync"]


class NoSync:
    """Gradients of some models unsynchronised, while entered."""

    __slots__ = ("_accumulation", "_models", "_stack", "_strategy", "_was_held")

    def __init__(self, accumulation: Accumulation, strategy: Strategy, models: Sequence[Module]) -> None:
        self._accumulation = accumulation
        self._strategy = strategy
        self._models = models

    def __enter__(self) -> None:
        self._was_held = self._accumulation.is_held
        self._accumulation.is_held = True
        self._stack = ExitStack()
        for model in self._models:
            self._stack.enter_context(self._strategy.no_sync(model))

    def __exit__(self, *exception: Any) -> None:
        self._accumulation.is_held = self._was_held
        self._stack.close()


class Local:
    """Gradients of a model each rank's own, while entered: steps count as steps, and nobody waits for anybody."""

    __slots__ = ("_accumulation", "_held", "_was_local")

    def __init__(self, accumulation: Accumulation, held: AbstractContextManager[Any]) -> None:
        self._accumulation = accumulation
        self._held = held

    def __enter__(self) -> None:
        self._was_local = self._accumulation.is_local
        self._accumulation.is_local = True
        self._held.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._accumulation.is_local = self._was_local
        self._held.__exit__(*exception)


class Accumulating:
    """What `accumulate` returns: one object for the whole training, because it is entered for every batch.

    models: those of the block about to be entered.
    """

    __slots__ = ("_accumulation", "_has_peers", "_held", "_strategy", "models")

    def __init__(self, accumulation: Accumulation, strategy: Strategy) -> None:
        self._accumulation = accumulation
        self._strategy = strategy
        self._has_peers = strategy.has_peers
        self._held: list[Sequence[AbstractContextManager[Any]]] = []  # one entry per block that is entered
        self.models: Sequence[Module] = ()

    def __enter__(self) -> None:
        accumulation = self._accumulation
        window = accumulation.window
        factor = window.advance(accumulation.steps)  # may raise RunStopped; nothing is held by then
        if factor != 1.0:
            _multiply_gradients(self.models, factor)
        if self._has_peers:
            self._held.append(() if window.sync or accumulation.rules.sync_each_batch else self._hold())
        accumulation.depth += 1

    def __exit__(self, *exception: object) -> None:
        self._accumulation.depth -= 1
        if self._has_peers:
            for context in self._held.pop():
                context.__exit__(None, None, None)

    def _hold(self) -> Sequence[AbstractContextManager[Any]]:
        held = []
        for model in self.models:
            context = self._strategy.no_sync(model)
            context.__enter__()
            held.append(context)
        return held


def _multiply_gradients(models: Iterable[Module], factor: float) -> None:
    gradients = [tensor for tensor in _gradients(models) if tensor is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _gradients(models: Iterable[Module]) -> Iterator[Tensor | None]:
    for model in models:
        yield from (parameter.grad for parameter in model.parameters())
