"""Optimizers and schedulers that step only when gradients are synchronised. Run in ranks.

Both are thin: the wrapped object answers everything that they do not override. They decide nothing: the accumulation
window says whether this batch ends a step, the strategy and the precision how the step is taken. `RawSteps` counts the
steps whose gradients come from the program's own ``loss.backward()``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbaccel.base.events import LoopKind, TrainingMode, emit
from nbaccel.base.settings import RunSettings
from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.nested import map_children
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.prepare.loss_watch import LossWatch
from nbaccel.train.prepare.mean_of_ranks import MeanLosses, decide_by_the_mean
from nbaccel.train.prepare.schedule_length import ScheduleLength, schedule_length_of
from nbaccel.train.step.accumulation import Accumulation
from nbaccel.train.step.gradients import Freshness
from nbaccel.train.step.precision import Precision, Taken
from nbaccel.train.strategies.single import Strategy

if TYPE_CHECKING:
    from nbaccel.train.prepare.unaveraged import UnaveragedGradients

__all__ = [
    "SKIPS_IN_A_ROW",
    "Guard",
    "PreparedOptimizer",
    "PreparedScheduler",
    "RawSteps",
    "follow_parameters",
]

_TORCHS_ZERO_GRAD = Optimizer.zero_grad

SKIPS_IN_A_ROW = 50
"""Skipped steps in a row after which the user is warned. A sound fp16 training skips a handful at its start."""


Guard = Callable[[Optimizer, Callable[[], tuple[Any, Taken]], str, int], tuple[Any, Taken]]
"""``guard(optimizer, take, place, step)`` calls `take`, again if memory ran out; place names this rank in messages."""


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing inside an accumulation window.

    Args:
        optimizer: The program's own optimizer.
        accumulation: Says whether the current batch ends a step.
        precision, strategy: Take the step.
        watch: Reports losses that are not finite.
        raw_steps: Counts steps whose gradients come from the program's own ``loss.backward()``.
        guard: Takes the steps where a lack of memory is survived.

    Example:
        >>> from nbaccel import Accelerator
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> isinstance(optimizer, torch.optim.Optimizer)
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        precision: Precision,
        strategy: Strategy,
        watch: LossWatch,
        raw_steps: RawSteps,
        guard: Guard,
    ) -> None:
        # No super().__init__(): parameters, state and hooks are the wrapped optimizer's.
        self.optimizer = optimizer
        self.accumulation = accumulation
        self._precision = precision
        self._strategy = strategy
        self._watch = watch
        self._raw_steps = raw_steps
        self._guard = guard
        self._freshness = Freshness()
        self._backwards = accumulation.backwards  # our backwards that had run at its last step
        self._has_stepped = False
        self._was_skipped = False
        self._skips_in_a_row = 0
        self._tells: Callable[[], bool] | None = None  # returns whether the last step was taken, if not read yet
        self._unaveraged: UnaveragedGradients | None = None
        accumulation.rates.follow(self)
        if strategy.has_peers:
            decide_by_the_mean(optimizer)
            if not RunSettings.from_env().independent:  # separate trainings that are meant
                from nbaccel.train.prepare.unaveraged import UnaveragedGradients  # one process does not need it

                self._unaveraged = UnaveragedGradients(optimizer, strategy, accumulation)

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
        """Take a step, if the current batch ends its accumulation window; otherwise do nothing.

        Args:
            closure: Computes the loss again, as torch's optimizers take it.

        Returns:
            What the program's optimizer returned; None without a step.
        """
        window = self.accumulation.window
        if not window.sync:
            if window.comes_in_parts:
                window.deferred_step(closure)
            return None
        if self._tells is not None:  # the step before: read only now, when the device already computes the next one
            self._note(self._tells())
        is_ours = self.accumulation.backwards != self._backwards
        if not self._has_stepped:
            self._note_first()
        if is_ours and self.accumulation.block is not None:
            self.accumulation.block.rescale()  # a window that ends with a batch that had no backward
        if not is_ours and closure is None and self._freshness.has_new(self.optimizer):
            self._raw_steps.enter(self.optimizer)
            if self._unaveraged is not None:
                self._unaveraged.refuse(is_ours=False)
        elif self._unaveraged is not None:
            if closure is None:
                self._unaveraged.refuse(is_ours=True)
            else:
                closure = self._unaveraged.after(closure)
        value: Any = None
        taken: Taken = False
        if not self._watch.judges_steps or self._watch.lets_step(self.optimizer):
            if closure is None and self._strategy.recovers:
                value, taken = self._take_guarded()
            elif closure is None or not self._strategy.has_peers:
                value, taken = self._strategy.step(self.optimizer, self._precision, closure)
            else:
                losses = MeanLosses(closure)
                value, taken = self._strategy.step(self.optimizer, self._precision, losses)
                value = losses.own(value)
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

    def _note_first(self) -> None:
        """Report, at the first step, that batches are not accumulated although that was chosen."""
        self._has_stepped = True
        accumulation = self.accumulation
        batches = accumulation.backwards - self._backwards
        if accumulation.steps > 1 >= batches and not (accumulation.depth or accumulation.is_local):
            emit(TrainingMode(LoopKind.PREPARED, in_force={"accumulate": "a step for each batch"}))

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
        place = world.place
        return self._guard(self.optimizer, take, place, self.accumulation.clock.step)

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
        rates = getattr(self.accumulation, "rates", None)
        if rates is not None:  # a copy's own state may come later, where the two know each other
            rates.follow(self)

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

    One optimizer step on n ranks consumes n batches. So a schedule that was counted in batches of one process is moved
    n times per step, unless the loader split its batches among the ranks (Accelerate's rule). A scheduler that watches
    a metric moves once: the second time it would take the same number for a step without an improvement.

    Args:
        scheduler: The program's own scheduler.
        optimizers: The prepared optimizers.
        accumulation: Says whether the current batch ends a step.
        moves_per_step: The number of ranks, or 1 with split batches. 0 follows every call of the program.

    Example:
        >>> from nbaccel import Accelerator
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> optimizer, scheduler = Accelerator().prepare(optimizer, scheduler)
        >>> scheduler.get_last_lr()
        [0.1]
    """

    def __init__(
        self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], accumulation: Accumulation, moves_per_step: int
    ) -> None:
        """Make the object.

        Args:
            moves_per_step: Ranks, or 1 with split batches; 0 to follow the user's calls in any case.
        """
        own = [prepared for prepared in optimizers if prepared.optimizer is getattr(scheduler, "optimizer", None)]
        self.scheduler = scheduler
        self.optimizers = own or list(optimizers)
        self.accumulation = accumulation
        self._moves_per_step = min(1, moves_per_step) if isinstance(scheduler, ReduceLROnPlateau) else moves_per_step
        # A schedule that moves by its program's calls, or once per step, comes to its end as the program planned it.
        self._schedule_length = schedule_length_of(scheduler) if self._moves_per_step > 1 else None
        self._left_out = 0  # moves beyond the end of a OneCycleLR

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the scheduler, if its optimizer has stepped.

        Args:
            *args: Arguments of the program's scheduler, such as a metric.
            **kwargs: More of them.
        """
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
            else:
                self._left_out += 1
        if (
            self._schedule_length is not None
            and self.scheduler.last_epoch + self._left_out > self._schedule_length.moves
        ):
            self._warn_once_passed(self._schedule_length)

    def _warn_once_passed(self, schedule_length: ScheduleLength) -> None:
        """Warn once, on the main process, that the schedule has passed its `schedule_length`, if it clearly has."""
        moves, per_step = self.scheduler.last_epoch + self._left_out, self._moves_per_step
        if schedule_length.is_passed(moves, per_step):
            self._schedule_length = None
            if current_world().is_main_process:
                warn_user(schedule_length.warning(type(self.scheduler).__name__, moves, per_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the program's scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state_dict: The state.
        """
        self.scheduler.load_state_dict(state_dict)
        # The loaded state has the schedule's length, too.
        self._schedule_length = schedule_length_of(self.scheduler) if self._moves_per_step > 1 else None

    def __nbaccel_unwrap__(self) -> Any:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"


