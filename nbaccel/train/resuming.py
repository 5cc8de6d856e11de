"""Resuming: the epoch with which a program continues, and values it keeps between its steps. Runs in ranks.

Both are saved with every checkpoint and restored with it. The position inside the epoch is the loaders' part, and the
files are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbaccel.train.accumulation import Accumulation, StepClock

if TYPE_CHECKING:
    from nbaccel.train.data.loader import PreparedLoader

__all__ = ["Epochs", "Remembered", "in_words"]


def in_words(step: int, loaders: Sequence[PreparedLoader]) -> str:
    """Return where a training continues, as the panel shows it: "step 92, epoch 3, batch 28/32".

    Epochs are counted from 1, and batches are those of one rank: of the loader whose epoch is in progress. With several
    loaders that is the one that has come furthest in its epoch; an evaluation starts from its beginning.
    """
    if not loaders:
        return f"step {step:,}"
    epoch, done, batches = max((loader.goes_on_at for loader in loaders), key=lambda place: place[1])
    return f"step {step:,}, epoch {epoch + 1:,}, batch {done:,}" + ("" if batches is None else f"/{batches:,}")


class Remembered(SimpleNamespace):
    """Values of the program's own, as attributes; `Accelerator.remember` makes it.

    >>> memory = Remembered()
    >>> memory.keep(best=0.0, history=[])
    >>> memory.history.append(0.5)
    >>> memory.state_dict()
    {'best': 0.0, 'history': [0.5]}
    """

    def keep(self, **defaults: Any) -> None:
        """Set `defaults` where there is no value of that name yet, from a checkpoint or an earlier call."""
        for name, value in defaults.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Epochs:
    """Epochs of a program that can be resumed: the loop's number, and whether its training is done.

    under_way: the epoch that the loop is in, or will begin with.
    is_used: the program has such a loop.
    passes_before: iterations that had trained when the epoch began, by the clock's count.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.is_used = False
        self._is_resumed = False
        self.passes_before = 0

    def run(self, count: int, accumulation: Accumulation) -> Iterator[int]:
        """Yield 0, 1, ... `count` - 1; after `load` begin with the epoch in which the checkpoint was written.

        Loops over prepared loaders report these epochs until this loop ends or is left.
        """
        self.is_used = True
        clock = accumulation.clock
        first, self._is_resumed = self.under_way if self._is_resumed else 0, False
        try:
            for self.under_way in range(first, count):
                self.passes_before = clock.passes
                clock.keep()
                accumulation.epoch, accumulation.epochs = self.under_way, count
                yield self.under_way
        finally:
            accumulation.epoch = accumulation.epochs = None
        self.under_way = max(first, count)
        self.passes_before = clock.passes

    def next(self, clock: StepClock) -> int:
        """Return the epoch with which a resumed program begins: an epoch whose training is over is done."""
        return self.under_way + int(clock.passes > self.passes_before)

    def load(self, epoch: int, clock: StepClock) -> None:
        self.under_way = epoch
        self._is_resumed = True
        self.passes_before = clock.passes
