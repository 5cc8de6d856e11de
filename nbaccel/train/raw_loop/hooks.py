"""Hooks into torch while an unmodified loop runs: its backwards, the steps of its optimizers, what these are given.

A watch of the loop (`RawLoopTraining`, `SingleRankWatch`) owns one `Hooks` and installs it for a task. What a flag
changes of the loop is a `LoopChange`; the changes stand around the watch, and around each other, in the order in which
they are given, the outermost first: accumulation, precision. Without a change nothing more is replaced. Runs in ranks.
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbaccel.base.events import LoopKind, TrainingMode, emit
from nbaccel.base.world import World
from nbaccel.train.raw_loop.graph import leave_scalers, watch_scalers
from nbaccel.train.raw_loop.loader_pass import Place
from nbaccel.train.raw_loop.loader_places import LoaderPlaces
from nbaccel.train.raw_loop.trained_tensors import surrounding_optimizers
from nbaccel.train.step.raw_loop_hooks import forget, when_stepping_back

__all__ = [
    "ChangedLoop",
    "Hooks",
    "LoopChange",
    "RefusedLoop",
    "TrainedOptimizers",
    "WatchedLoop",
    "parameters_of",
    "runs_in_trainer",
]

_TRAINERS = ("transformers.trainer", "lightning.", "pytorch_lightning.", "lightning_fabric.")
"""Modules whose loops report their own progress, and compute in a precision of their own."""

_DEPTH = 12
"""Frames between a trainer's step and a forward or backward, and some more."""


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


class ChangedLoop:
    """Changes the loops of a rank as flags ask, where nothing else watches them; a launcher calls it around each task.

    It keeps nothing equal in other ranks.
    """

    fails_on_parts, is_at_work = "", False

    def __init__(self, changes: Sequence[LoopChange], world: World) -> None:
        self._world = world
        self._said: set[str] = set()
        self._hooks = Hooks(lambda real, *args, **kwargs: real(*args, **kwargs), _pass, _pass, changes)
        self._changes = changes
        self._places = LoaderPlaces()
        self._has_told = False
        for change in changes:
            change.attach(self)

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task."""
        self._said.clear()
        self._has_told = False
        self._places.begin()
        watch_scalers(lambda optimizer: False, self._changes)
        self._hooks.install()
        when_stepping_back(self.stop)

    def end(self) -> None:
        """End a task that finished."""
        self.stop()

    def stop(self) -> None:
        """End a task that ended in another way, or that prepares by itself."""
        forget(self.stop)
        self._hooks.remove()
        self._places.end()
        leave_scalers()

    def keeps(self, tensors: Sequence[Any]) -> bool:
        return False

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        return False

    def note_wrapper(self) -> None:
        """Leave the loop as it is: what the program wraps for several ranks is trained in its own way."""
        self.stop()

    def explain(self) -> str:
        return ""

    # -- for changes, see `WatchedLoop`

    def say(self, text: str) -> None:
        if text not in self._said and self._world.is_main_process:
            self._said.add(text)
            sys.stdout.write(f"nbaccel: {text}\n")
            sys.stdout.flush()

    def place(self) -> Place | None:
        return self._places.place()

    def is_partial(self) -> bool:
        return False

    def is_averaged(self) -> bool:
        return False

    def is_shared_out(self, parameters: list[Tensor]) -> bool:
        """Return False: nobody averages here, so the program's own sharing changes nothing."""
        return False

    def note_call(self, optimizer: Optimizer) -> None:
        """Report, once, that a loop trains: its first step may be left out. Nothing counts steps here."""
        if not self._has_told:
            self._has_told = True
            emit(TrainingMode(LoopKind.UNMODIFIED))


def _pass(*_: Any) -> None:
    """Do nothing around a step."""


