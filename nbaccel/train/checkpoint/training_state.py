"""Parts of one Accelerator that are saved and restored together. Runs in ranks; opens no file.

`TrainingState` collects their state as a `Content` and loads it again, and knows the moment of a save. The epoch with
which a program continues (`Epochs`), and values it keeps between its steps (`Remembered`), are saved with every
checkpoint and restored with it. The position inside the epoch is the loaders' part, and the files are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.train.checkpoint.generators import State, read
from nbaccel.train.checkpoint.manifest import Lineage, Manifest, Stamp
from nbaccel.train.checkpoint.shard_facts import holds_shards, is_sharded_module, may_be_sharded
from nbaccel.train.prepare.prepared import Prepared, frozen_names
from nbaccel.train.step.accumulation import Accumulation, StepClock
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy

if TYPE_CHECKING:
    from nbaccel.train.checkpoint.content import Content
    from nbaccel.train.data.loader import PreparedLoader

__all__ = [
    "Epochs",
    "Remembered",
    "TrainingState",
    "describe_position",
]


@frozen
class TrainingState:
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
        """Return the name of a save that is made now, equal on all ranks.

        Args:
            save: See `Stamp`.
        """
        lineage = self.lineage
        run = lineage.run if lineage.is_agreed else self.world.launch_id
        if lineage.turns:
            run = f"{run or '?'}.{lineage.turns}"
        return Stamp(self.step, self.accumulation.window.unfinished, run, save)

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a part of its own of a prepared model or optimizer, equally on all ranks."""
        prepared = self.prepared
        if self.strategy.saves_together:
            return True
        if not may_be_sharded():
            return False
        groups = (group for optimizer in prepared.optimizers for group in optimizer.param_groups)
        return any(map(is_sharded_module, prepared.models)) or any(holds_shards(group["params"]) for group in groups)

    def weights(self) -> list[dict[str, Any]]:
        """Return each model's state dict; tensors of a sharded model are sharded in it. No collective."""
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
        from nbaccel.train.checkpoint.content import Content

        prepared, epochs, accumulation = self.prepared, self.epochs, self.accumulation
        is_inside = self.is_inside_epoch
        return Content(
            weights,
            [self.strategy.optimizer_state_dict(optimizer.optimizer) for optimizer in prepared.optimizers],
            [scheduler.state_dict() for scheduler in prepared.schedulers],
            [custom.state_dict() for custom in customs],
            {
                "step": self.step,
                "models": len(prepared.models),  # hooks may take some of them out of what is written
                **prepared.bases_left_out(self.strategy),
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

        Args:
            models: Those that its model states belong to; a hook may have filled the others already.
            options: For their ``load_state_dict``.

        Raises:
            ValueError: Other objects were prepared when it was written.
        """
        self._load(content, models, options)
        progress = content.progress
        if progress.get("precision"):
            self.precision.load_state_dict(progress["precision"])
        clock = self.accumulation.clock
        clock.step = clock.began = progress.get("step", clock.step)
        clock.trained = False
        self.epochs.load(progress.get("epoch", 0), clock)
        self.remembered.load_state_dict(content.remembered)

    def _base_left_out(self, model: Module, content: Content) -> frozenset[str]:
        """Return the names of the base of `model`, if `content` has been saved without it; empty if it is whole.

        Raises:
            ValueError: It was saved without another base than that of `model`.
        """
        bases = content.progress.get("bases", ())
        pairs = zip(self.prepared.models, bases, strict=False)
        stored = next((facts for known, facts in pairs if known is model), None)
        if stored is None:
            return frozenset()
        module = self.strategy.unwrap(model)
        base = self.prepared.base_of(model, self.strategy) or frozen_names(module)  # the same base, not quantised
        self.prepared.bases.facts(module, base).refuse_another(stored, type(module).__name__)
        return base

    def reorders(self, content: Content) -> bool:
        """Return whether a loader saved in the middle of an epoch now gets its order in another way.

        One process has plain PyTorch's order, several have one that follows from a shared seed.
        """
        return any(
            state["batches"]
            and not state.get("is_over")
            and (state["seed"] is None) != (loader.state_dict()["seed"] is None)
            for loader, state in zip(self.prepared.loaders, content.progress.get("loaders", ()), strict=False)
        )

    def _load(self, content: Content, models: Sequence[Module], options: Mapping[str, Any]) -> None:
        """Load the states of prepared objects; the arguments are those of `take`.

        Raises:
            ValueError: The number of objects differs.
        """
        from nbaccel.train.checkpoint.model_weights import load_trained, with_tied, without_base
        from nbaccel.train.checkpoint.shards import load_module, load_optimizer, loadable

        prepared, strategy = self.prepared, self.strategy
        for kind, things, states in (
            ("model", models, content.models),
            ("optimizer", prepared.optimizers, content.optimizers),
            ("scheduler", prepared.schedulers, content.schedulers),
        ):
            if len(states) != len(things):
                raise ValueError(
                    f"the checkpoint holds {len(states)} {kind}(s), and {len(things)} are prepared: "
                    "prepare the same ones, in the same order, before load_state"
                )
        by_rows = (content.is_stored or self.is_sharded) and not strategy.saves_together
        for model, state in zip(models, content.models, strict=True):
            module = strategy.unwrap(model)
            if strategy.saves_together:
                strategy.load_state_dict(model, loadable(state), **options)
            elif by_rows:
                load_module(module, with_tied(module, state), **options)
            elif base := self._base_left_out(model, content):
                load_trained(module, with_tied(module, state), base, **options)
            elif base := prepared.base_of(model, strategy):
                load_trained(module, without_base(module, with_tied(module, state), base), base, **options)
            else:
                strategy.load_state_dict(model, with_tied(module, state), **options)
        for optimizer, state in zip(prepared.optimizers, content.optimizers, strict=True):
            if by_rows:
                load_optimizer(optimizer, state)
            else:
                strategy.load_optimizer_state_dict(optimizer.optimizer, loadable(state))
        for scheduler, state in zip(prepared.schedulers, content.schedulers, strict=True):
            scheduler.load_state_dict(state)
        # An evaluation that prepares fewer loaders than the training did may load its checkpoint.
        for loader, state in zip(prepared.loaders, content.progress.get("loaders", ()), strict=False):
            loader.restore(state)


def describe_position(step: int, loaders: Sequence[PreparedLoader]) -> str:
    """Return where a training continues, as the panel shows it: "step 92, epoch 3, batch 28/32".

    Epochs are counted from 1, and batches are those of one rank: of the loader whose epoch is in progress. With several
    loaders that is the one that has come furthest in its epoch; an evaluation starts from its beginning.
    """
    if not loaders:
        return f"step {step:,}"
    epoch, done, batches = max((loader.goes_on_at for loader in loaders), key=lambda place: place[1])
    return f"step {step:,}, epoch {epoch + 1:,}, batch {done:,}" + ("" if batches is None else f"/{batches:,}")


class Remembered(SimpleNamespace):
    """Values of the program's own, as attributes; `Accelerator.remember` makes it.

    Example:
        >>> memory = Remembered()
        >>> memory.keep(best=0.0, history=[])
        >>> memory.history.append(0.5)
        >>> memory.state_dict()
        {'best': 0.0, 'history': [0.5]}
    """

    def keep(self, **defaults: Any) -> None:
        """Set `defaults` where there is no value of that name yet, from a checkpoint or an earlier call."""
        for name, value in defaults.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Epochs:
    """Epochs of a program that can be resumed: the loop's number, and whether its training is done.

    Attributes:
        under_way: The epoch that the loop is in, or will begin with.
        is_used: The program has such a loop.
        passes_before: Iterations that had trained when the epoch began, by the clock's count.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.is_used = False
        self._is_resumed = False
        self.passes_before = 0

    def run(self, count: int, accumulation: Accumulation) -> Iterator[int]:
        """Yield 0, 1, ... `count` - 1; after `load` begin with the epoch in which the checkpoint was written.

        Loops over prepared loaders report these epochs until this loop ends or is left.
        """
        self.is_used = True
        clock = accumulation.clock
        first, self._is_resumed = self.under_way if self._is_resumed else 0, False
        try:
            for self.under_way in range(first, count):
                self.passes_before = clock.passes
                clock.keep()
                accumulation.epoch, accumulation.epochs = self.under_way, count
                yield self.under_way
        finally:
            accumulation.epoch = accumulation.epochs = None
        self.under_way = max(first, count)
        self.passes_before = clock.passes

    def next(self, clock: StepClock) -> int:
        """Return the epoch in which a resumed program begins. An epoch whose training is complete is not repeated."""
        return self.under_way + int(clock.passes > self.passes_before)

    def load(self, epoch: int, clock: StepClock) -> None:
        self.under_way = epoch
        self._is_resumed = True
        self.passes_before = clock.passes
