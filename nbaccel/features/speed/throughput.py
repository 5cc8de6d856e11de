"""Throughput: the optimizer steps and samples per second of a training, and its first losses. Runs in ranks of a trial.

Steps are those of the first optimizer that steps. The first ones are warm-up. From then on as many are measured as
take the wanted time, and the program is left by `TrialEnded`, in all ranks after the same step. Time between two steps
in which the program evaluated, by ``model.eval()``, does not count.

Samples are rows of the first tensor that the training's model gets. They are counted in the warm-up only, since hooks
make calls of modules slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.check.dry_run.device_clock import device_seconds
from nbaccel.features.check.dry_run.function_hooks import FunctionHooks
from nbaccel.features.check.dry_run.one_pass import rows_of

__all__ = ["Throughput", "TrialEnded"]

WARM_UP = 4
"""First steps, which do not count: they load kernels, fill the queues of workers, and make the optimizer's state."""

FEWEST = 20
"""Steps that are measured at least, unless they would take `_LONGER` times as long as wanted."""

_LONGER = 3.0

_LOSSES = 5

_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "nbaccel.", "accelerate.", "torch._dynamo")
"""Where classes are from that wrap the program's model."""


class TrialEnded(BaseException):
    """Ends a trial that has measured enough. No `except Exception` of the program stops it.

    Where an `except:` does, it is raised again at each further backward and step, so that the rest takes little time.
    """


class Throughput:
    """Measures from `begin` to `end`; the program may end before there is enough.

    Args:
        wanted_s: Time to measure.
        decisions: The decisions of all ranks.
        on_model: Called once with the training's model, before it is called for the first time, and returns whether its
            samples can be counted.
        on_step: Called at each step with the optimizer.

    Attributes:
        seconds, steps: That are measured.
        samples_per_step: The samples per step of this rank; 0 if no module was called.
        losses: The losses of the first backwards.
        first_step_s: Seconds from `begin` to the first step.
    """

    def __init__(
        self,
        wanted_s: float,
        decisions: SharedDecisions,
        on_model: Callable[[Any], bool] = lambda model: True,
        on_step: Callable[[Any], None] = lambda optimizer: None,
    ) -> None:
        self._wanted_s = wanted_s
        self._decisions = decisions
        self._on_model = on_model
        self._on_step = on_step
        self._undo: list[Callable[[], None]] = []
        self._replaced = FunctionHooks()
        self._optimizer: Any = None
        self._rows: list[int] = []
        self._rows_now = 0
        self._losses: list[Any] = []
        self._scaled: tuple[Any, Any] = (None, None)  # a loss that a scaler has scaled, and the loss itself
        self._done = 0
        self._next_question = WARM_UP + 1
        self._since = 0.0
        self._evaluated = False
        self._has_ended = False
        self.seconds = 0.0
        self.steps = 0
        self.first_step_s = 0.0

    def begin(self) -> None:
        """Measure from now on."""
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._began = time.perf_counter()
        self._undo = [register_optimizer_step_post_hook(self._after_step).remove]
        self._hook = register_module_forward_pre_hook(self._before_forward)
        self._undo.append(self._hook.remove)
        self._replaced.wrap(torch.nn.Module, "eval", self._evaluating)
        self._replaced.wrap(torch.autograd, "backward", self._backward)
        self._replaced.wrap(torch.amp.GradScaler, "scale", self._scale)

    def end(self) -> None:
        """Take the hooks away."""
        self._replaced.undo()
        while self._undo:
            self._undo.pop()()

    @property
    def whole_s(self) -> float:
        """Return the seconds since `begin`."""
        return time.perf_counter() - self._began

    @property
    def samples_per_step(self) -> float:
        # In the first step of a loop that prepares nothing, each rank has the whole batch.
        return float(statistics.median(self._rows[1:] or self._rows or [0]))

    @property
    def losses(self) -> list[float]:
        return [float(each) for each in self._losses]

    # --- what the program does

    def _before_forward(self, module: Any, args: Any) -> None:
        import torch

        if not torch.is_grad_enabled() or not module.training or type(module).__module__.startswith(_WRAPPERS):
            return
        if next(module.parameters(), None) is None:  # a transform of the data, or a loss
            return
        self._hook.remove()
        if self._on_model(module):
            self._hook = module.register_forward_pre_hook(self._count_rows, with_kwargs=True)
            self._undo.append(self._hook.remove)

    def _count_rows(self, module: Any, args: Any, kwargs: Any) -> None:
        self._rows_now += rows_of(args) or rows_of(kwargs)

    def _backward(self, real: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        self._end_again()
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if loss is self._scaled[0]:
            loss = self._scaled[1]
        self._scaled = (None, None)
        if len(self._losses) < _LOSSES and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())
        return real(tensors, *args, **kwargs)

    def _scale(self, real: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = real(scaler, outputs)
        self._scaled = (scaled, outputs)
        return scaled

    def _evaluating(self, real: Callable[..., Any], *args: Any) -> Any:
        if not self._evaluated and self._done > WARM_UP:
            began = time.perf_counter()
            self.seconds += device_seconds() - began  # the device has steps left to do
        self._evaluated = True
        return real(*args)

    def _end_again(self) -> None:
        if self._has_ended:
            raise TrialEnded

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._end_again()
        self._on_step(optimizer)
        if self._optimizer is None:
            self._optimizer = optimizer
            self.first_step_s = time.perf_counter() - self._began
        if optimizer is not self._optimizer:
            return
        self._done += 1
        if self._done <= WARM_UP:
            self._rows.append(self._rows_now)
            self._rows_now = 0
            if self._done == WARM_UP:
                self._hook.remove()
                self._since = device_seconds()
            self._evaluated = False
            return
        self._count()
        if self._done >= self._next_question:
            self._ask()

    def _count(self) -> None:
        """Count the time since the last step, unless the program has evaluated in it."""
        now = device_seconds() if self._evaluated else time.perf_counter()
        if not self._evaluated:
            self.seconds += now - self._since
            self.steps += 1
        self._since, self._evaluated = now, False

    def _ask(self) -> None:
        """End the trial if it has measured enough: rank 0 decides, after every tenth of the steps so far."""
        self._next_question = self._done + 1 + self._done // 10
        if self._decisions.take(f"end-{self._done}", self._has_enough, False):
            self.seconds += device_seconds() - self._since
            self._has_ended = True
            raise TrialEnded

    def _has_enough(self) -> bool:
        enough = self._wanted_s if self.steps >= FEWEST else _LONGER * self._wanted_s
        return self.seconds >= enough
