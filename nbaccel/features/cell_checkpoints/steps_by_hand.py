"""StepsByHand: counts the steps of a loop that has no optimizer. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nbaccel.features.cell_checkpoints.loss_tap import LossTap
from nbaccel.namespace.parameters import fingerprint

__all__ = ["StepsByHand"]

_EACH = 8
"""Backwards that are looked at one by one; after these each second, fourth, eighth ... is enough."""


class StepsByHand:
    """Looks at what a loop trains before its backwards, until it has changed once: each backward from there is a step.

    Values are compared, since `p.data -= lr * p.grad` leaves the version of a tensor as it is.

    Args:
        reached: Returns the tensors that the loop may train.
        is_needed: Returns False once an optimizer steps, which ends the watch.
        take: Called with each step that is found, one backward after it.
    """

    def __init__(
        self, reached: Callable[[], Iterable[Any]], is_needed: Callable[[], bool], take: Callable[[], None]
    ) -> None:
        self._reached, self._is_needed, self._take = reached, is_needed, take
        self._backwards = 0
        self._seen: int | None = None
        self._is_found = False
        LossTap(self._look, is_read=False)

    def _look(self, loss: float) -> bool:
        if not self._is_needed():
            return False
        self._backwards += 1
        if not self._is_found and (self._backwards <= _EACH or self._backwards.bit_count() == 1):
            now = fingerprint(each for each in self._reached() if _is_trained(each)) or 0
            self._is_found = self._seen is not None and now != self._seen
            self._seen = now
        if self._is_found:
            self._take()
        return True


def _is_trained(tensor: Any) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.requires_grad and tensor.is_leaf
