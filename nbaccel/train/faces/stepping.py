"""Stepping: the user's calls of a training step on an `Accelerator`. Runs in ranks.

Each is a few lines over the parts: the accumulation decides when gradients synchronise, the precision scales, the
strategy runs backwards and steps, the watch checks losses. Nothing is decided here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.events import reports
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.prepare.contexts import Local, NoSync
from nbaccel.train.prepare.equipment import Equipment
from nbaccel.train.prepare.models import is_spread, recompute_activations
from nbaccel.train.prepare.optimizer import PreparedOptimizer
from nbaccel.train.step.kwargs_handlers import AutocastKwargs

__all__ = ["Stepping"]


class Stepping(ProcessControl):
    """`accumulate`, `backward`, clipping and related methods."""

    _equipment: Equipment
    _is_ready: bool
    """True if this process may train; otherwise `_make_ready` is called first."""

    @abstractmethod
    def _equip(self) -> None:
        """Make the parts above, unless they exist."""

    @abstractmethod
    def _make_ready(self, call: str, models: Sequence[Module] = ()) -> None:
        """Find this process's world before its first step, or refuse to train in it."""

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends a step: its backward synchronises, and optimizers step.

        Set it in programs that decide that for the current batch themselves.
        """
        return self._equipment.accumulation.window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self._equipment.accumulation.window.sync = sync

    @property
    def step(self) -> int:
        """Batches of the open window with the current one; 0 at the one that ends it, and where each batch is a step.

        Accelerate continues to count after the window: its ``accelerator.step %
        accelerator.gradient_accumulation_steps`` is this number.
        """
        return self._equipment.accumulation.window.position

    def accumulate(self, *models: Module) -> AbstractContextManager[None]:
        """Return a block for one batch of an accumulation window; gradients synchronise at the window's last batch.

        That batch is the current one at the block's first backward, whether it was taken before the block or inside it.
        The last batch of a prepared loader ends its window, unless the `GradientAccumulationPlugin` says otherwise.
        Batches of several loaders that the same models train on in turn share one window; the last batch of any of
        these loaders ends it. Models that have a block each on the same batch have windows of their own. Without
        `models` the block is for all prepared ones.
        """
        if not self._is_ready:
            self._make_ready("accumulate", models)
        context = self._equipment.accumulating
        context.models = models or self._equipment.prepared.models
        return context

    def no_sync(self, model: Module | None = None, *models: Module) -> AbstractContextManager[None]:
        """Let backward leave gradients unsynchronised while entered, for windows that the program counts itself.

        model, models: the models concerned; None for all prepared ones.
        """
        named = models if model is None else (model, *models)
        if not self._is_ready:
            self._make_ready("no_sync", named)
        return NoSync(self._equipment.accumulation, self._equipment.strategy, named or self._equipment.prepared.models)

    def hold_gradients(self, model: Module) -> AbstractContextManager[None]:
        """Return `no_sync` for trainings that exchange parameters instead: the steps inside count as steps."""
        if not self._is_ready:
            self._make_ready("hold_gradients", [model])
        return Local(self._equipment.accumulation, self._equipment.strategy.no_sync(model))

    def trigger_sync_in_backward(self, model: Module) -> AbstractContextManager[None]:
        """Let backward synchronise all gradients of `model` while entered, also of forwards made under `no_sync`.

        For several forwards whose backwards come later: the last backward must synchronise. Collective.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> with accelerator.no_sync(model):
        ...     losses = [model(torch.ones(1, 1)).sum() for _ in range(2)]
        ...     accelerator.backward(losses[0])
        >>> with accelerator.trigger_sync_in_backward(model):
        ...     accelerator.backward(losses[1])
        """
        if not self._is_ready:
            self._make_ready("trigger_sync_in_backward", [model])
        return self._equipment.strategy.sync_in_backward(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward()``, scaled for fp16 and divided by the length of the accumulation window.

        A loop that calls ``loss.backward()`` itself trains too, without these two: its steps are counted where a
        prepared optimizer takes them, and a warning says what is missed. Under fp16, and while batches come in parts,
        it is refused.

        kwargs go to ``loss.backward``. A loss that is NaN or infinite is reported, see `Accelerator`'s `on_nan`.
        Collective at a window's end.
        """
        if not self._is_ready:
            self._make_ready("backward")
        accumulation = self._equipment.accumulation
        window = accumulation.window
        divisor = accumulation.enter_backward()
        reports.record_loss(self._equipment.watch.see(loss), accumulation.clock.step)
        if divisor != 1:
            loss = loss / divisor
        if self._equipment.precision.scales:
            loss = self._equipment.precision.scale(loss)
        self._equipment.strategy.backward(loss, **kwargs)
        if window.sync and not accumulation.is_held:
            accumulation.clock.train()
        elif window.comes_in_parts:
            window.after_backward()

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refuse LOMO, which steps inside of its backward, before ranks could exchange gradients.

        Raises:
            NotImplementedError: always; names an alternative.
        """
        raise NotImplementedError(
            "accelerator.lomo_backward: nbaccel does not train with LOMO, which steps inside of its backward. In one "
            "process call optimizer.fused_backward(loss, learning_rate) yourself; else use accelerator.backward(loss) "
            "with an optimizer of small state, such as torch.optim.Adafactor."
        )

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None, *, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Return the context of the run's precision, for code outside of a prepared model's forward; it nests.

        autocast_handler: options of this block; by default those of ``kwargs_handlers``.
        enabled: False is short for ``AutocastKwargs(enabled=False)``.

        >>> from nbaccel import Accelerator
        >>> with Accelerator(mixed_precision="bf16").autocast():
        ...     torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype
        torch.bfloat16
        """
        self._equip()
        if autocast_handler is None and not enabled:
            autocast_handler = AutocastKwargs(enabled=False)
        return self._equipment.precision.autocast(autocast_handler)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with ``mixed_precision="fp16"``; it is updated before the first loss after a step.

        A program may set its own scaler, between two steps.
        """
        self._equip()
        return getattr(self._equipment.precision, "scaler", None)

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._equip()
        self._equipment.precision.take_scaler(scaler)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale the gradients of `optimizer` (one, several, or None for all prepared ones).

        Only fp16 scales them. They are unscaled once per step, however often this is called; clipping does it too. Call
        it where `sync_gradients` is true.
        """
        self._equip()
        if optimizer is None:
            optimizer = self._equipment.prepared.optimizers
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self._refuse_unscaled()
        self._equipment.precision.unscale(
            [one.optimizer if isinstance(one, PreparedOptimizer) else one for one in given]
        )

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of the whole window to `max_norm`; return their norm before, a 0-d tensor.

        Inside a window, where gradients are not complete, nothing is clipped; the norm so far is returned.
        """
        parameters = self._clippable(parameters, "clip_grad_norm_")
        if self.sync_gradients:
            self._unscale_those_of(parameters)
            return self._equipment.strategy.clip_grad_norm_(parameters, max_norm, norm_type)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        return norm / self._equipment.precision.scale(torch.ones_like(norm))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient of the whole window to +-`clip_value`; inside a window nothing happens."""
        parameters = self._clippable(parameters, "clip_grad_value_")
        if self.sync_gradients:
            self._unscale_those_of(parameters)
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _clippable(self, parameters: Iterable[Tensor] | Tensor, call: str) -> list[Tensor]:
        if not self._is_ready:
            self._make_ready(call)
        return [parameters] if isinstance(parameters, Tensor) else list(parameters)

    def _refuse_unscaled(self) -> None:
        if self._equipment.precision.expects_scaled:
            for prepared in self._equipment.prepared.optimizers:
                prepared.refuse_unscaled()

    def _unscale_those_of(self, parameters: Sequence[Tensor]) -> None:
        self._refuse_unscaled()
        self._equipment.precision.unscale(
            [prepared.optimizer for prepared in self._equipment.prepared.optimizers], parameters
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any prepared optimizer was left out: infinite fp16 gradients, or `on_nan`."""
        return any(optimizer.step_was_skipped for optimizer in self._equipment.prepared.optimizers)

    def gradient_checkpointing(self, model: Module, blocks: Iterable[Module] | None = None) -> Module:
        """Let `model` compute activations again in its backward instead of keeping them; return the same `model`.

        A model that can do so itself (transformers) is told to. In others each of `blocks` is recomputed as a
        whole: by default the members of their outermost ``ModuleList``s and
        ``Sequential``s. Before or after `prepare`; works with DDP and accumulation, since nothing is reentrant.

        Raises:
            ValueError: no blocks were given, and none were found.
        """
        self._equip()
        recompute_activations(self._equipment.strategy.unwrap(model), blocks)
        return model

    def verify_device_map(self, model: Module) -> bool:
        """Return whether `model`, or a module in it, is on several devices, as with ``device_map="auto"``."""
        return any(is_spread(module) for module in model.modules() if hasattr(module, "hf_device_map"))
