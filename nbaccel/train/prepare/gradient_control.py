"""GradientControl: the part of an Accelerator that holds back, unscales and clips gradients. Runs in ranks.

The accumulation decides when gradients synchronise, the precision scales, the strategy clips. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.train.prepare.contexts import Local, NoSync
from nbaccel.train.prepare.optimizer import PreparedOptimizer
from nbaccel.train.prepare.training_context import TrainingContext

__all__ = ["GradientControl"]


class GradientControl:
    """Holds back, unscales and clips the gradients of what one Accelerator has prepared."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context

    # -- blocks

    def no_sync(self, models: Sequence[Module]) -> AbstractContextManager[Any]:
        """Return a block in which gradients of `models` stay unsynchronised; without them of all prepared ones."""
        context = self._context
        return NoSync(context.accumulation, context.strategy, models or context.prepared.models)

    def hold(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which gradients of `model` stay in their rank, and steps count as steps.

        Raises:
            NotImplementedError: No rank has gradients, or a model, of its own.
        """
        strategy = self._context.strategy
        if not strategy.holds_gradients:
            raise NotImplementedError(
                f"hold_gradients, LocalSGD: with {type(strategy).__name__} no rank has gradients of its own to step "
                'with. strategy="ddp" has'
            )
        return Local(self._context.accumulation, self._context.strategy.no_sync(model))

    # -- gradients

    def unscale(self, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
        """Unscale the gradients of `optimizer`: one, several, or None for all prepared ones."""
        if optimizer is None:
            optimizer = self._context.prepared.optimizers
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self._refuse_unscaled()
        inner = [one.optimizer if isinstance(one, PreparedOptimizer) else one for one in given]
        self._context.precision.unscale(inner)

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float, is_complete: bool
    ) -> Tensor:
        """Clip gradients to `max_norm` if the window `is_complete`; return their norm before."""
        parameters = _listed(parameters)
        if is_complete:
            self._unscale_those_of(parameters)
            return self._context.strategy.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = self._context.strategy.norm(parameters, norm_type)
        return norm / self._context.precision.scale(torch.ones_like(norm))

    def clip_values(self, parameters: Iterable[Tensor] | Tensor, clip_value: float, is_complete: bool) -> None:
        """Clip each gradient to +-`clip_value` if the window `is_complete`."""
        parameters = _listed(parameters)
        if is_complete:
            self._unscale_those_of(parameters)
            self._context.strategy.clip_grad_value_(parameters, clip_value)

    def _refuse_unscaled(self) -> None:
        if self._context.precision.expects_scaled:
            for prepared in self._context.prepared.optimizers:
                prepared.refuse_unscaled()

    def _unscale_those_of(self, parameters: Sequence[Tensor]) -> None:
        self._refuse_unscaled()
        optimizers = [prepared.optimizer for prepared in self._context.prepared.optimizers]
        self._context.precision.unscale(optimizers, parameters)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
