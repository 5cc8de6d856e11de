"""LoopChange: what a flag changes of an unmodified loop; and the optimizers of a task that has one. Runs in ranks.

The changes stand around the watch of the loop, and around each other, in the order in which they are given, the
outermost first: accumulation, precision. They are loaded for runs with such flags (`setup.load_for_ranks`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.train.raw_loop.loader_pass import Place
from nbaccel.train.raw_loop.trained_tensors import parameters_of, surrounding_optimizers

__all__ = ["LoopChange", "RefusedLoop", "TrainedOptimizers", "WatchedLoop", "runs_in_trainer"]


class WatchedLoop(Protocol):
    """Facts of a loop that its watch gives to the changes around it."""

    def say(self, text: str) -> None:
        """Print a line, once in a task and for all ranks."""

    def place(self) -> Place | None:
        """Return which batch was handed out last; None where no loader's pass goes on."""

    def is_partial(self) -> bool:
        """Return whether other parts of the present batch follow."""

    def is_averaged(self) -> bool:
        """Return whether gradients of other ranks, which may reach other parameters, are averaged with this one's."""

    def is_shared_out(self, parameters: list[Tensor]) -> bool:
        """Return whether the program itself shares a model with these out over ranks."""

    def note_call(self, optimizer: Optimizer) -> None:
        """Note a call of an optimizer's step that may be left out."""


