"""Lifecycle: how an Accelerator comes into the world of a process, and ends a training. Runs in ranks and kernels.

It binds the parts to a world at their first use, makes what depends on the device, joins the process group, and refuses
to train N separate models. In a notebook kernel it touches no device until something is used; in a forked or unpickled
rank it finds that rank's world at the first use there.

The Accelerator owns it. Its parts do not hold it: they are bound by it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from torch.nn import Module

from nbaccel.base.events import LoopKind, TrainingMode, emit
from nbaccel.base.settings import FSDP, PARTITIONING, RunSettings
from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared
from nbaccel.train.checkpoint.manager import Checkpoints
from nbaccel.train.checkpoint.manifest import Lineage
from nbaccel.train.checkpoint.resume import ResumePolicy, Weakly
from nbaccel.train.checkpoint.training_state import TrainingState
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.oom.whole_batches import WholeBatches
from nbaccel.train.prepare.loss_watch import ON_NAN
from nbaccel.train.prepare.models import TorchDynamoPlugin
from nbaccel.train.prepare.training_context import TrainingContext
from nbaccel.train.step.accumulation import Accumulation, GradientAccumulationPlugin
from nbaccel.train.step.kwargs_handlers import Handlers, KwargsHandler
from nbaccel.train.step.raw_loop_hooks import step_back
from nbaccel.train.strategies import plugin_class, strategy_class

__all__ = [
    "Choices",
    "Lifecycle",
]

_UNCHOSEN = RunSettings(mixed_precision="no", gradient_accumulation_steps=1)

_NOTHING_TO_SHARD = 'strategy="fsdp": one process has nothing to shard over, so it holds the whole model.'

_PREPARE_LINE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


@frozen
class Choices:
    """The program's choices that hold in every world of its Accelerator.

    Args:
        asked: Choices that a launch can make too; None where the program left them open.
        plugin: Options of the strategy, see `Strategy.plugin_class`; None where the program gave none.
    """

    asked: RunSettings
    rules: GradientAccumulationPlugin
    dynamo: TorchDynamoPlugin
    handlers: Handlers
    on_nan: str
    plugin: Any = None

    @classmethod
    def of(
        cls,
        asked: RunSettings,
        plugin: GradientAccumulationPlugin | None,
        handlers: Sequence[KwargsHandler] | None,
        dynamo_backend: str | None,
        dynamo_plugin: TorchDynamoPlugin | None,
        on_nan: str,
        plugins: Mapping[str, Any],
    ) -> Self:
        """Return the choices that arguments of `Accelerator` describe.

        Raises:
            ValueError: A value is not valid, or two of them say the same, or contradict each other.
            TypeError: A plugin is something else.
        """
        steps = asked.gradient_accumulation_steps
        rules = plugin or GradientAccumulationPlugin()
        if plugin is not None and steps not in (None, 1):
            raise ValueError(
                f"gradient_accumulation_steps={steps} and a gradient_accumulation_plugin with "
                f"num_steps={rules.num_steps}: give one of them"
            )
        if on_nan not in ON_NAN:
            raise ValueError(f"on_nan must be one of {', '.join(map(repr, ON_NAN))}, got {on_nan!r}")
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ValueError(f"dynamo_backend={dynamo_backend!r} and a dynamo_plugin: give one of them")
        dynamo = dynamo_plugin or TorchDynamoPlugin(dynamo_backend)
        if rules.num_steps is not None:
            asked = replace(asked, gradient_accumulation_steps=rules.num_steps)
        chosen = None
        for name, chosen in ((name, value) for name, value in plugins.items() if value is not None):
            asked = replace(asked, strategy=_strategy_with(name, chosen, asked.strategy))
            if (steps := _steps_of(chosen)) is not None:
                asked = replace(asked, gradient_accumulation_steps=_steps_with(name, steps, asked))
        return cls(asked.over(dynamo.settings()), rules, dynamo, Handlers.of(handlers), on_nan, chosen)


def _strategy_with(name: str, plugin: Any, chosen: str | None) -> str:
    """Check a plugin and the strategy that was chosen beside it; return the strategy that both mean."""
    strategy = name.removesuffix("_plugin")
    wanted = plugin_class(strategy)
    if wanted is None or not isinstance(plugin, wanted):
        kind = type(plugin)
        raise TypeError(
            f"{name} takes a {wanted.__name__ if wanted else 'value'} of nbaccel.utils, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    if chosen not in (None, strategy):
        raise ValueError(
            f'strategy={chosen!r} and a plugin, {name}, which is for strategy="{strategy}": leave one of them out'
        )
    plugin.__post_init__()
    return strategy


def _steps_of(plugin: Any) -> int | None:
    """Return the batches per step that a plugin says; None where it leaves them to the Accelerator."""
    steps = getattr(plugin, "gradient_accumulation_steps", None)
    return None if steps in (None, "auto") else int(steps)


def _steps_with(name: str, steps: int, asked: RunSettings) -> int:
    """Return the batches per step that a plugin and the program mean together."""
    if asked.gradient_accumulation_steps not in (None, 1, steps):
        raise ValueError(
            f"gradient_accumulation_steps={asked.gradient_accumulation_steps}, and the {name} says {steps}: give one "
            "of them"
        )
    return steps


class OfOneTraining(Protocol):
    """A part of an Accelerator that is made when it is first needed, and holds memory of one training."""

    def leave(self) -> None:
        """Forget what belongs to another process, without touching it."""

    def release(self) -> None:
        """Free what the training has left."""


PartT = TypeVar("PartT", bound=OfOneTraining)


class Lifecycle:
    """Binds one Accelerator's parts to the world of this process, and lets go of what they hold.

    Args:
        context: The equipment of the training, which its parts share.

    Attributes:
        is_ready: Whether this process may train; otherwise `make_ready` is called first.
    """

    def __init__(
        self,
        choices: Choices,
        context: TrainingContext,
        checkpoints: Checkpoints,
        resuming: ResumePolicy,
    ) -> None:
        self.context = context
        self.is_ready = False
        self._choices = choices
        self._checkpoints = checkpoints
        self._resuming = resuming
        self._attached: list[OfOneTraining] = []
        self._plugin: Any = choices.plugin
        self._plugins_steps = _steps_of(choices.plugin)
        self._has_chosen_steps = False
        self._bound_to: World | None = None
        _watch_forks(self)

    def attached(self, part: PartT) -> PartT:
        """Return `part`, which is told from now on when the training or the process it belongs to ends."""
        self._attached.append(part)
        return part

    # -- into a world

    @property
    def is_bound(self) -> bool:
        """True if the parts belong to this process's world; a rank binds the notebook's at its first use."""
        return self._bound_to == self.context.world

    def bind(self) -> None:
        """Bind the parts to the world of this process, if not done yet. Touches no device and no process group.

        In another world of the same size, prepared objects stay prepared; otherwise they are forgotten.
        """
        context = self.context
        world = context.world
        bound_to = self._bound_to
        if bound_to == world:
            return
        self.is_ready = False
        for part in self._attached:
            part.leave()
        self._checkpoints.directory.begin(Lineage())
        if bound_to is not None and bound_to.world_size == world.world_size and context.prepared:
            self._bound_to = world
            context.precision.move_to(context.device)
            if context.moves:
                context.prepared.move_to(context.device)
            self._resuming.begin()
            self._open_gate()
            return
        chosen = self._choices.asked.over(RunSettings.from_env())
        kind = strategy_class(world, chosen.strategy).plugin_class
        self._plugin = None if kind is None else self._choices.plugin or kind()
        settings = self._with_plugin(chosen).over(_UNCHOSEN)
        self._bound_to = world  # only now: choices that contradict each other are refused at every use
        context.begin(settings, self._choices.dynamo, self._choices.rules)
        for name in PARTITIONING:
            setattr(context.state, f"{name}_plugin", None)
        if kind is not None:
            setattr(context.state, f"{settings.strategy}_plugin", self._plugin)
        context.state.is_fsdp2 = context.state.fsdp_plugin is not None
        self._resuming.plan(Weakly(self._save_by_itself))

    def _with_plugin(self, chosen: RunSettings) -> RunSettings:
        """Return the choices of a run with those that its plugin makes too."""
        plugin = self._plugin
        if plugin is not None and plugin is not self._choices.plugin:  # which a launch has described
            self._plugins_steps = _steps_of(plugin)
            if self._plugins_steps is not None and not self._has_chosen_steps:
                name = f"configuration of {chosen.strategy}"
                chosen = replace(chosen, gradient_accumulation_steps=_steps_with(name, self._plugins_steps, chosen))
        if hasattr(plugin, "precision_of"):
            chosen = replace(chosen, mixed_precision=plugin.precision_of(chosen.mixed_precision or "no"))
            self.context.state._asked = RunSettings(chosen.mixed_precision)
        return chosen

    def equip(self) -> None:
        """Make the parts that depend on the device, unless they exist."""
        self.bind()
        if not self.context.is_complete:
            plugin = self._plugin
            if plugin is not None:
                plugin.__post_init__()  # programs assign fields until they prepare a model
                steps = _steps_of(plugin)
                if steps not in (self._plugins_steps, None, self.context.accumulation.steps):
                    raise ValueError(
                        f"gradient_accumulation_steps={steps} was assigned to the plugin after the Accelerator was "
                        f"made: assign accelerator.gradient_accumulation_steps = {steps} in its place"
                    )
            elif self.context.settings.strategy == FSDP:
                self.context.state.print(_NOTHING_TO_SHARD)
            self.context.complete(self._choices.handlers, self._choices.on_nan, plugin)
            self._open_gate()

    def join(self) -> None:
        """Join the world as it is now, process group included. Collective where the group is formed."""
        step_back()
        emit(TrainingMode(LoopKind.PREPARED))
        self.context.state.look_again()
        self.equip()
        self.context.state.form_group()

    def make_ready(self, call: str, models: Sequence[Module] = ()) -> None:
        """Find this process's world and refuse N separate trainings; called once per process, before its first step.

        Raises:
            NotPrepared: Several ranks, and a model of which each rank would train a copy of its own.
        """
        context = self.context
        context.state.look_again()
        world, bound_to = context.world, self._bound_to
        place = world.place
        if context.prepared and bound_to is not None and bound_to.world_size != world.world_size:
            raise NotPrepared(
                f"accelerator.{call} in {place}: what this accelerator prepared is for {bound_to.world_size} "
                f"process(es). Prepare it here, before the loop:\n    {_PREPARE_LINE}"
            )
        self.join()
        if world.is_distributed and not context.prepared.is_one_training(models, context.strategy):
            raise NotPrepared(
                f"accelerator.{call} in {place}, but the model is not prepared: every rank would train a model "
                f"of its own. Prepare it before the loop:\n    {_PREPARE_LINE}"
            )
        self._resuming.refuse_half_a_resume()
        self.is_ready = True

    def _open_gate(self) -> None:
        """Set how batches reach the loops in this run, also for loaders that were prepared before it."""
        context, parts = self.context, RunSettings.from_env().split or 1
        if parts == 1:
            context.accumulation.gate = WholeBatches(context.prepared, context.strategy)
        else:
            from nbaccel.train.oom.split_batches import SplitBatches  # see `setup.load_for_ranks`

            context.accumulation.gate = SplitBatches(context.prepared, context.strategy, parts)

    def _save_by_itself(self, target: Path, blocking: bool) -> None:
        self.equip()
        self._resuming.save(target, blocking)

    # -- in a world

    @property
    def accumulation(self) -> Accumulation:
        """The accumulation of this process."""
        self.bind()
        return self.context.accumulation

    def choose_steps(self, steps: int) -> None:
        """Accumulate over `steps` batches, in this world and in others."""
        self.accumulation.steps = steps
        self._has_chosen_steps = True
        self._choices = replace(self._choices, asked=replace(self._choices.asked, gradient_accumulation_steps=steps))

    def training(self) -> TrainingState:
        """Return what is saved and restored together, as it is in this process."""
        self.equip()
        return self._checkpoints.training()

    # -- out of a training

    def let_go(self, things: Sequence[Any]) -> None:
        """Forget those of `things` that are prepared; after the last one also drop what belongs to a training."""
        prepared = self.context.prepared
        self._free_gathered()
        if not (prepared and prepared.drop(things, self.context.strategy)):
            return
        self._release_attached()
        if not prepared:
            self.forget()

    def release(self) -> None:
        """Let prepared models and optimizers outlive the process group, which is about to be destroyed. Collective.

        Models that are plain ones then are not prepared any more: each rank would go on to train its own.
        """
        context = self.context
        if not (context.is_complete and context.prepared):
            return
        strategy = context.strategy
        shared = [model for model in context.prepared.models if strategy.keeps_together(model)]
        optimizers = [prepared.optimizer for prepared in context.prepared.optimizers]
        strategy.release(context.prepared.models, optimizers)
        if plain := [model for model in shared if not strategy.keeps_together(model)]:
            context.prepared.drop(plain, context.strategy)
            self.is_ready = False

    def end(self) -> None:
        """Forget everything prepared; a model of which ranks have only parts becomes whole first, by all ranks."""
        context = self.context
        if context.is_complete and context.strategy.leaves_only_parts and sys.exc_info()[0] is None:
            self.release()  # in a `finally` after an error the other ranks may never come
        self.forget()

    def forget(self) -> None:
        """Forget everything prepared, and wait for the save that is being written."""
        context = self.context
        self._free_gathered()
        self._release_attached()
        if context.is_complete:
            context.accumulating.models = ()  # of a block that was created and not entered
            context.precision.forget()
            context.strategy.forget()
        self._checkpoints.forget()
        context.prepared.forget()
        context.accumulation.forget()
        self.is_ready = False

    def _release_attached(self) -> None:
        for part in self._attached:
            part.release()

    def _free_gathered(self) -> None:
        """Free what forwards of prepared models have gathered: it is no garbage, though no name needs it."""
        if self.context.is_complete and self.context.prepared:
            self.context.strategy.free_gathered(self.context.prepared.models)

    # -- a program that starts again, after an attempt that ran out of memory

    @property
    def everything_prepared(self) -> list[Any]:
        return self.context.prepared.everything

    def forget_all_but(self, known: Sequence[Any]) -> None:
        """Forget what was prepared except `known`, and every open window."""
        self._release_attached()
        self.context.prepared.keep(known)
        self.context.accumulation.forget()
        if self.context.is_complete:
            self.context.precision.forget()
            if not self.context.prepared.models:
                self.context.strategy.forget()

    @property
    def scaling(self) -> dict[str, Any]:
        """The state of the gradient scaler; empty without one. Reading it waits for the device."""
        return self.context.precision.state_dict() if self.context.is_complete else {}

    def scale_like(self, scaling: dict[str, Any]) -> None:
        """Continue with the state `scaling` of another rank's gradient scaler."""
        if scaling and self.context.is_complete:
            self.context.precision.load_state_dict(scaling)

    @property
    def place(self) -> tuple[int, int]:
        """The last step boundary that was crossed; it moves where this Accelerator trains."""
        return self.context.accumulation.clock.place

    @property
    def steps_done(self) -> int:
        return self.context.accumulation.clock.done

    def count_steps_from(self, step: int) -> None:
        """Continue at optimizer step `step`; saves after this belong to another attempt."""
        self.context.accumulation.clock.restart(step)
        self._checkpoints.directory.lineage.turns += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.is_ready = False
        _watch_forks(self)


def _watch_forks(lifecycle: Lifecycle) -> None:
    """Make a forked child check again whether it may train; cheaper than reading the process id in every step."""
    process_group.users[lifecycle] = None
    reference = weakref.ref(lifecycle)

    def ask_again() -> None:
        forked = reference()
        if forked is not None:
            forked.is_ready = False

    os.register_at_fork(after_in_child=ask_again)
