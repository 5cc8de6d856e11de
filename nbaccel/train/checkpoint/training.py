"""Training: the parts of one Accelerator that are saved and restored together. Runs in ranks; opens no file.

It collects their state as a `Content` and loads it again, and knows the moment of a save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from nbaccel.train.accumulation import Accumulation
from nbaccel.train.checkpoint.content import Content
from nbaccel.train.checkpoint.generators import Stamp, State, read
from nbaccel.train.checkpoint.lineage import Lineage
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.precision import Precision
from nbaccel.train.prepared import Prepared
from nbaccel.train.resuming import Epochs, Remembered
from nbaccel.train.strategies import Strategy
from nbaccel.world import World

__all__ = ["Training"]


@dataclass(frozen=True, slots=True)
class Training:
    """Prepared objects, the parts that count, scale and distribute the training, and the position of the program."""

    prepared: Prepared
    accumulation: Accumulation
    precision: Precision
    strategy: Strategy
    world: World
    device: torch.device
    epochs: Epochs
    remembered: Remembered
    lineage: Lineage

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self.accumulation.clock.done

    def stamp(self, save: str = "") -> Stamp:
        """Return the name of a save that is made now, equal on all ranks.  save: see `Stamp`."""
        lineage = self.lineage
        run = lineage.run if lineage.is_agreed else self.world.launch_id
        if lineage.turns:
            run = f"{run or '?'}.{lineage.turns}"
        return Stamp(self.step, self.accumulation.window.unfinished, run, save)

    def weights(self) -> list[dict[str, Any]]:
        """Return each model's state dict, as a single process would save it. Collective with sharded strategies."""
        return self.prepared.model_states(self.strategy)

    @property
    def is_inside_epoch(self) -> bool:
        """True if a resumed program continues in the current epoch, although its training loader may be exhausted.

        That is so while a loader is iterated; what follows the training, such as an evaluation, is repeated then.
        """
        return self.epochs.is_used and self.accumulation.is_iterating

    def generators(self) -> State:
        """Return this process's random states, as they were where a resumed program continues."""
        may_come_again = self.epochs.is_used and self.accumulation.is_at_beginning
        kept = self.accumulation.clock.kept if may_come_again else None
        return read(self.device) if kept is None else kept

    def content(self, weights: list[dict[str, Any]], customs: Sequence[Any]) -> Content:
        """Return all states but the random ones; batches of an open accumulation window count as not yet seen."""
        prepared, epochs, accumulation = self.prepared, self.epochs, self.accumulation
        is_inside = self.is_inside_epoch
        return Content(
            weights,
            [optimizer.state_dict() for optimizer in prepared.optimizers],
            [scheduler.state_dict() for scheduler in prepared.schedulers],
            [custom.state_dict() for custom in customs],
            {
                "step": self.step,
                "models": len(prepared.models),  # hooks may take some of them out of what is written
                "epoch": epochs.under_way if is_inside else epochs.next(accumulation.clock),
                "seed": torch.initial_seed(),
                "precision": self.precision.state_dict(),
                "loaders": prepared.loader_states(accumulation.window, epochs.passes_before if is_inside else None),
            },
            self.remembered.state_dict(),
            prepared.frozen(self.strategy),
        )

    def manifest(self, content: Content, stamp: Stamp) -> Manifest:
        loaders = content.progress["loaders"]
        first = loaders[0] if loaders else {"epoch": 0, "batches": 0}
        return Manifest(
            str(stamp),
            self.step,
            first["epoch"],
            first["batches"],
            self.world.world_size,
            {"mixed_precision": self.precision.name, "gradient_accumulation_steps": self.accumulation.steps},
            run=self.lineage.run,
            ancestors=dict(self.lineage.ancestors),
        )

    def take(self, content: Content, models: Sequence[Module], options: Mapping[str, Any]) -> None:
        """Continue from `content`.

        models: those that its model states belong to; a hook may have filled the others already.
        options: for their ``load_state_dict``.
        Raises:
            ValueError: other objects were prepared when it was written.
        """
        self.prepared.load(content, models, self.strategy, options)
        progress = content.progress
        if progress.get("precision"):
            self.precision.load_state_dict(progress["precision"])
        clock = self.accumulation.clock
        clock.step = clock.began = progress.get("step", clock.step)
        clock.trained = False
        self.epochs.load(progress.get("epoch", 0), clock)
        self.remembered.load_state_dict(content.remembered)