class Hooks:
    """Reports backwards and optimizers' steps, from `install` to `remove`.

    Args:
        run: Called instead of torch's function that runs a graph backwards, with that function before its arguments.
        before_step, after_step: Called around each step of an optimizer, as torch calls its hooks.
        changes: Changes of the loop, the outermost first.
        on_given: Called with the parameters that an optimizer is given.
        is_alike: Returns whether a tensor's gradient is the same in all ranks.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        before_step: Callable[..., None],
        after_step: Callable[..., None],
        changes: Sequence[LoopChange] = (),
        on_given: Callable[[list[Tensor]], None] | None = None,
        is_alike: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._run = run
        self._before_step = before_step
        self._after_step = after_step
        self._changes = tuple(changes)
        self._on_given = on_given
        self._is_alike = is_alike
        self._handles: list[Any] = []
        self._real: Callable[..., Any] | None = None
        self._real_compile: Callable[..., Any] | None = None
        self._given: _GivenHook | None = None
        self._optimizers: TrainedOptimizers | None = None

    def install(self) -> None:
        """Begin to report."""
        if self._changes:
            self._optimizers = TrainedOptimizers(self._changes, self._is_alike)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._real = torch.autograd._engine_run_backward
        self._take_backwards()
        self._real_compile = torch.compile
        torch.compile = functools.wraps(torch.compile)(functools.partial(self._compile))
        if self._on_given is not None or self._optimizers is not None:
            self._given = _GivenHook(self._note_given)
        for change in self._changes:
            assert self._optimizers is not None
            change.begin(self._optimizers)

    def begin_anew(self) -> None:
        """Begin another attempt of the task's program."""
        for change in self._changes:
            change.begin_anew()

    def remove(self) -> None:
        """Restore torch. Calling this again has no effect."""
        for change in reversed(self._changes):
            change.end()
        if self._optimizers is not None:
            self._optimizers.leave()
            self._optimizers = None
        if self._given is not None:
            self._given.remove()
            self._given = None
        while self._handles:
            self._handles.pop().remove()
        if self._real is not None:
            torch.autograd._engine_run_backward = self._real
            self._real = None
        if self._real_compile is not None:
            torch.compile = self._real_compile
            self._real_compile = None

    def are_lazy(self) -> bool:
        """Return whether the first forward of a model makes parameters that an optimizer was given."""
        return self._given is not None and self._given.are_lazy()

    def _note_given(self, optimizer: Optimizer, given: list[Tensor]) -> None:
        if self._on_given is not None:
            self._on_given(given)
        if self._optimizers is not None:
            self._optimizers.meet(optimizer)

    def _run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._real is not None
        if not self._changes:
            return self._run(self._real, outputs, *args, **kwargs)
        real = functools.partial(self._run, self._real)
        for change in reversed(self._changes):
            real = functools.partial(change.run_backward, real)
        return real(outputs, *args, **kwargs)

    def _take_backwards(self) -> None:
        """Make torch run its backwards through this object, hidden from a compiler of whole training steps."""
        is_loaded = "torch._dynamo" in sys.modules
        run: Any = torch.compiler.disable(self._run_backward) if is_loaded else self._run_backward
        torch.autograd._engine_run_backward = run
        if is_loaded and self._optimizers is not None:
            self._optimizers.hide_steps()

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.compile``, with which torch imports its compiler, and take over backwards again."""
        assert self._real_compile is not None
        compiled = self._real_compile(*args, **kwargs)
        self._take_backwards()
        return compiled


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


class _GivenHook:
    """Reports the tensors that optimizers are given, or copies of them have, until it is removed."""

    def __init__(self, on_given: Callable[[Optimizer, list[Tensor]], None]) -> None:
        self._lazy: list[weakref.ref[Tensor]] = []  # those that do not exist yet
        self._real: Any = Optimizer.add_param_group
        self._real_state: Any = Optimizer.__setstate__
        real, real_state = self._real, self._real_state

        @functools.wraps(real)
        def add_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
            real(optimizer, param_group)
            given = optimizer.param_groups[-1]["params"]
            self._lazy += [weakref.ref(each) for each in given if torch.nn.parameter.is_lazy(each)]
            on_given(optimizer, given)

        @functools.wraps(real_state)
        def set_state(optimizer: Any, state: dict[str, Any]) -> None:
            is_new = "param_groups" not in vars(optimizer)  # one that `copy.deepcopy` makes, or pickle
            real_state(optimizer, state)
            if is_new:
                on_given(optimizer, list(parameters_of(optimizer)))

        Optimizer.add_param_group = add_param_group  # type: ignore[assignment, method-assign]
        Optimizer.__setstate__ = set_state  # type: ignore[assignment, method-assign]

    def are_lazy(self) -> bool:
        """Return whether the first forward of a model makes parameters that an optimizer was given."""
        self._lazy = [ref for ref in self._lazy if (each := ref()) is not None and torch.nn.parameter.is_lazy(each)]
        return bool(self._lazy)

    def remove(self) -> None:
        Optimizer.add_param_group = self._real  # type: ignore[method-assign]
        Optimizer.__setstate__ = self._real_state  # type: ignore[method-assign]


def runs_in_trainer() -> bool:
    """Return whether a library's trainer makes the present call."""
    frame, depth = sys._getframe(2), 0
    while frame is not None and depth < _DEPTH:
        if str(frame.f_globals.get("__name__", "")).startswith(_TRAINERS):
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
