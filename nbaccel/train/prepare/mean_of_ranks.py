"""Numbers by which an optimizer or a scheduler decides, as the mean of all ranks, so that all decide alike. In ranks.

Gradients are averaged, losses are not: each rank has that of its own samples. What compares losses would decide
otherwise on one rank than on another, and their models would grow apart, or one would compute a gradient more.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbaccel.train.distributed.partial_state import PartialState, current_world

__all__ = [
    "MeanLosses",
    "decide_by_the_mean",
]


class MeanLosses:
    """A closure whose losses are the means of all ranks' losses.

    LBFGS decides by the losses of its closure how far it goes, and how often it calls the closure. With losses of their
    own, ranks would call it different numbers of times: gradients of different steps would be averaged, or the last
    ones waited for in vain. Each call is collective.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self._pairs: list[tuple[Any, Any]] = []  # of a mean and this rank's loss

    def __call__(self) -> Any:
        loss = self._closure()
        if not (isinstance(loss, float | int) or (isinstance(loss, Tensor) and loss.numel() == 1)):
            return loss
        mean = _mean("the loss of a closure", loss)
        given = loss.detach().new_full(loss.shape, mean) if isinstance(loss, Tensor) else mean
        self._pairs.append((given, loss))
        return given

    def own(self, value: Any) -> Any:
        """Return this rank's loss if `value` is a mean that this object has returned, else `value`."""
        return next((loss for given, loss in self._pairs if given is value), value)


def decide_by_the_mean(optimizer: Optimizer) -> None:
    """Let every `ReduceLROnPlateau` of `optimizer`, prepared or not, decide by the mean of the ranks' metrics.

    Their calls are collective from now on. A metric that is equal on all ranks stays what it is.
    """
    step: Any = ReduceLROnPlateau.step
    if not hasattr(step, "followed"):
        step = _by_the_mean(step)
        ReduceLROnPlateau.step = step  # type: ignore[method-assign]
    step.followed.add(optimizer)


def _by_the_mean(step: Callable[..., None]) -> Callable[..., None]:
    followed: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @functools.wraps(step)
    def by_the_mean(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        optimizer: Any = scheduler.optimizer
        if getattr(optimizer, "optimizer", optimizer) in followed and current_world().is_distributed:
            metrics = _mean(f"{type(scheduler).__name__}.step", metrics)
        step(scheduler, metrics, *args, **kwargs)

    by_the_mean.followed = followed  # type: ignore[attr-defined]
    return by_the_mean


def _mean(call: str, value: Any) -> float:
    """Return the mean of the ranks' values, of equal bits on all of them: each computes it from the same numbers."""
    own = value.item() if isinstance(value, Tensor) else float(value)
    numbers = PartialState().collectives.tell(call, torch.tensor([own], dtype=torch.float64, device="cpu"))
    return float(numbers[0] if bool((numbers == numbers[0]).all()) else numbers.mean())
