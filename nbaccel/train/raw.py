"""Raw: steps of a prepared optimizer whose gradients come from the program's own ``loss.backward()``. Runs in ranks.

Such a loop trains correctly: the model synchronises its gradients by itself. Its steps are counted here, where an
optimizer takes them, because there was no backward of ours to count; the user is told once what that leaves out. What
would train something else than the program says is refused, before a weight changes.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nbaccel.errors import NotPrepared
from nbaccel.train.accumulation import Accumulation
from nbaccel.train.precision import Precision
from nbaccel.train.state import current_world
from nbaccel.train.strategies.base import Strategy
from nbaccel.train.warned import warn_user

__all__ = ["Freshness", "RawSteps"]

_LINE = "accelerator.backward(loss)"


class Freshness:
    """Tells whether an optimizer has other gradients than at its last step.

    Called only where no backward of ours has run since: an optimizer that is told to step twice has the old ones, and
    one whose program calls ``loss.backward()`` has new ones.

    is_cleared: the gradients of the last step were dropped, so any existing gradient is new.
    stepped_with: one of them, and its version; None after a backward of ours.
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


class RawSteps:
    """Counts the raw steps of one Accelerator's optimizers, and warns once of what is missed."""

    def __init__(self, accumulation: Accumulation, precision: Precision, strategy: Strategy) -> None:
        self._accumulation = accumulation
        self._precision = precision
        self._strategy = strategy
        self._has_told = False
        self._checked_in: int | None = None  # the process in which the model was found to be one for all ranks
        self._took_part: set[int] = set()  # ids of the optimizers of the current step, where no loader marks its end

    def enter(self, optimizer: Optimizer) -> None:
        """Prepare a raw step that `optimizer` is about to take.

        Raises:
                CannotCut: batches come in parts, and each part would weigh like a whole batch.
                RuntimeError: fp16, and the loss was not scaled.
                NotPrepared: every rank would train a model of its own.
                RunStopped: the run ends before this step.
        """
        window = self._accumulation.window
        if window.comes_in_parts:
            window.refuse_raw()
        self.refuse_unscaled(optimizer)
        if self._checked_in != os.getpid():
            self._refuse_separate_trainings()
            self._checked_in = os.getpid()
        self._count(optimizer)
        if not self._has_told:
            self._has_told = True
            if self._strategy.world.is_main_process:
                warn_user(self._what_is_missed())

    def refuse_unscaled(self, optimizer: Optimizer) -> None:
        """Refuse, under fp16, gradients of a loss that was not scaled, since they would be divided by the scale.

        Raises:
            RuntimeError: the precision is fp16, and it expects scaled losses.
        """
        if self._precision.expects_scaled:
            raise RuntimeError(
                f"{self._place()}: mixed_precision='fp16' scales losses, and this {type(optimizer).__name__} has "
                "gradients of a loss that was not scaled, since the loop calls loss.backward() itself. The weights are "
                f"as before. Write\n    {_LINE}\nor choose mixed_precision='bf16' or 'no'."
            )

    def _count(self, optimizer: Any) -> None:
        accumulation, clock = self._accumulation, self._accumulation.clock
        if accumulation.window is accumulation.outside and not clock.is_inside:
            # No loader marks the beginning of a step: it begins where an optimizer steps again.
            if id(optimizer) in self._took_part or not clock.trained:
                self._took_part.clear()
                clock.enter()
            self._took_part.add(id(optimizer))
        if not accumulation.is_held:
            clock.train()

    def _refuse_separate_trainings(self) -> None:
        world, now = self._strategy.world, current_world()
        if now.world_size != world.world_size:
            raise NotPrepared(
                f"optimizer.step() in rank {now.rank} of {now.world_size}: the optimizer was prepared for "
                f"{world.world_size} process(es), so every rank would train a model of its own. Prepare it here, "
                "before the loop:\n    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )
        if world.is_distributed and not self._strategy.finds_parallel():
            raise NotPrepared(
                f"optimizer.step() in {self._place()}, but the model is not prepared: every rank would train a model "
                "of its own. Prepare it before the loop:\n"
                "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )

    def _what_is_missed(self) -> str:
        steps, divided = self._accumulation.steps, ""
        if steps > 1:
            divided = (
                f" gradient_accumulation_steps={steps}: loss.backward() does not divide the loss by {steps}, as "
                "accelerator.backward does, so a step takes the sum of its batches' gradients and not their mean."
            )
        return (
            "the loop calls loss.backward() itself. It trains, and steps are counted where the optimizer takes them, "
            f"but the loss is not shown nor watched for NaN, and batches cannot be split if memory runs out.{divided} "
            f"{_LINE} in its place does all of that."
        )

    def _place(self) -> str:
        world = self._strategy.world
        return f"rank {world.rank} of {world.world_size}, step {self._accumulation.clock.done}"
