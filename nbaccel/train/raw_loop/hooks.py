"""Hooks into torch while an unmodified loop runs: its backwards, the steps of its optimizers, what these are given.

A watch of the loop (`RawLoopTraining`, `SingleRankWatch`) owns one `Hooks` and installs it for a task. What a flag
changes of the loop is a `LoopChange` (`changes_by_flags`). Without a change nothing more is replaced. Runs in ranks.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbaccel.train.raw_loop.trained_tensors import parameters_of

if TYPE_CHECKING:
    from nbaccel.train.raw_loop.changes_by_flags import LoopChange, TrainedOptimizers

__all__ = [
    "Hooks",
]


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
            from nbaccel.train.raw_loop.changes_by_flags import TrainedOptimizers  # loaded by the changes

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
