"""TrainingContext: the objects with which one Accelerator trains in this process. Runs in ranks, scripts and the
kernel.

The parts of an Accelerator share one `TrainingContext` and read it at every call, since another world brings other
objects. It decides nothing: the Accelerator's lifecycle says when they are made.
"""

from __future__ import annotations

from typing import Any

import torch

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.partial_state import AcceleratorState
from nbaccel.train.prepare.contexts import Accumulating
from nbaccel.train.prepare.loss_watch import LossWatch, make_watch
from nbaccel.train.prepare.models import Compiling, TorchDynamoPlugin
from nbaccel.train.prepare.optimizer import RawSteps
from nbaccel.train.prepare.prepared import Prepared
from nbaccel.train.step.accumulation import Accumulation, GradientAccumulationPlugin
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy, choose_strategy, strategy_class

__all__ = ["TrainingContext"]


class TrainingContext:
    """The state of one process, what is prepared in it, and the objects that count, scale and distribute its steps.

    Args:
        state: The place of this process, which lasts.
        moves: Prepared objects go to the device, unless a call says more.
    """

    # Made by `begin`, for one world:
    settings: RunSettings
    compiling: Compiling
    accumulation: Accumulation

    # Made by `complete`, for one device:
    precision: Precision
    strategy: Strategy
    watch: LossWatch
    raw_steps: RawSteps
    accumulating: Accumulating

    def __init__(self, state: AcceleratorState, moves: bool) -> None:
        self.state = state
        self.moves = moves
        self.prepared = Prepared()
        self.is_complete = False

    @property
    def world(self) -> World:
        return self.state.world

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def strategy_class(self) -> type[Strategy]:
        """The class of the strategy of this world, which touches no device."""
        return strategy_class(self.world, self.settings.strategy)

    @property
    def collectives(self) -> Collectives:
        """The collectives of this process; forms the process group where there is none. Collective then."""
        return self.state.collectives

    def begin(self, settings: RunSettings, dynamo: TorchDynamoPlugin, rules: GradientAccumulationPlugin) -> None:
        """Begin in another world: with nothing prepared, and without touching a device.

        Args:
            settings: All choices of the run.
            dynamo, rules: Choices that only the program can make.
        """
        self.prepared.forget()
        self.settings = settings
        self.compiling = Compiling(settings, dynamo)
        self.accumulation = Accumulation(settings.gradient_accumulation_steps or 1, rules)
        self.is_complete = False

    def complete(self, handlers: Handlers, on_nan: str, plugin: Any = None) -> None:
        """Make the objects that depend on the device.

        Args:
            plugin: Options of the strategy, see `choose_strategy`.
        """
        self.strategy = choose_strategy(self.world, self.device, self.settings.strategy, handlers, plugin)
        self.precision = self.strategy.precision(self.settings.mixed_precision or "no")
        self.watch = make_watch(on_nan, self.accumulation.clock, self.precision, self.strategy)
        self.raw_steps = RawSteps(self.accumulation, self.precision, self.strategy)
        self.accumulating = Accumulating(self.accumulation, self.strategy)
        self.is_complete = True
