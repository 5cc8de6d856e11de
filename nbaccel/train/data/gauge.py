"""LoopGauge: how far one iteration over a prepared loader has come, for whoever looks at it. Runs in ranks.

The loop itself reports nothing on its way: a launcher's thread looks at the gauge a few times per second, so that
telling costs the loop nothing. Whether it trains or evaluates is seen from whether backwards come, and how long it
waits for data from how often the loader was found at work.
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
    """How much of their time the loops over one loader wait for batches. A loop holds the generator, and this does not.

    waiting: a part of 1; None before there were looks enough.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[Generator[Any, None, None]] | None = None
        self._looks = self._waits = 0

    def __reduce__(self) -> tuple[type[Fetching], tuple[()]]:
        """A loader that is copied or sent begins to count anew."""
        return Fetching, ()

    @property
    def waiting(self) -> float | None:
        return round(self._waits / self._looks, 2) if self._looks >= _ENOUGH_LOOKS else None

    def watch(self, generator: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The loop that begins takes its batches from `generator`."""
        self._generator = weakref.ref(generator)
        return generator

    def look(self) -> None:
        """Count whether the generator is at work now. From another thread than the loop's."""
        generator = None if self._generator is None else self._generator()
        self._looks += 1
        self._waits += generator is not None and inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


class LoopGauge:
    """One iteration, from its first batch to its end.

    taken: tells how many batches of the epoch this rank has had, with those that it was to leave out.
    batches: how many the epoch has for it; None where that is unknown.
    samples: in one batch of this rank; None where batches have sizes of their own.
    epoch: that of the loader; where the program has announced epochs (`Accelerator.epochs`), theirs counts instead.
    may_train: gradients were enabled when it began.
    fetching: of its loader.
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
        """Where the loop is now; None once it has ended. From any thread but the loop's."""
        if self._end is not None:
            return None
        self._fetching.look()
        return self._look()

    def close(self) -> Progress:
        """The iteration has ended, or was left: where it was then."""
        self._end = self._look(is_over=True)
        return self._end

    def _look(self, is_over: bool = False) -> Progress:
        steps, taken = self._accumulation.clock.done, self._taken()
        has_trained = steps > self._steps_before
        # Before the first step is complete a loop that trains and one that evaluates look alike, but for gradients.
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