_LINE = "accelerator.backward(loss)"


class RawSteps:
    """Counts the raw steps of one Accelerator's optimizers, and warns once of what is missed.

    A loop that calls ``loss.backward()`` itself trains correctly: the model synchronises its gradients by itself. Its
    steps are counted here, where an optimizer takes them, because there was no backward of ours to count; the user is
    told once what that leaves out. What would train something else than the program says is refused, before a weight
    changes.
    """

    def __init__(self, accumulation: Accumulation, precision: Precision, strategy: Strategy) -> None:
        self._accumulation = accumulation
        self._precision = precision
        self._strategy = strategy
        self._has_told = False
        self._checked_in: int | None = None  # the process in which the model was found to be one for all ranks
        self._took_part: set[int] = set()  # ids of the optimizers of the current step, where no loader marks its end

    def enter(self, optimizer: Optimizer) -> None:
        """Prepare a raw step that `optimizer` is about to take.

        Raises:
            CannotCut: Batches come in parts, and each part would weigh like a whole batch.
            RuntimeError: Fp16, and the loss was not scaled.
            NotPrepared: Every rank would train a model of its own.
            RunStopped: The run ends before this step.
        """
        window = self._accumulation.window
        if window.comes_in_parts:
            window.refuse_raw()
        self.refuse_unscaled(optimizer)
        if self._checked_in != os.getpid():
            self._refuse_separate_trainings()
            self._checked_in = os.getpid()
        self._count(optimizer)
        if not self._has_told:
            self._has_told = True
            if self._strategy.world.is_main_process:
                warn_user(self._what_is_missed())

    def refuse_unscaled(self, optimizer: Optimizer) -> None:
        """Refuse, under fp16, gradients of a loss that was not scaled, since they would be divided by the scale.

        Raises:
            RuntimeError: The precision is fp16, and it expects scaled losses.
        """
        if self._precision.expects_scaled:
            raise RuntimeError(
                f"{self._place()}: mixed_precision='fp16' scales losses, and this {type(optimizer).__name__} has "
                "gradients of a loss that was not scaled, since the loop calls loss.backward() itself. The weights are "
                f"as before. Write\n    {_LINE}\nor choose mixed_precision='bf16' or 'no'."
            )

    def _count(self, optimizer: Any) -> None:
        accumulation, clock = self._accumulation, self._accumulation.clock
        if accumulation.window is accumulation.outside and not clock.is_inside:
            # No loader marks the beginning of a step: it begins where an optimizer steps again.
            if id(optimizer) in self._took_part or not clock.trained:
                self._took_part.clear()
                clock.enter()
            self._took_part.add(id(optimizer))
        if not accumulation.is_held:
            clock.train()

    def _refuse_separate_trainings(self) -> None:
        world, now = self._strategy.world, current_world()
        if now.world_size != world.world_size:
            raise NotPrepared(
                f"optimizer.step() in {now.place}: the optimizer was prepared for "
                f"{world.world_size} process(es), so every rank would train a model of its own. Prepare it here, "
                "before the loop:\n    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )
        if world.is_distributed and not self._strategy.finds_parallel():
            raise NotPrepared(
                f"optimizer.step() in {self._place()}, but the model is not prepared: every rank would train a model "
                "of its own. Prepare it before the loop:\n"
                "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )

    def _what_is_missed(self) -> str:
        steps, divided = self._accumulation.steps, ""
        if steps > 1:
            divided = (
                f" gradient_accumulation_steps={steps}: loss.backward() does not divide the loss by {steps}, as "
                "accelerator.backward does, so a step takes the sum of its batches' gradients and not their mean."
            )
        return (
            "the loop calls loss.backward() itself. It trains, and steps are counted where the optimizer takes them, "
            f"but the loss is not shown nor watched for NaN, and batches cannot be split if memory runs out.{divided} "
            f"{_LINE} in its place does all of that."
        )

    def _place(self) -> str:
        world = self._strategy.world
        return f"{world.place}, step {self._accumulation.clock.done}"
