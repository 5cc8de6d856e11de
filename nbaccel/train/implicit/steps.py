"""Steps: decide where one training step of an unmodified loop ends and the next begins. Runs in ranks.

In a loop that prepares nothing, the optimizers' steps and the batches that it takes show it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbaccel.events import StepEntered, StepsEnded, emit

__all__ = ["Steps"]


class Steps:
    """Counts the steps of one task.

    batches: how many batches were handed out so far.
    """

    def __init__(self, batches: Callable[[], int]) -> None:
        self._batches = batches
        self.begin()

    def begin(self) -> None:
        """Begin a task."""
        self.count = self.taken = 0
        self._rates = 0.0
        self._entered_at: tuple[int, int] | None = None  # optimizers' steps and batches when the last step was entered
        self._is_inside = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begin_anew(self) -> None:
        """Begin another attempt of the program, whose steps continue from where the last one ended."""
        self.taken, self._rates = 0, 0.0
        self._entered_at = None
        self.end_step()

    @property
    def under_way(self) -> int | None:
        """The step that was entered last, 0-based; None where the task has entered none."""
        return self.count if self.count or self._entered_at is not None else None

    @property
    def done(self) -> int:
        """Steps that are complete."""
        return self.count + (self._entered_at is not None and not self._is_inside)

    def agree(self, count: int) -> None:
        """Continue from step `count` of the peers: attempts before may have failed at different steps."""
        if count > self.count:
            self.count = count
            emit(StepEntered(count))

    def meet(self, optimizer: Any) -> None:
        """Record that `optimizer` steps in this task."""
        self._optimizers.add(optimizer)

    def note(self, optimizer: Any) -> None:
        """Record that an optimizer is about to step."""
        self.taken += 1
        for group in optimizer.param_groups:
            if not isinstance(rate := group.get("lr"), (torch.Tensor, type(None))):
                self._rates += float(rate)

    def enter(self) -> None:
        """Enter a step, if the backward that is about to begin starts one.

        Raises:
            RunStopped: the run ends before this step.
        """
        now = self.taken, self._batches()
        before = self._entered_at
        has_stepped = before is not None and (now[0] != before[0] or not self._optimizers)
        is_next = before is not None and has_stepped and (now[1] != before[1] or not now[1])
        if is_next or not self._is_inside:
            emit(StepEntered(self.count + is_next))  # first: if the run ends here, this step was not entered
            self._is_inside = True
        self.count += is_next
        if is_next or before is None:
            self._entered_at = now

    def end_step(self) -> None:
        """End the step after an optimizer's step or at the task's end: a stop need not wait for anything then."""
        if self._is_inside:
            self._is_inside = False
            emit(StepsEnded())

    def choices(self) -> int:
        """Return a number that differs for other settings of the optimizers: learning rates, and step counts there."""
        return hash(
            frozenset(
                (id(optimizer), at, name, value)
                for optimizer in self._optimizers
                for at, group in enumerate(optimizer.param_groups)
                for name, value in group.items()
                if isinstance(value, (int, float, tuple))
            )
        )

    def take_rates(self) -> float:
        """Return a number that differs for other learning rates, for the steps since the last call.

        It does not read the existing optimizers: one that the program has replaced is freed at different times in the
        ranks.
        """
        rates, self._rates = self._rates, 0.0
        return rates
