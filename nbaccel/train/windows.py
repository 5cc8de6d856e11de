"""The contexts of a step: `accumulate`, `no_sync` and `hold_gradients`. Run in ranks, entered for every batch.

For the length of a block they combine three parts: the accumulation that decides, the strategy that can
hold gradients back, and the models that it concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.accumulation import Accumulation, Window
from nbaccel.train.strategies import Strategy

__all__ = ["Accumulating", "Local", "NoSync"]


class NoSync:
    """Keeps the gradients of some models unsynchronised while entered."""

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
    """Keeps a model's gradients in their rank while entered: steps count as steps, and no rank waits for another."""

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
    """The object that `accumulate` returns: one for the whole training, because it is entered for every batch.

    A block decides when it is entered, by the current batch. If a batch is handed out inside of the block, before its
    first backward, the block trains on that batch, and decides again.

    models: those of the block about to be entered. They are dropped when it is left.
    is_settled: the first backward of the block needs nothing more.
    """

    __slots__ = (
        "_accumulation",
        "_before",
        "_factor",
        "_has_peers",
        "_held",
        "_strategy",
        "is_settled",
        "models",
    )

    def __init__(self, accumulation: Accumulation, strategy: Strategy) -> None:
        self._accumulation = accumulation
        self._strategy = strategy
        self._has_peers = strategy.has_peers
        self._held: list[Sequence[AbstractContextManager[Any]]] = []  # one entry per block that is entered
        self._before = (0, 1, True)  # position, divisor and sync of the window, before the block
        self._factor = 1.0  # factor for the gradients at the first backward
        self.is_settled = True
        self.models: Sequence[Module] = ()

    def __enter__(self) -> None:
        accumulation = self._accumulation
        window = accumulation.window
        if window is accumulation.outside and window.position == 0:
            accumulation.clock.enter()  # may raise RunStopped; nothing is held by then
        if window is not accumulation.counted:
            self._count_on(window)
        if accumulation.steps != 1 or window.position:
            about = tuple(map(id, self.models))
            if about != window.about:
                window.turn_to(about)
        self._before = (window.position, window.divisor, window.sync)
        self._factor = window.advance(accumulation.steps)
        self.is_settled = self._factor == 1.0
        if self._has_peers:
            self._held.append(() if window.sync or accumulation.rules.sync_each_batch else self._hold())
        accumulation.depth += 1
        accumulation.block = self

    def __exit__(self, *exception: object) -> None:
        accumulation = self._accumulation
        accumulation.depth -= 1
        if accumulation.block is not None:
            if exception[0] is not None:
                self.withdraw()  # nothing was trained on
            elif self._factor != 1.0:
                self.rescale()
            accumulation.block = None
        if accumulation.counted.is_last or accumulation.counted.ends_too:
            accumulation.spend()
        if self._has_peers:
            for context in self._held.pop():
                context.__exit__(None, None, None)
        self.models = ()

    # -- a batch that is handed out inside of the block

    def withdraw(self) -> None:
        window = self._accumulation.counted
        window.position, window.divisor, window.sync = self._before
        self._factor = 1.0
        if self._has_peers:
            for context in self._held[-1]:
                context.__exit__(None, None, None)
            self._held[-1] = ()

    def decide(self) -> None:
        accumulation = self._accumulation
        window = accumulation.window
        if window is not accumulation.counted:
            self._count_on(window)
        about = tuple(map(id, self.models))
        if about != window.about:
            window.turn_to(about)
        self._before = (window.position, window.divisor, window.sync)
        self._factor = window.advance(accumulation.steps)
        self.is_settled = self._factor == 1.0 and not self._has_peers
        if self._has_peers and not (window.sync or accumulation.rules.sync_each_batch):
            self._held[-1] = self._hold()

    def rescale(self) -> None:
        if self._factor != 1.0:
            _multiply_gradients(self.models, self._factor)
            self._factor = 1.0

    def settle(self) -> None:
        self.is_settled = True
        self.rescale()
        if self._has_peers and not self._held[-1]:  # the forward may have run while gradients were held back
            for model in self.models:
                self._strategy.await_backward(model)

    # -- the parts of a decision

    def _count_on(self, window: Window) -> None:
        """Count on `window` from now on; a window that another one began with the same models continues there."""
        accumulation = self._accumulation
        last, accumulation.counted = accumulation.counted, window
        if accumulation.may_go_on(last) and last.about == tuple(map(id, self.models)):
            if window.about != last.about:
                window.turn_to(last.about)
            window.position, window.divisor, last.position = last.position, last.divisor, 0

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
