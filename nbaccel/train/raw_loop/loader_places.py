"""Where a rank's program is in the passes of its loaders, which are left as they are. Runs in ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from nbaccel.train.raw_loop.loader_pass import LONE_PASS, LoaderPass, PassBegin, PassGauge, Place, key_of
from nbaccel.train.raw_loop.loaders import ask, batch_size_of, batches_of

__all__ = ["LoaderPlaces"]


class LoaderPlaces:
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
