"""ChangedLoop: the loop of a rank that trains by itself, changed as flags ask. Its loaders are left. Runs in ranks.

It is loaded for runs with such flags (`setup.load_for_ranks`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.events import LoopKind, TrainingMode, emit
from nbaccel.base.world import World
from nbaccel.train.raw_loop.changes_by_flags import LoopChange
from nbaccel.train.raw_loop.graph import leave_scalers, watch_scalers
from nbaccel.train.raw_loop.hooks import Hooks
from nbaccel.train.raw_loop.loader_pass import LONE_PASS, LoaderPass, PassBegin, PassGauge, Place, key_of
from nbaccel.train.raw_loop.loaders import ask, batch_size_of, batches_of
from nbaccel.train.step.raw_loop_hooks import forget, when_stepping_back

__all__ = ["ChangedLoop"]


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
        self._places = _LoaderPlaces()
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


class _LoaderPlaces:
    """Follows the passes of a task's loaders, where nothing else does. Torch's loaders call it, see `Asked`."""

    needs_order = False
    next_begin: PassBegin | None = None

    def __init__(self) -> None:
        self._task: object | None = None
        self.end()

    def begin(self) -> None:
        """Begin a task."""
        self.end()
        self._task, self._thread = object(), threading.get_ident()
        ask(self)

    def end(self) -> None:
        """End a task, or have none."""
        self._task = None
        self._thread = 0
        self._now: LoaderPass | None = None  # the pass that the last batch came from
        self._drawn: Any = None  # the iterator whose batch is being made

    def place(self) -> Place | None:
        """Return which batch was handed out last; None where no loader's pass goes on."""
        return None if self._now is None else self._now.gauge.place()

    def minds(self, iterator: Any) -> bool:
        """Return whether to follow `iterator`: not within another loader's batch, nor in another thread."""
        is_here = self._task is not None and threading.get_ident() == self._thread
        return is_here and (self._drawn is None or self._drawn is iterator)

    def before(self) -> None:
        """Do nothing: torch alone draws here."""

    def begin_pass(self, iterator: Any, loader: Any = None) -> LoaderPass:
        size = batch_size_of(iterator, loader)
        gauge = PassGauge(lambda: 0, tuple, batches_of(iterator, loader), 0, torch.is_grad_enabled())
        this = LoaderPass(self._task, key_of(iterator, size), size, gauge)
        iterator.__dict__[LONE_PASS] = this
        return this

    def draw(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        return real(iterator)

    def note_passed(self, iterator: Any) -> None:
        """Do nothing: nothing is kept of batches that were handed out."""

    def hand_out(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        this: LoaderPass | None = iterator.__dict__.get(LONE_PASS)
        if this is None or this.task is not self._task:
            this = self.begin_pass(iterator)
        self._drawn = iterator
        try:
            batch = real(iterator)
        except StopIteration:
            this.gauge.is_over = True
            raise
        finally:
            self._drawn = None
        self._now = this
        this.gauge.taken += 1
        return batch
