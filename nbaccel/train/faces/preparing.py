"""Preparing: the user's methods that prepare models, optimizers, loaders and schedulers for a run. Run in ranks.

Another module prepares each kind; this one decides only the order, and calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbaccel.train.compiling import Compiling
from nbaccel.train.data.unprepared import watch_loaders
from nbaccel.train.faces.loading import Loading
from nbaccel.train.finite import LossWatch
from nbaccel.train.models import admit, may_move
from nbaccel.train.optimizer import PreparedOptimizer, PreparedScheduler, follow_parameters
from nbaccel.train.precision import Precision, restore_forward
from nbaccel.train.prepared import remembered
from nbaccel.train.raw import RawSteps
from nbaccel.train.strategies import Strategy

__all__ = ["Preparing"]


class Preparing(Loading):
    """`prepare`, and its variants for one object of a known kind."""

    step_scheduler_with_optimizer: bool
    _compiling: Compiling
    _precision: Precision
    _strategy: Strategy
    _raw_steps: RawSteps
    _watch: LossWatch

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return models, optimizers, loaders and schedulers prepared for this run, in the order given; collective.

        Other objects are returned unchanged, and so is what is prepared already. One argument gives one object.
        device_placement: for each object, whether to move it to the device.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(objects)} objects")
        self._join_world()
        moves = device_placement or [self.device_placement] * len(objects)
        prepared = [self._prepare_one(thing, move) for thing, move in zip(objects, moves, strict=True)]
        # Schedulers come last: they follow prepared optimizers, which may come after them in the call.
        prepared = [self._prepare_scheduler(thing) for thing in prepared]
        self._bring_states()
        self._resume_if_complete()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_one(self, thing: Any, move: bool) -> Any:
        if isinstance(thing, Module):
            return self._prepare_model(thing, move)
        if isinstance(thing, Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            return self._prepare_loader(thing, move)
        return thing

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Module:
        """Return `model` on the device, in the run's precision and strategy. Collective where there are peers.

        device_placement: whether to move it; by default the Accelerator's choice. Quantised models and those
        on several devices are not moved.
        evaluation_mode: for inference only: gradients will not synchronise, and no rank waits for another.

        Raises:
                ValueError: the model is spread over several devices, and there are several processes.
        """
        self._join_world()
        move = self.device_placement if device_placement is None else device_placement
        prepared = self._prepare_model(model, move, evaluation_mode)
        self._bring_states()
        self._resume_if_complete()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Return `optimizer` as one that steps when gradients are synchronised. Every rank calls it.

        device_placement: accepted as by Accelerate; an optimizer's state follows its parameters.
        """
        self._join_world()
        prepared = self._prepare_optimizer(optimizer)
        self._bring_states()
        self._resume_if_complete()
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Return `scheduler` as one that moves when its optimizer steps; prepare the optimizer first. On every rank."""
        self._join_world()
        prepared: PreparedScheduler = self._prepare_scheduler(scheduler)
        self._resume_if_complete()
        return prepared

    def _prepare_model(self, model: Module, move: bool, evaluation_mode: bool = False) -> Module:
        if any(model is known for known in self._prepared.models):
            return model
        model = admit(model, self.world, self.device)
        if move and may_move(model):
            model.to(self.device)
        restore_forward(self._strategy.unwrap(model))  # of another precision, before
        self._precision.wrap_forward(self._strategy.unwrap(model))
        if not evaluation_mode:
            self._agree_on_names()
            self.collectives.agree(f"prepare {type(model).__name__} of {len(list(model.parameters()))} parameters")
            model = self._strategy.setup(model)
        model = self._compiling.compiled(model)
        self._prepared.models.append(model)
        if not evaluation_mode:
            watch_loaders(self.world, self._accumulation)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.accumulation is self._accumulation:
                return remembered(optimizer, self._prepared.optimizers)
            optimizer = optimizer.optimizer  # prepared by another Accelerator, or for another world
        return remembered(
            PreparedOptimizer(
                optimizer, self._accumulation, self._precision, self._strategy, self._watch, self._raw_steps
            ),
            self._prepared.optimizers,
        )

    def _bring_states(self) -> None:
        """Move optimizer states to their parameters, since a model may be moved after its optimizer was prepared."""
        for optimizer in self._prepared.optimizers:
            follow_parameters(optimizer.optimizer)

    def _prepare_scheduler(self, thing: Any) -> Any:
        if isinstance(thing, PreparedScheduler):
            if thing.accumulation is self._accumulation:
                return remembered(thing, self._prepared.schedulers)
            thing = thing.scheduler
        if not isinstance(thing, LRScheduler):
            return thing
        moves = 1 if self.split_batches else self.num_processes
        if not self.step_scheduler_with_optimizer:
            moves = 0
        scheduler = PreparedScheduler(thing, self._prepared.optimizers, self._accumulation, moves)
        return remembered(scheduler, self._prepared.schedulers)
