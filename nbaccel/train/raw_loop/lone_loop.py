"""LoneLoop: the loop of a rank that trains by itself, changed as flags ask. Its batches are torch's. Runs in ranks.

It is loaded for runs with such flags, and for those of a single rank (`setup.load_for_ranks`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.events import LoopKind, TrainingMode, emit
from nbaccel.train.raw_loop.changes_by_flags import LoopChange
from nbaccel.train.raw_loop.graph import leave_scalers, watch_scalers
from nbaccel.train.raw_loop.hooks import Hooks
from nbaccel.train.raw_loop.loader_pass import LONE_PASS, LoaderPass, PassBegin, PassGauge, PassKey, Place, key_of
from nbaccel.train.raw_loop.loaders import ask, batch_size_of, batches_of
from nbaccel.train.step.raw_loop_hooks import forget, when_stepping_back

__all__ = ["LoneLoop"]


class LoneLoop:
    """Follows the loops of a rank that shares nothing with others, one task after the other; a launcher calls it.

    It changes them as flags ask, keeps nothing equal in other ranks, and reports nothing but that a loop trains.

    Args:
        changes: What flags change of the loop, the outermost first.
        is_main_process: Lines for all ranks are printed by this one.
    """

    fails_on_parts = ""
    needs_order = False
    next_begin: PassBegin | None = None

    def __init__(self, changes: Sequence[LoopChange] = (), is_main_process: bool = True) -> None:
        self._changes = changes
        self._is_main_process = is_main_process
        self._said: set[str] = set()
        self._hooks = Hooks(self._run, self._before_step, self._after_step, changes)
        self._is_armed = self._has_told = False
        for change in changes:
            change.attach(self)
        self._begin_passes()

    def _begin_passes(self) -> None:
        """Forget the passes so far: none of them is of the task, or of the attempt, that begins."""
        self._task = object()
        self._thread = threading.get_ident()
        self._batches = 0
        self._entered: LoaderPass | None = None  # the pass that was asked for a batch last
        self._now: LoaderPass | None = None  # the pass that the last batch came from
        self._drawn: Any = None  # the iterator whose batch is being made

    # -- the task

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task."""
        self.leave()
        self._said.clear()
        self._has_told = False
        self._begin_passes()
        ask(self)
        watch_scalers(lambda optimizer: False, self._changes)
        self._hooks.install()
        self._is_armed = True
        when_stepping_back(self.leave)

    def end(self) -> None:
        """End a task whose program has ended."""
        self.leave()

    def stop(self) -> None:
        """End a task that ended in another way; never raises."""
        with suppress(Exception):
            self.leave()

    def leave(self) -> None:
        """Leave the loop as it is: the task is over, or the program prepares by itself. May be called again."""
        if self._is_armed:
            self._is_armed = False
            forget(self.leave)
            self._hooks.remove()
            leave_scalers()
            self._entered = self._now = None

    def keeps(self, tensors: Sequence[Any]) -> bool:
        return False

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        return False

    def note_wrapper(self) -> None:
        """Leave the loop as it is: what the program wraps for several ranks is trained in its own way."""
        self.leave()

    @property
    def is_at_work(self) -> bool:
        """False: nothing is noted of what is trained."""
        return False

    def explain(self) -> str:
        return ""

    # -- for changes, see `WatchedLoop`

    def say(self, text: str) -> None:
        if text not in self._said and self._is_main_process:
            self._said.add(text)
            sys.stdout.write(f"nbaccel: {text}\n")
            sys.stdout.flush()

    def place(self) -> Place | None:
        return None if self._now is None else self._now.gauge.place()

    def is_partial(self) -> bool:
        """Return False: batches come whole."""
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

    # -- backwards and steps

    def _run(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a graph backwards for ``torch.autograd.backward`` and ``grad``."""
        return real(outputs, *args, **kwargs)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Do nothing around a step."""

    def _after_step(self, *_: Any) -> None:
        """Do nothing around a step."""

    # -- what loaders call, see `Asked`

    def minds(self, iterator: Any) -> bool:
        """Return whether to follow `iterator`: not within another loader's batch, nor in another thread."""
        is_here = self._is_armed and threading.get_ident() == self._thread
        return is_here and (self._drawn is None or self._drawn is iterator)

    def before(self) -> None:
        """Do nothing: torch alone draws here."""

    def begin_pass(self, iterator: Any, loader: Any = None) -> LoaderPass:
        size, may_train = batch_size_of(iterator, loader), torch.is_grad_enabled()
        key = key_of(iterator, size, may_train)
        gauge = self._gauge(key, iterator, batches_of(iterator, loader), may_train)
        this = iterator.__dict__[LONE_PASS] = LoaderPass(self._task, key, size, gauge)
        return this

    def draw(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        return real(iterator)

    def note_passed(self, iterator: Any) -> None:
        """Do nothing: nothing is kept of batches that were handed out."""

    def hand_out(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        this: LoaderPass | None = iterator.__dict__.get(LONE_PASS)
        if this is None or this.task is not self._task:
            this = self.begin_pass(iterator)
        if self._entered is not this:
            self._enter(this)
        self._drawn = iterator
        try:
            batch = real(iterator)
        except StopIteration:
            self._end_pass(this.gauge)
            raise
        finally:
            self._drawn = None
        self._now = this
        self._batches += 1
        this.gauge.taken += 1
        this.gauge.samples = this.batch_size or 0
        return batch

    def _gauge(self, key: PassKey, iterator: Any, batches: int | None, may_train: bool) -> PassGauge:
        """Return the gauge of a pass that begins."""
        return PassGauge(lambda: 0, tuple, batches, 0, may_train)

    def _enter(self, this: LoaderPass) -> None:
        """Note that the program asks another pass for a batch than before."""
        self._entered = this

    def _end_pass(self, gauge: PassGauge) -> None:
        """Note that a pass has no batch any more."""
        gauge.is_over = True
