"""Whole batches: the gate of a usual run, which hands batches out as they are. Runs in ranks.

It tells the launcher of each loop how its batches could be cut, for a run that is started again after it ran out of
memory; `split_batches` cuts them then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from nbaccel.base.events import LoopEntered
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.oom.microbatch.slicing import BatchCut
from nbaccel.train.prepare.prepared import Prepared
from nbaccel.train.step.accumulation import Gate, GradientAccumulationPlugin, Window
from nbaccel.train.strategies import Strategy

__all__ = ["WholeBatches"]


class WholeBatches(Gate):
    """Hands out batches as they are, and reports of each loop what can be cut in it.

    What was prepared refers to this gate, so the gate refers to it weakly: a model is freed when the program drops it.
    """

    def __init__(self, prepared: Prepared, strategy: Strategy, parts: int = 1) -> None:
        self._prepared_of = weakref.ref(prepared)
        self._strategy = strategy
        self._parts = parts

    def window(
        self, source: PreparedLoader, batches_left: int | None, rules: GradientAccumulationPlugin, steps: int
    ) -> Window:
        window = Window(source, batches_left, rules)
        window.loop = self._report(source, steps)
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared_of": self._prepared()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _prepared_of=weakref.ref(state["_prepared_of"]))

    def _prepared(self) -> Prepared:
        """Return what the Accelerator prepared; nothing if that is gone."""
        return self._prepared_of() or Prepared()

    def _report(self, loader: PreparedLoader, steps: int) -> LoopEntered:
        obstacle, cut = self._obstacle(loader), self._cut(loader)
        if not obstacle and cut.part_size == 1:
            obstacle = "its batches, or the parts of them, are single samples already"
        return LoopEntered(
            samples=loader.rank_batch_size,
            parts=cut.parts,
            batches_per_step=steps,
            obstacle=obstacle,
            batch_norms=[] if obstacle else _batch_norms(self._prepared().models),
        )

    def _obstacle(self, loader: PreparedLoader) -> str:
        """Return why batches of an iteration that begins now are handed out whole; empty if they can be cut.

        A model in evaluation mode shows that the loop does not train, even where gradients are on: many loops turn
        them off around the forward only.
        """
        prepared = self._prepared()
        if not prepared.optimizers:
            return "no optimizer is prepared, so none would wait for the last part of a batch"
        if not torch.is_grad_enabled() or not any(model.training for model in prepared.models or [torch.nn.Identity()]):
            return "the loop does not train, and an evaluation is not cut (give its loader a smaller batch_size)"
        return ""

    def _cut(self, loader: PreparedLoader) -> BatchCut:
        is_level = not (loader.world.is_distributed and loader.may_be_uneven)
        return BatchCut(self._parts, loader.rank_batch_size, is_level)


def _batch_norms(models: Iterable[Module]) -> list[str]:
    """Return the names of layers in training mode that compute with the statistics of a batch."""
    return [
        name.removeprefix("module.")
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
