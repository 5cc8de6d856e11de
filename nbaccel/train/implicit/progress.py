"""Progress: measures one pass over a loader of an unmodified loop. Runs in ranks.

The loop itself reports nothing: a launcher's thread reads the gauge a few times per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbaccel.events import Progress

__all__ = ["PassGauge"]


class PassGauge:
    """Progress of one pass, from its begin to its end.

    steps: returns how many steps the task has reached.  batches: how many the pass has; None where that is unknown.
    epoch: how many passes trained at the same place before.  may_train: gradients were enabled when it began.

    taken: batches that were handed out.  samples: of this rank in the largest of them; 0 unknown.
    has_trained: backwards have come.  is_over: it has ended, or was left for another at the same place.
    is_left: returns whether nothing can continue it.
    """

    def __init__(self, steps: Callable[[], int], batches: int | None, epoch: int, may_train: bool) -> None:
        self._steps = steps
        self._batches = batches
        self._epoch = epoch
        self._may_train = may_train
        self._first = steps()
        self._began = time.monotonic()
        self.taken = self.samples = 0
        self.has_trained = self.is_over = False
        self.is_left: Callable[[], bool] = lambda: False

    def read(self) -> Progress | None:
        """Return the present progress; None once the pass has ended. Called from any thread."""
        return None if self.is_over or self.is_left() else self._look()

    def close(self) -> Progress:
        """End the pass; return its progress at that time."""
        self.is_over = True
        return self._look()

    def _look(self) -> Progress:
        is_guess = self._may_train and not self.has_trained and self.taken <= 1 and not self.is_over
        return Progress(
            step=self._steps(),
            batch=self.taken,
            batches=self._batches,
            epoch=self._epoch,
            samples=self.samples or None,
            is_training=self.has_trained or is_guess,
            is_guess=is_guess,
            is_over=self.is_over,
            first=self._first,
            began=self._began,
        )