class LoopChange:
    """A flag's change of how an unmodified loop trains; this one changes nothing."""

    def attach(self, loop: WatchedLoop) -> None:
        """Stand around `loop`, that of all tasks."""

    def begin(self, optimizers: TrainedOptimizers) -> None:
        """Begin a task.  optimizers: those of the task, known from now on."""

    def begin_anew(self) -> None:
        """Begin another attempt of the task's program: nothing of the one before is valid any more."""

    def end(self) -> None:
        """End a task, however it ended: nothing of it may be kept. Never raises; may be called again."""

    def run_backward(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a graph backwards.  real: the next change, the watch, or torch; takes the other arguments."""
        return real(outputs, *args, **kwargs)

    def step(self, optimizer: Optimizer, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, by a call of `real` with the arguments; or not."""
        return real(*args, **kwargs)

    def withholds_scaler(self, call: str, optimizer: Optimizer | None) -> bool:
        """Return whether a scaler's call is left out: "unscale_", "step" or "update", which has no optimizer."""
        return False

    def rescale(self, factor: Tensor) -> None:
        """Note that a scaler has multiplied its scale by `factor`."""

    def note_dropped(self, owner: Optimizer | Module) -> None:
        """Note that `owner` is about to set gradients to zero, or to None."""

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer that is new, or was given more parameters."""


class RefusedLoop(LoopChange):
    """Refuses to train an unmodified loop that a flag would change.

    Args:
        error: The reason.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run_backward(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        raise self._error

    def step(self, optimizer: Optimizer, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise self._error


class TrainedOptimizers:
    """The optimizers of one task, with the changes around their steps. For a task that has a `LoopChange`.

    An optimizer that the task makes is known at once. `search` finds those of cells above, where the program can reach
    them; any other is known from its first step on.

    Args:
        is_alike: Returns whether a tensor's gradient is the same in all ranks.
    """

    def __init__(self, changes: Sequence[LoopChange], is_alike: Callable[[Tensor], bool]) -> None:
        self.is_alike = is_alike
        self._changes = changes
        self._gates: dict[int, _StepGate] = {}
        self._holders: dict[int, list[tuple[weakref.ref[Tensor], weakref.ref[Optimizer]]]] | None = None
        self._has_searched = False
        self._is_on = True
        self._run_step: Callable[..., Any] = self._step
        self._handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self.meet(optimizer))
        self._real_drops = {owner: owner.zero_grad for owner in (Optimizer, Module)}
        self._drops = {owner: self._dropping(real) for owner, real in self._real_drops.items()}
        for owner, drop in self._drops.items():
            owner.zero_grad = drop  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[Optimizer]:
        gates = list(self._gates.values())
        return (optimizer for gate in gates if (optimizer := gate.optimizer()) is not None)

    def search(self, again: bool = False) -> None:
        """Find the optimizers that the program can reach: once for each task, or `again`."""
        if again or not self._has_searched:
            self._has_searched = True
            for optimizer in surrounding_optimizers():
                self.meet(optimizer)

    def holders(self, tensor: Tensor) -> list[Optimizer]:
        """Return the known optimizers that hold `tensor`."""
        if self._holders is None:
            self._holders = {}
            for optimizer in self:
                for parameter in parameters_of(optimizer):
                    pair = weakref.ref(parameter), weakref.ref(optimizer)
                    self._holders.setdefault(id(parameter), []).append(pair)
        found = self._holders.get(id(tensor), ())
        return [holder for held, ref in found if held() is tensor and (holder := ref()) is not None]

    def meet(self, optimizer: Optimizer) -> None:
        """Know `optimizer`, and those of its parameters that are new, from now on."""
        gate = self._gates.get(id(optimizer))
        is_known = gate is not None and gate.optimizer() is optimizer
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if is_known and gate is not None and gate.parameters == count:
            return
        if not is_known:
            gate = self._gates[id(optimizer)] = _StepGate(
                optimizer, lambda *args, **kwargs: self._run_step(*args, **kwargs)
            )
        assert gate is not None
        gate.parameters = count
        self._holders = None
        for change in self._changes:
            change.note_optimizer(optimizer)

    def hide_steps(self) -> None:
        """Hide what is done around steps from a compiler of whole training steps."""
        self._run_step = torch.compiler.disable(self._step)

    def leave(self) -> None:
        """Restore the optimizers' steps."""
        self._is_on = False
        self._handle.remove()
        for owner, drop in self._drops.items():
            if owner.zero_grad is drop:  # otherwise something was put around it, and this one changes nothing there
                owner.zero_grad = self._real_drops[owner]  # type: ignore[method-assign]
        for gate in self._gates.values():
            gate.leave()
        self._gates.clear()
        self._holders = None

    def _step(self, optimizer: Optimizer, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for change in reversed(self._changes if self._is_on else ()):
            real = functools.partial(change.step, optimizer, real)
        return real(*args, **kwargs)

    def _dropping(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            for change in self._changes if self._is_on else ():
                change.note_dropped(owner)
            return real(owner, *args, **kwargs)

        return zero_grad


class _StepGate:
    """Puts a function around the step of one optimizer, and keeps neither it nor its parameters alive.

    It stands in the instance: an optimizer's pickle leaves it out, and so do copies.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters = 0
        self._before = vars(optimizer).get("step")  # that of a scheduler
        method: Any = optimizer.step
        function = method.__func__ if getattr(method, "__self__", None) is optimizer else None
        is_counted = hasattr(method, "_wrapped_by_lr_sched")  # by a scheduler, see torch/optim/lr_scheduler.py

        @functools.wraps(method if function is None else function)
        def gate(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            real = method if function is None else function.__get__(optimizer)
            if is_counted:  # the program has called it: a scheduler would warn of a step that is left out
                optimizer._opt_called = True  # type: ignore[attr-defined]
            return step(optimizer, real, *args, **kwargs)

        if function is not None:
            del method  # it would keep the optimizer alive
        self._step = _WeaklyBound(gate, self.optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]

    def leave(self) -> None:
        optimizer = self.optimizer()
        if optimizer is None or vars(optimizer).get("step") is not self._step:
            return  # a scheduler has put its own around it, which counts steps
        if self._before is None:
            del optimizer.step
        else:
            optimizer.step = self._before  # type: ignore[method-assign]


class _WeaklyBound:
    """A method of an object that holds it, without a circle. Schedulers put theirs around its ``__func__``."""

    def __init__(self, function: Callable[..., Any], owner: weakref.ref[Any]) -> None:
        functools.update_wrapper(self, function)
        self.__func__ = function
        self._owner = owner

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._owner(), *args, **kwargs)

    def __nbaccel_unwrap__(self) -> Any:
        """Return the optimizer's own method; by this mark nobody takes this one for the user's."""
        owner: Any = self._owner()
        return type(owner).step.__get__(owner)


_TRAINERS = ("transformers.trainer", "lightning.", "pytorch_lightning.", "lightning_fabric.")
"""Modules whose loops report their own progress, and compute in a precision of their own."""


_DEPTH = 12
"""Frames between a trainer's step and a forward or backward, and some more."""


def runs_in_trainer() -> bool:
    """Return whether a library's trainer makes the present call."""
    frame, depth = sys._getframe(2), 0
    while frame is not None and depth < _DEPTH:
        if str(frame.f_globals.get("__name__", "")).startswith(_TRAINERS):
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False
