"""The contexts of a step: `accumulate`, `no_sync` and `hold_gradients`. Run in ranks, entered for every batch.

For the length of a block they combine three parts: the accumulation that decides, the strategy that can
hold gradients back, and the models that it concerns.

GradientState: shows the state of an accelerator's accumulation to programs that read it. Runs in ranks.

It is a view without data of its own, and every accelerator has its own one. Accelerate has one for the whole
process, so that a second `Accelerator()` resets the first one's accumulation; here ``GradientState()`` shows the
Accelerator that was made last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.step.accumulation import Accumulation, Window
from nbaccel.train.strategies import Strategy

__all__ = [
    "Accumulating",
    "GradientState",
    "Local",
    "NoSync",
]


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

    Attributes:
        models: Those of the block about to be entered. They are dropped when it is left.
        is_settled: The first backward of the block needs nothing more.
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
                self._turn(window, about)
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
            accumulation.end_of_block()
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
            self._turn(window, about)
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
        about = tuple(map(id, self.models))
        if accumulation.may_go_on(last) and last.about == about:
            if window.about != about:
                window.turn_to(about)
            last.hand_over(window)
        elif accumulation.left:
            self._turn(window, about)

    def _turn(self, window: Window, about: tuple[int, ...]) -> None:
        """Count for the models of the block; a window of theirs that a loop has left continues here.

        Unless its gradients were cleared since. All ranks clear theirs, so they decide alike.
        """
        if window.about != about:
            window.turn_to(about)
        left = self._accumulation.left.pop(about, None)
        if left is not None and window.position == 0 and self._has_gradients():
            left.hand_over(window)

    def _has_gradients(self) -> bool:
        """Return whether there may be gradients of the models of the block; one in shards may keep them elsewhere."""
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        is_visible = bool(parameters) and not self._strategy.saves_together
        return not is_visible or any(each.grad is not None or hasattr(each, "device_mesh") for each in parameters)

    def _hold(self) -> Sequence[AbstractContextManager[Any]]:
        held = []
        for model in self.models:
            context = self._strategy.within_window(model)
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


class GradientState:
    """Read-only view of an accumulation, as ``accelerator.gradient_state``. Reading it changes nothing.

    Args:
        accumulation: The accumulation of an Accelerator; None is that of the Accelerator that was made last.

    Example:
        >>> from nbaccel import Accelerator
        >>> Accelerator(gradient_accumulation_steps=4).gradient_state.num_steps
        4
    """

    def __init__(self, accumulation: Accumulation | None = None) -> None:
        """Show an accumulation.

        Raises:
            RuntimeError: There is no accelerator yet.
        """
        if accumulation is None:
            newest = next(reversed(list(process_group.users)), None)
            if newest is None:
                raise RuntimeError("a GradientState belongs to an Accelerator, and none has been made in this process")
            accumulation = newest.accumulation
        self._accumulation = accumulation

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends a step."""
        return self._accumulation.window.sync

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self._accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """The choice of the plugin; see `GradientAccumulationPlugin`."""
        return self._accumulation.rules.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batch of a loader ends its step."""
        return self._accumulation.rules.sync_with_dataloader

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader of the innermost loop; None outside of such loops."""
        return self._accumulation.window.source

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the loader's last one."""
        return self._accumulation.window.is_last

    @property
    def remainder(self) -> int:
        """Samples of all ranks in the loader's last round that are no repetition; -1 outside of a loop."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @classmethod
    def _reset_state(cls) -> None:
        """Do nothing, since the view has no data of its own. Notebooks for Accelerate call this before a new start."""

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )
