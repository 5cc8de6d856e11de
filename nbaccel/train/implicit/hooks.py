"""Hooks: report from inside of torch what an unmodified loop does during a task. Runs in ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Hooks"]


class Hooks:
    """Reports backwards and optimizers' steps, from `install` to `remove`.

    run: called instead of torch's function that runs a graph backwards, with that function before its arguments.
    before_step, after_step: called around each step of an optimizer, as torch calls its hooks.
    """

    def __init__(
        self, run: Callable[..., Any], before_step: Callable[..., None], after_step: Callable[..., None]
    ) -> None:
        self._run = run
        self._before_step = before_step
        self._after_step = after_step
        self._handles: list[Any] = []
        self._real: Callable[..., Any] | None = None
        self._real_compile: Callable[..., Any] | None = None

    def install(self) -> None:
        """Begin to report."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._real = torch.autograd._engine_run_backward
        self._take_backwards()
        self._real_compile = torch.compile
        torch.compile = functools.wraps(torch.compile)(functools.partial(self._compile))

    def remove(self) -> None:
        """Restore torch. Calling this again has no effect."""
        while self._handles:
            self._handles.pop().remove()
        if self._real is not None:
            torch.autograd._engine_run_backward = self._real
            self._real = None
        if self._real_compile is not None:
            torch.compile = self._real_compile
            self._real_compile = None

    def _run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._real is not None
        return self._run(self._real, outputs, *args, **kwargs)

    def _take_backwards(self) -> None:
        """Make torch run its backwards through this object, hidden from a compiler of whole training steps."""
        is_loaded = "torch._dynamo" in sys.modules
        run: Any = torch.compiler.disable(self._run_backward) if is_loaded else self._run_backward
        torch.autograd._engine_run_backward = run

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.compile``, with which torch imports its compiler, and take over backwards again."""
        assert self._real_compile is not None
        compiled = self._real_compile(*args, **kwargs)
        self._take_backwards()
        return compiled
