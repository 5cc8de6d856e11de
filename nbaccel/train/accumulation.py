"""Accumulation: when gradients synchronise, what a backward is divided by, and where a step begins. Runs in ranks.

Windows are counted per loader iteration, so an evaluation inside a training loop, a `break` or an exception
cannot disturb another loop's window. Nothing here knows models, strategies or the Accelerator.
"""

from __future__ import annotations

from typing import Any

from nbaccel.events import StepEntered, StepsEnded, emit

__all__ = ["Accumulation", "StepClock", "Window"]


class StepClock:
    """The step boundaries of one rank: where a run can be stopped at the same step on all ranks.

    The rule. A *boundary* is crossed
      - immediately before a prepared loader hands out a batch, unless that batch continues an accumulation
        window of that loader (such a batch belongs to the step that is under way);
      - where no prepared loader is being iterated: at the `accumulate` that opens a window, or, outside
        `accumulate`, at the first `backward` after a synchronised one.
    Each boundary emits ``StepEntered(step, substep)``. `step` counts the synchronised training steps that are
    complete: between two boundaries at least one backward synchronised gradients, however many optimizers or
    losses took part. `substep` counts the boundaries since the last such step, so it also numbers the batches of
    an evaluation; a loop that only one rank runs moves nothing but its substep, and the next training step
    puts the ranks level again. When the outermost prepared loader is exhausted or closed, ``StepsEnded`` is
    emitted. The outlet may raise `RunStopped` from a boundary; the clock is consistent by then.
    """

    __slots__ = ("is_inside", "step", "substep", "trained")

    def __init__(self) -> None:
        self.step = 0
        self.substep = -1
        self.trained = False  # a synchronised backward has run since the last boundary
        self.is_inside = False  # a step was entered and has not been trained yet

    def enter(self) -> None:
        """Cross a boundary."""
        if self.trained:
            self.trained = False
            self.step += 1
            self.substep = 0
        else:
            self.substep += 1
        self.is_inside = True
        emit(StepEntered(self.step, self.substep))

    def train(self) -> None:
        """A synchronised backward is complete."""
        self.trained = True
        self.is_inside = False

    def leave(self) -> None:
        """The loop is over."""
        if self.trained:
            self.trained = False
            self.step += 1
            self.substep = -1
        self.is_inside = False
        emit(StepsEnded())


class Window:
    """One accumulation window after the other, over the batches of one loader iteration.

    source: the prepared loader; None for loops over anything else.
    batches_left: batches this rank will still see, the current one included; None where that is unknown.
    is_last: the batch in hand is the loader's last one.
    position: batches of the open window that went before; 0 when no window is open.
    divisor: what losses of the open window are divided by; 0 before the first `accumulate`.
    sync: whether this batch's backward synchronises gradients and optimizers step.
    """

    __slots__ = ("batches_left", "divisor", "is_last", "position", "source", "sync")

    def __init__(self, source: Any = None, batches_left: int | None = None) -> None:
        self.source = source
        self.batches_left = batches_left
        self.is_last = False
        self.position = 0
        self.divisor = 0
        self.sync = True

    def advance(self, steps: int) -> float:
        """Take the next batch into the window; what the gradients so far must be multiplied with.

        That factor is 1 except where the window turns out to be shorter or longer than foreseen when it was
        opened (a loader without length that ended): then all its losses shall weigh one over its real length.
        """
        if self.position == 0:
            left = self.batches_left
            self.divisor = steps if left is None or left > steps else left
        self.position += 1
        self.sync = self.is_last or self.position >= steps
        if not self.sync:
            return 1.0
        length, self.position = self.position, 0
        if length == self.divisor:
            return 1.0
        factor = self.divisor / length
        self.divisor = length
        return factor


class _Outside(Window):
    """The window of loops over anything else than a prepared loader: it crosses the boundaries itself."""

    __slots__ = ("_clock",)

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock

    def advance(self, steps: int) -> float:
        if self.position == 0:
            self._clock.enter()
        return super().advance(steps)


class Accumulation:
    """The windows that are open in this process, and the clock they share.

    steps: batches per optimizer step; may be changed between windows.
    window: that of the innermost loop; the one to ask ``window.sync``.
    depth: how many `accumulate` blocks are entered.  is_held: inside `no_sync`.
    """

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.clock = StepClock()
        self.depth = 0
        self.is_held = False
        self.window: Window = _Outside(self.clock)
        self._outside = self.window
        self._open: list[Window] = []

    def open(self, source: Any, batches_left: int | None) -> Window:
        """The window of a new iteration over `source`, which becomes the innermost one.

        An earlier iteration over the same loader that somebody still holds is given up.
        """
        self._open = [window for window in self._open if window.source is not source]
        self.window = Window(source, batches_left)
        self._open.append(self.window)
        return self.window

    def close(self, window: Window) -> None:
        """The iteration ended, was left by ``break`` or by an exception: its window is gone."""
        if window not in self._open:
            return
        self._open.remove(window)
        self.window = self._open[-1] if self._open else self._outside
        if not self._open:
            self.clock.leave()

    def enter_bare_backward(self) -> int:
        """A backward outside of `accumulate`: what its loss is divided by. The window is the program's own loop."""
        if self.window is self._outside and not self.clock.is_inside:
            self.clock.enter()
        return self.steps

    def forget(self) -> None:
        """Drop every open window: nothing is prepared any more."""
        self._open.clear()
        self.window = self._outside = _Outside(self.clock)
