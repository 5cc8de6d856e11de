"""Freshness: whether an optimizer has other gradients than at its last step. Runs in ranks."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Freshness"]


class Freshness:
    """Tells whether an optimizer has other gradients than at its last step.

    Called only where no backward of ours has run since: an optimizer that is told to step twice has the old ones, and
    one whose program calls ``loss.backward()`` has new ones.

    Attributes:
        is_cleared: The gradients of the last step were dropped, so any existing gradient is new.
        stepped_with: One of them, and its version; None after a backward of ours.
    """

    __slots__ = ("is_cleared", "stepped_with")

    def __init__(self) -> None:
        self.is_cleared = True
        self.stepped_with: tuple[weakref.ref[Tensor], int] | None = None

    def has_new(self, optimizer: Optimizer) -> bool:
        gradient = _a_gradient(optimizer)
        if gradient is None or self.is_cleared:
            return gradient is not None
        if self.stepped_with is None:
            return False
        known, version = self.stepped_with
        return known() is not gradient or gradient._version != version

    def note(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` has stepped with its present gradients."""
        self.is_cleared = False
        gradient = _a_gradient(optimizer)
        self.stepped_with = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def __reduce__(self) -> tuple[type[Freshness], tuple[()]]:
        """Return an empty object: a weak reference cannot be pickled, and another process has other gradients."""
        return Freshness, ()


def _a_gradient(optimizer: Optimizer) -> Tensor | None:
    return next(
        (
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ),
        None,
    )
