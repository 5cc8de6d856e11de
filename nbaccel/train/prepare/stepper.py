"""Stepper: the part of an Accelerator that surrounds a step: accumulation, the loss, and gradients. Runs in ranks.

The accumulation decides when gradients synchronise, the precision scales, the strategy runs backwards and steps, the
watch checks losses. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.events import reports
from nbaccel.train.prepare.contexts import Local, NoSync
from nbaccel.train.prepare.equipment import Equipment
from nbaccel.train.prepare.optimizer import PreparedOptimizer

__all__ = ["Stepper"]


class Stepper:
    """Combines the equipment of one Accelerator into the calls of a training step."""

    def __init__(self, equipment: Equipment) -> None:
        self._equipment = equipment

    # -- blocks

    def accumulate(self, models: Sequence[Module]) -> AbstractContextManager[None]:
        """Return the block for one batch of `models`; without them of all prepared ones."""
        context = self._equipment.accumulating
        context.models = models or self._equipment.prepared.models
        return context

    def no_sync(self, models: Sequence[Module]) -> AbstractContextManager[Any]:
        """Return a block in which gradients of `models` stay unsynchronised; without them of all prepared ones."""
        equipment = self._equipment
        return NoSync(equipment.accumulation, equipment.strategy, models or equipment.prepared.models)

    def hold(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which gradients of `model` stay in their rank, and steps count as steps."""
        return Local(self._equipment.accumulation, self._equipment.strategy.no_sync(model))

    # -- the backward, which the Accelerator itself calls: it has few frames of ours

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Report `loss`; return it divided by the length of the window, and scaled for fp16."""
        equipment = self._equipment
        accumulation = equipment.accumulation
        divisor = accumulation.enter_backward()
        reports.record_loss(equipment.watch.see(loss), accumulation.clock.step)
        if divisor != 1:
            loss = loss / divisor
        return equipment.precision.scale(loss) if equipment.precision.scales else loss

    def end_backward(self) -> None:
        """Count the step, or the part of a batch, that the backward has ended."""
        accumulation = self._equipment.accumulation
        window = accumulation.window
        if window.sync and not accumulation.is_held:
            accumulation.clock.train()
        elif window.comes_in_parts:
            window.after_backward()

    # -- gradients

    def unscale(self, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
        """Unscale the gradients of `optimizer`: one, several, or None for all prepared ones."""
        if optimizer is None:
            optimizer = self._equipment.prepared.optimizers
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self._refuse_unscaled()
        inner = [one.optimizer if isinstance(one, PreparedOptimizer) else one for one in given]
        self._equipment.precision.unscale(inner)

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float, is_complete: bool
    ) -> Tensor:
        """Clip gradients to `max_norm` if the window `is_complete`; return their norm before."""
        parameters = _listed(parameters)
        if is_complete:
            self._unscale_those_of(parameters)
            return self._equipment.strategy.clip_grad_norm_(parameters, max_norm, norm_type)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        return norm / self._equipment.precision.scale(torch.ones_like(norm))

    def clip_values(self, parameters: Iterable[Tensor] | Tensor, clip_value: float, is_complete: bool) -> None:
        """Clip each gradient to +-`clip_value` if the window `is_complete`."""
        parameters = _listed(parameters)
        if is_complete:
            self._unscale_those_of(parameters)
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _refuse_unscaled(self) -> None:
        if self._equipment.precision.expects_scaled:
            for prepared in self._equipment.prepared.optimizers:
                prepared.refuse_unscaled()

    def _unscale_those_of(self, parameters: Sequence[Tensor]) -> None:
        self._refuse_unscaled()
        optimizers = [prepared.optimizer for prepared in self._equipment.prepared.optimizers]
        self._equipment.precision.unscale(optimizers, parameters)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
