"""The gradients of some models that `forward_backward` has for a window, in one process. Runs in ranks.

The engine needs few operations: save existing gradients, begin again, close the step. `Gradients` is for one process
and touches nothing but ``parameter.grad``; `gradient_buckets` does the same with peers. No memory is freed here, no
forward is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from nbaccel.errors import NotPrepared

__all__ = [
    "Gradients",
    "StepReport",
    "copies_of",
]


class StepReport(NamedTuple):
    """Report of one rank at the end of its part of a step; summed, the report of all.

    Args:
        weight: The weight of the rank's samples, per batch of the window.
        poisoned: Ranks that failed after they had sent gradients.
        unfit: Ranks where the smallest micro-batch does not fit.
        unfit_ranks, failed_ranks: The sum of their numbers, which identifies the rank if there is a single one.
        failed: Ranks with another error.
    """

    weight: float = 0.0
    poisoned: float = 0
    unfit: float = 0
    unfit_ranks: float = 0
    failed: float = 0
    failed_ranks: float = 0

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.weight, self.poisoned, self.unfit, self.unfit_ranks, self.failed, self.failed_ranks


class Gradients:
    """The gradients of `models` in one process.

    Attributes:
        is_busy: A forward of ours is running; other forwards of the models are the program's own.
        is_open: They contain gradients of an accumulation window that no step has used yet.
    """

    has_peers = False
    has_launched = False
    """True if peers may hold gradients of this attempt, so that this rank alone cannot repeat it."""

    is_torn = False
    """True if gradients were sent before they were complete, so that all ranks have to repeat this attempt."""

    is_released = False

    def __init__(self, models: Sequence[Module]) -> None:
        self.models = list(models)
        self.parameters = _to_train(models)
        self._frozen = [parameter for parameter in _unique(models) if not parameter.requires_grad]
        self.is_busy = False
        self.is_open = False
        self._aside: list[Tensor | None] = []

    @property
    def are_outgrown(self) -> bool:
        """True if parameters need gradients that did not when this object was made: layers were unfrozen."""
        return any(parameter.requires_grad for parameter in self._frozen)

    @property
    def were_zeroed(self) -> bool:
        """True if the program has dropped the open window's gradients: it left a loop in the middle."""
        return all(parameter.grad is None for parameter in self.parameters)

    def open(self) -> None:
        """Begin a window: existing gradients are saved, and added at its end."""
        self._aside = [parameter.grad for parameter in self.parameters]
        self.is_open = True
        self.restore(None)

    def keep(self) -> Any:
        """Return a copy of the window's gradients so far, for `restore`; on the host where the device is full."""
        return copies_of([parameter.grad for parameter in self.parameters])

    def restore(self, kept: Any) -> None:
        """Set the gradients to those of `keep`; for None, to none."""
        copies = [None] * len(self.parameters) if kept is None else copies_of(kept)
        for parameter, copy in zip(self.parameters, copies, strict=True):
            parameter.grad = None if copy is None else copy.to(parameter.device)

    def begin(self) -> None:
        """Begin an attempt: nothing is sent yet."""

    def overlap(self) -> None:
        """Send gradients as soon as the next backward has completed them. It must be the last one before `exchange`."""

    def exchange(self, report: StepReport) -> StepReport:
        """Sum the gradients and reports of all ranks. Collective: every rank calls it, also one that failed."""
        return report

    def close(self, factor: float) -> None:
        """End the window: multiply its gradients by `factor`, and add those that were saved."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for parameter, aside in zip(self.parameters, self._aside, strict=True):
            if aside is not None:
                parameter.grad = aside if parameter.grad is None else aside.add_(parameter.grad)
        self._aside = []
        self.is_open = False

    def discard(self) -> None:
        """Drop the gradients of a failed window, and restore those that were saved."""
        if not self.is_open:
            return
        for parameter, aside in zip(self.parameters, self._aside, strict=True):
            parameter.grad = aside
        self._aside = []
        self.is_open = False

    def release(self) -> None:
        """Release what this object holds; ``parameter.grad`` stays."""
        self.is_released = True

    def give_back(self) -> None:
        """Return the gradients to their owner, since the program runs a forward of its own.

        Raises:
            RuntimeError: A window is open.
        """
        if self.is_open:
            raise RuntimeError(
                "a forward with gradients outside of forward_backward, in the middle of an accumulation window that "
                "forward_backward began: a window is one or the other. Evaluate under torch.no_grad(), or use "
                "forward_backward for every batch of the window."
            )
        self.release()


def _to_train(models: Iterable[Module]) -> list[Parameter]:
    """Return the parameters of `models` that need gradients, each once, even if models or layers share it.

    Raises:
        NotPrepared: There are none.
    """
    trained = [parameter for parameter in _unique(models) if parameter.requires_grad]
    if not trained:
        raise NotPrepared(
            "accelerator.forward_backward knows no parameter to train: prepare the model before the loop,\n"
            "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        )
    return trained


def _unique(models: Iterable[Module]) -> list[Parameter]:
    return list({id(parameter): parameter for model in models for parameter in model.parameters()}.values())


def copies_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return a copy of each of `tensors`, on the host where the device has no space for all of them."""
    try:
        return [None if tensor is None else tensor.clone() for tensor in tensors]
    except torch.OutOfMemoryError:
        pass  # leave `except` first: the error holds the copies that were made
    return [None if tensor is None else tensor.to("cpu", copy=True) for tensor in tensors]
