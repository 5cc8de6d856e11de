"""Optimizers and schedulers that step only when gradients are synchronised. Run in ranks.

Both are thin: the wrapped object answers everything that they do not override. They decide nothing: the accumulation
window says whether this batch ends a step, the strategy and the precision how the step is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbaccel.train.accumulation import Accumulation
from nbaccel.train.finite import LossWatch
from nbaccel.train.microbatch.guard import guarded_step
from nbaccel.train.precision import Precision, Taken
from nbaccel.train.raw import Freshness, RawSteps
from nbaccel.train.strategies.base import Strategy
from nbaccel.train.talk.nested import map_children

__all__ = ["SKIPS_IN_A_ROW", "PreparedOptimizer", "PreparedScheduler", "follow_parameters"]

_TORCHS_ZERO_GRAD = Optimizer.zero_grad

SKIPS_IN_A_ROW = 50
"""Skipped steps in a row after which the user is warned. A sound fp16 training skips a handful at its start."""


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing inside an accumulation window.

    optimizer: the user's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        precision: Precision,
        strategy: Strategy,
        watch: LossWatch,
        raw_steps: RawSteps,
    ) -> None:
        # No super().__init__(): parameters, state and hooks are the wrapped optimizer's.
        self.optimizer = optimizer
        self.accumulation = accumulation
        self._precision = precision
        self._strategy = strategy
        self._watch = watch
        self._raw_steps = raw_steps
        self._freshness = Freshness()
        self._backwards = accumulation.backwards  # our backwards that had run at its last step
        self._was_skipped = False
        self._skips_in_a_row = 0
        self._tells: Callable[[], bool] | None = None  # returns whether the last step was taken, if not read yet

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was left out: its gradients were infinite (fp16) or not finite (on_nan).

        Reading it waits for the device where the optimizer is fused and skips by itself.
        """
        if self._tells is not None:
            self._note(self._tells())
        return self._was_skipped

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The Accelerator's scaler, with ``mixed_precision="fp16"``; trainers put its state into files of their own."""
        return getattr(self._precision, "scaler", None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        window = self.accumulation.window
        if not window.sync:
            if window.comes_in_parts:
                window.withheld_step(closure)
            return None
        if self._tells is not None:  # the step before: read only now, when the device already computes the next one
            self._note(self._tells())
        is_ours = self.accumulation.backwards != self._backwards
        if is_ours and self.accumulation.block is not None:
            self.accumulation.block.rescale()  # a window that ends with a batch that had no backward
        if not is_ours and closure is None and self._freshness.has_new(self.optimizer):
            self._raw_steps.enter(self.optimizer)
        value: Any = None
        taken: Taken = False
        if not self._watch.judges_steps or self._watch.lets_step(self.optimizer):
            if closure is None and self._strategy.recovers:
                value, taken = self._take_guarded()
            else:
                value, taken = self._strategy.step(self.optimizer, self._precision, closure)
        if is_ours:
            self._backwards = self.accumulation.backwards
            self._freshness.is_cleared, self._freshness.stepped_with = False, None
        else:
            self._end_without_ours(closure)
        if taken is True:
            self._was_skipped, self._skips_in_a_row = False, 0
        elif taken is False:
            self._note(taken)
        else:
            self._tells = taken
        return value

    def refuse_unscaled(self) -> None:
        """Refuse to unscale gradients that were never scaled: those of the program's own ``loss.backward()``."""
        if self.accumulation.backwards == self._backwards and self._freshness.has_new(self.optimizer):
            self._raw_steps.refuse_unscaled(self.optimizer)

    def _end_without_ours(self, closure: Callable[[], Any] | None) -> None:
        """Finish a step without a backward of ours before it; one may have run inside it, in its closure."""
        ran_ours = self.accumulation.backwards != self._backwards
        if closure is not None and not ran_ours and self._freshness.has_new(self.optimizer):
            self._raw_steps.enter(self.optimizer)
        self._backwards = self.accumulation.backwards
        self._freshness.note(self.optimizer)

    def _take_guarded(self) -> tuple[Any, Taken]:
        take = partial(self._strategy.step, self.optimizer, self._precision, None)
        world = self._strategy.world
        place = f"rank {world.rank} of {world.world_size}"
        return guarded_step(self.optimizer, take, place, self.accumulation.clock.step)

    def _note(self, taken: bool) -> None:
        """Record whether the last step was `taken` or skipped. Called by methods that the program calls."""
        self._tells = None
        self._was_skipped = not taken
        self._skips_in_a_row = 0 if taken else self._skips_in_a_row + 1
        world = self._strategy.world
        if self._skips_in_a_row == SKIPS_IN_A_ROW and world.is_main_process:  # all ranks skip alike
            step = self.accumulation.clock.step
            warnings.warn(
                f"{SKIPS_IN_A_ROW} optimizer steps in a row were skipped on all {world.world_size} rank(s), the last "
                f"one in step {step}: {self._precision.explain_skips()}",
                stacklevel=3,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.accumulation.window.sync:
            return
        self._freshness.is_cleared = True
        optimizer = self.optimizer
        if not set_to_none or getattr(optimizer.zero_grad, "__func__", None) is not _TORCHS_ZERO_GRAD:
            optimizer.zero_grad(set_to_none)
            return
        # As torch's own does, without its record for the profiler, which takes longer than all the rest.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def __nbaccel_unwrap__(self) -> Optimizer:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        if self._tells is not None:
            self._note(self._tells())
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def follow_parameters(optimizer: Optimizer) -> None:
    """Move the state of `optimizer` to the devices of its parameters, as loading it would; types do not change.

    State that was pickled in a notebook arrives on the CPU, and preparing a model moves its parameters alone. Step
    counters stay on the CPU where torch keeps them there, and so does state that an optimizer has put there on
    purpose, in pinned or paged memory.
    """
    for group in optimizer.param_groups:
        counts_on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter)
            if not isinstance(entries, dict) or parameter.is_meta:  # moving it there would lose the values
                continue
            for name, value in entries.items():
                if name != "step" or not counts_on_host:
                    entries[name] = _brought(parameter.device, value)


def _brought(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return map_children(partial(_brought, device), value)
    if value.device == device or value.is_meta or getattr(value, "is_paged", False) or value.is_pinned():
        return value
    return value.to(device)


class PreparedScheduler:
    """A learning-rate scheduler that moves only when its optimizer really stepped.

    One optimizer step on n ranks consumes n batches, so a schedule that was counted in batches of one process
    is moved n times per step, unless the loader split its batches among the ranks (Accelerate's rule).
    """

    def __init__(
        self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], accumulation: Accumulation, moves_per_step: int
    ) -> None:
        """moves_per_step: ranks, or 1 with split batches; 0 to follow the user's calls in any case."""
        own = [prepared for prepared in optimizers if prepared.optimizer is getattr(scheduler, "optimizer", None)]
        self.scheduler = scheduler
        self.optimizers = own or list(optimizers)
        self.accumulation = accumulation
        self._moves_per_step = moves_per_step

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.accumulation.window.has_more:
            return
        if self._moves_per_step == 0:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.accumulation.window.sync:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self._moves_per_step):
            # OneCycleLR raises beyond total_steps, which a padded last round would reach.
            total_steps = getattr(self.scheduler, "total_steps", None)
            if total_steps is None or self.scheduler.last_epoch < total_steps:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __nbaccel_unwrap__(self) -> Any:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"
