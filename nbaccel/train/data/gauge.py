"""LoopGauge: measures the progress of one iteration over a prepared loader, for observers. Runs in ranks.

The loop itself reports nothing: a launcher's thread reads the gauge a few times per second, so that reporting costs
the loop nothing. The loop trains if backwards come, otherwise it evaluates. How long it waits for data is estimated
from how often the loader was found busy.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from nbaccel.events import Progress
from nbaccel.train.accumulation import Accumulation

__all__ = ["Fetching", "LoopGauge"]

_ENOUGH_LOOKS = 20  # 5 s: some 10 % of the time, give or take


class Fetching:
    """Estimates how much of their time the loops over one loader wait for batches. Only the loop holds the generator.

    waiting: a fraction of 1; None before there were enough looks.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[Generator[Any, None, None]] | None = None
        self._looks = self._waits = 0

    def __reduce__(self) -> tuple[type[Fetching], tuple[()]]:
        """Return an empty object, so that a copied or pickled loader starts to count again."""
        return Fetching, ()

    @property
    def waiting(self) -> float | None:
        return round(self._waits / self._looks, 2) if self._looks >= _ENOUGH_LOOKS else None

    def watch(self, generator: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Note that a loop begins which takes its batches from `generator`; return it."""
        self._generator = weakref.ref(generator)
        return generator

    def look(self) -> None:
        """Count whether the generator is running now. Called from another thread than the loop's."""
        generator = None if self._generator is None else self._generator()
        self._looks += 1
        self._waits += generator is not None and inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


class LoopGauge:
    """Progress of one iteration, from its first batch to its end.

    taken: returns how many batches of the epoch this rank has had, including those that it left out.
    batches: how many the epoch has for this rank; None where that is unknown.
    samples: in one batch of this rank; None where batches have sizes of their own.
    epoch: that of the loader; where the program has announced epochs (`Accelerator.epochs`), theirs is used instead.
    may_train: gradients were enabled when it began.
    fetching: that of its loader.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        taken: Callable[[], int],
        batches: int | None,
        epoch: int,
        samples: int | None,
        may_train: bool,
        fetching: Fetching,
    ) -> None:
        self._accumulation = accumulation
        self._taken = taken
        self._batches = batches
        self._epoch = epoch if accumulation.epoch is None else accumulation.epoch
        self._epochs = accumulation.epochs
        self._samples = samples
        self._may_train = may_train
        self._fetching = fetching
        self._steps_before = accumulation.clock.done
        self._taken_before = taken()
        self._began = time.monotonic()
        self._end: Progress | None = None

    def read(self) -> Progress | None:
        """Return the present progress; None once the loop has ended. Called from any thread but the loop's."""
        if self._end is not None:
            return None
        self._fetching.look()
        return self._look()

    def close(self) -> Progress:
        """Note that the iteration has ended, or was left; return its progress at that time."""
        self._end = self._look(is_over=True)
        return self._end

    def _look(self, is_over: bool = False) -> Progress:
        steps, taken = self._accumulation.clock.done, self._taken()
        has_trained = steps > self._steps_before
        # Before the first step is complete, loops that train and loops that evaluate differ only in enabled gradients.
        is_first_window = self._may_train and taken <= self._taken_before + self._accumulation.steps and not is_over
        return Progress(
            step=steps,
            batch=taken,
            batches=self._batches,
            epoch=self._epoch,
            epochs=self._epochs,
            samples=self._samples,
            is_training=has_trained or is_first_window,
            is_guess=is_first_window and not has_trained,
            is_over=is_over,
            first=self._steps_before,
            began=self._began,
            waiting=self._fetching.waiting,
        )
