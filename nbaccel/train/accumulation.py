"""Accumulation: when gradients synchronise, what a backward is divided by, and where a step begins. Runs in ranks.

Windows are counted per loader iteration, so an evaluation inside a training loop, a `break` or an exception
cannot disturb another loop's window. Nothing here knows models, strategies or the Accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbaccel.errors import RunStopped
from nbaccel.events import LoopEntered, StepsEnded, emit, reports

__all__ = ["Accumulation", "Gate", "GradientAccumulationPlugin", "Saver", "StepClock", "Window"]


_NO_LOOP = LoopEntered(obstacle="no loop over a prepared loader was under way")


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """The rules of accumulation; the names are Accelerate's, but for `scale_last_window`.

    num_steps: batches per optimizer step; None is what the launch was told, else 1.
    adjust_scheduler: accepted, and without effect as in Accelerate 1.15: prepared schedulers move with their
    optimizer's steps.
    sync_with_dataloader: the last batch of a loader ends its window. False: windows run on from one epoch into the
    next, as if the loader had no end.
    sync_each_batch: exchange gradients at every batch, which needs less memory with sharded models and more time;
    optimizers still step once per window.
    scale_last_window: a last window of m < N batches is divided by m, so that each of its samples weighs as much as
    it should. False divides by N as Accelerate does: the same numbers, under-scaled.

    >>> GradientAccumulationPlugin(num_steps=4).scale_last_window
    True
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    scale_last_window: bool = True

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")


class Saver:
    """Saves the training by itself, now and then. The base never does."""

    def enter(self, step: int, may_save: bool) -> None:
        """At a step boundary, with `step` training steps complete; it may raise `RunStopped`.

        may_save: the boundary lies between two training steps of one loop.
        """

    def keep(self) -> Any:
        """What is to be kept of this moment, such as the random states: an epoch begins, or its training is through."""

    def stop(self, step: int) -> Path | None:
        """The run ends here, on all ranks, with `step` training steps complete. Where they are saved, if they are."""
        return None


class StepClock:
    """The step boundaries of one rank: where a run can be stopped at the same step on all ranks.

    The rule. A *boundary* is crossed
      - immediately before a prepared loader hands out a batch, unless that batch continues an accumulation
        window of that loader (such a batch belongs to the step that is under way);
      - where no prepared loader is being iterated: at the `accumulate` that opens a window, or, outside
        `accumulate`, at the first `backward` after a synchronised one.
    Where the program calls ``loss.backward()`` itself, the steps of prepared optimizers stand for backwards.
    Each boundary emits ``StepEntered(step, substep)``. `step` counts the synchronised training steps that are
    complete: between two boundaries at least one backward synchronised gradients, however many optimizers or
    losses took part. `substep` counts the boundaries since the last such step, so it also numbers the batches of
    an evaluation; a loop that only one rank runs moves nothing but its substep, and the next training step
    puts the ranks level again. When the outermost prepared loader is exhausted or closed, ``StepsEnded`` is
    emitted. The outlet may raise `RunStopped` from a boundary; the clock is consistent by then.

    saver: hears of every boundary; it may save once per step, between two training steps of one loop. At the first
    boundary of a loop it may not: that may be an evaluation inside of another loop, and whoever resumed from there
    would leave the evaluation out. Where a whole loop had only one step, there is no other place than the first
    boundary of the next.
    """

    __slots__ = (
        "began",
        "follows_single_step",
        "is_inside",
        "kept",
        "offered",
        "passes",
        "saver",
        "step",
        "substep",
        "trained",
    )

    def __init__(self) -> None:
        self.saver: Saver | None = None
        self.step = 0
        self.began = 0  # `step` when the innermost loop began
        self.follows_single_step = False  # the loop before it had one, and no loop is around it
        self.offered = 0  # the last step at which the saver might save
        self.passes = 0  # iterations of prepared loaders that trained and are over
        self.kept: Any = None  # what the saver kept of the end of the last one, or of the epoch's begin after that
        self.substep = -1
        self.trained = False  # a synchronised backward has run since the last boundary
        self.is_inside = False  # a step was entered and has not been trained yet

    @property
    def done(self) -> int:
        """Training steps that are complete."""
        return self.step + self.trained

    @property
    def place(self) -> tuple[int, int]:
        """The last boundary that was crossed."""
        return self.step, self.substep

    def enter(self) -> None:
        """Cross a boundary."""
        if self.trained:
            self.trained = False
            self.step += 1
            self.substep = 0
        else:
            self.substep += 1
        self.is_inside = True
        try:
            reports.enter_step(self.step, self.substep)
            if self.saver is not None:
                self.saver.enter(self.step, self._may_save())
        except RunStopped:
            if self.saver is not None:
                self.saver.stop(self.step)
            raise

    def _may_save(self) -> bool:
        if self.step == self.offered or not (self.step > self.began or self.follows_single_step):
            return False
        self.offered = self.step
        return True

    def begin(self, is_outermost: bool) -> None:
        """A loop begins."""
        self.follows_single_step = is_outermost and self.done - self.began == 1
        self.began = self.done

    def train(self) -> None:
        """A synchronised backward is complete."""
        self.trained = True
        self.is_inside = False

    def restart(self, step: int) -> None:
        """The program begins anew, with that many training steps behind it."""
        self.step = self.began = self.offered = step
        self.substep = -1
        self.trained = self.is_inside = False

    def end_pass(self) -> None:
        """An iteration of a prepared loader is over that has trained."""
        self.passes += 1
        self.keep()

    def keep(self) -> None:
        """A resumed program may go on from here, where a loop is about to begin."""
        if self.saver is not None:
            self.kept = self.saver.keep()

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
    is_spent: that one was trained on.  ends_too: the last batch of another loader is trained on with the one in hand.
    position: batches of the open window that went before; 0 when no window is open.
    divisor: what losses of the open window are divided by.
    about: the ids of the models that these two are about.
    sync: whether this batch's backward synchronises gradients and optimizers step.
    is_scaled: a window is divided by its real length, not by what it should have had.
    ends_with_source: the loader's last batch ends the window.
    began: training steps that were complete when the iteration began.
    loop: what was reported of the iteration when it began.

    Batches come whole here; see `nbaccel.train.gate` for windows over batches in parts.
    """

    __slots__ = (
        "_apart",
        "about",
        "batches_left",
        "began",
        "divisor",
        "ends_too",
        "ends_with_source",
        "is_last",
        "is_scaled",
        "is_spent",
        "loop",
        "position",
        "source",
        "sync",
    )

    comes_in_parts = False
    """Whether batches may come in parts. Else the hooks below do nothing, and a step need not call them."""

    has_more = False
    """More parts of the batch in hand follow: whatever happens once per batch waits for the last one."""

    is_repeated = False
    """What is in hand was handed out before, and weighs nothing."""

    def __init__(
        self,
        source: Any = None,
        batches_left: int | None = None,
        rules: GradientAccumulationPlugin | None = None,
    ) -> None:
        rules = rules or GradientAccumulationPlugin()
        self.source = source
        self.batches_left = batches_left
        self.ends_with_source = rules.sync_with_dataloader
        self.is_scaled = rules.scale_last_window and self.ends_with_source  # else every window is whole
        self.is_last = self.is_spent = self.ends_too = False
        self.position = 0
        self.divisor = 1
        self.about: tuple[int, ...] = ()
        self._apart: dict[tuple[int, ...], tuple[int, int]] = {}  # position and divisor of windows of other models
        self.began = 0
        self.sync = True
        self.loop = _NO_LOOP

    @property
    def unfinished(self) -> int:
        """Batches of the open window whose gradients no optimizer has taken yet."""
        return self.position

    def turn_to(self, models: tuple[int, ...]) -> None:
        """Count for other models from now on: a batch on which two are trained, in a block each, is one of each."""
        if self.about:  # else the window was carried over from an iteration before, and goes on with these
            self._apart[self.about] = (self.position, self.divisor)
            self.position, self.divisor = self._apart.pop(models, (0, 1))
        self.about = models

    def weighed(self, divisor: float, in_accumulate: bool) -> float:
        """What the loss in hand is divided by, where that of a whole batch is divided by `divisor`."""
        return divisor

    def after_backward(self) -> None:
        """A backward that synchronised nothing is through."""

    def withheld_step(self, closure: Any) -> None:
        """A prepared optimizer was told to step, and will not, since the window is still open."""

    def refuse_raw(self) -> None:
        """A prepared optimizer is about to step, with gradients of the program's own backward."""

    def real(self, samples: int, world_size: int) -> int:
        """How many samples in the hands of all ranks are among the first `samples` of the round."""
        return samples

    def advance(self, steps: int, has_more: bool = False) -> float:
        """Take the next batch into the window; what the gradients so far must be multiplied with.

        That factor is 1 except where the window turns out to be shorter or longer than foreseen when it was
        opened (a loader without length that ended): then all its losses shall weigh one over its real length.
        has_more: parts of the batch are still to come; it counts with the last one.
        """
        if steps == 1 and not (has_more or self.position):  # every batch is a window, as in most trainings
            self.divisor, self.sync = 1, True
            return 1.0
        if self.position == 0 or not self.is_scaled:  # what its losses are divided by, as far as that is known
            left = self.batches_left  # below 1 where a loader has more batches than it said
            self.divisor = left if self.is_scaled and left is not None and 0 < left < steps else steps
        if has_more:
            self.sync = False
            return 1.0
        self.position += 1
        self.sync = self.position >= steps or ((self.is_last or self.ends_too) and self.ends_with_source)
        if not self.sync:
            return 1.0
        length, self.position = self.position, 0
        if length == self.divisor or not self.is_scaled:
            return 1.0
        factor = self.divisor / length
        self.divisor = length
        return factor


class Gate:
    """How the batches of prepared loaders reach their loops: whole. The base of those that do otherwise."""

    def over(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """What an iteration of `loader` hands out of its `batches`."""
        return batches

    def window(self, source: Any, batches_left: int | None, rules: GradientAccumulationPlugin, steps: int) -> Window:
        """The window of a new iteration. steps: batches per optimizer step."""
        return Window(source, batches_left, rules)


class Block(Protocol):
    """A block of `accumulate` that has seen no backward: the batch it trains on may still be handed out inside of it.

    is_settled: its first backward needs nothing more than what was decided.
    """

    is_settled: bool

    def withdraw(self) -> None:
        """Undo what the block has decided: another batch than the one in hand will be trained on."""

    def decide(self) -> None:
        """Count the batch in hand, and hold back gradients where its window goes on."""

    def rescale(self) -> None:
        """Multiply the gradients so far by what their window has turned out to weigh."""

    def settle(self) -> None:
        """The first backward comes: scale the gradients so far, and have it synchronise, as was decided."""


class Accumulation:
    """The windows that are open in this process, and the clock they share.

    A block of `accumulate` trains on the batch that is in hand at its first backward, wherever that was taken. Batches
    of several loaders that are trained on in turn, by the same models, share one window.

    steps: batches per optimizer step; may be changed between windows.  rules: all else that was chosen.
    window: that of the loader whose batch is in hand; the one to ask ``window.sync``.
    outside: the window of loops over anything else than a prepared loader.
    counted: the window on which the last block has counted its batch.  block: the one that awaits its batch, if any.
    depth: how many `accumulate` blocks are entered.  is_held: inside `no_sync`.
    gate: how batches reach the loops.
    epoch, epochs: which one the program is in, and how many it has announced; None where it has not.
    backwards: how many of ours have run.
    is_local: inside `hold_gradients`, where ranks exchange parameters instead.
    """

    def __init__(self, steps: int = 1, rules: GradientAccumulationPlugin | None = None) -> None:
        self.gate = Gate()
        self.steps = steps
        self.rules = rules or GradientAccumulationPlugin()
        self.clock = StepClock()
        self.depth = 0
        self.is_held = False
        self.epoch: int | None = None
        self.epochs: int | None = None
        self.is_local = False
        self.backwards = 0
        self.block: Block | None = None
        self._open: list[Window] = []
        self._handed_out: list[Window] = []  # those of them with a batch in the program's hands, the newest one last
        self._left_at: tuple[int, int] | None = None  # the place of the clock where a loop was left last
        self._carried: dict[Any, int] = {}  # where windows that run on into the next epoch were left, by loader
        self.window = self.outside = self.counted = Window(rules=self.rules)

    def open(self, source: Any, batches_left: int | None) -> Window:
        """The window of a new iteration over `source`; it is in hand from its first batch on.

        An earlier iteration over the same loader that somebody still holds is given up.
        """
        for window in [window for window in self._open if window.source is source]:
            self._give_up(window)
        self.clock.begin(is_outermost=not self._open)
        window = self.gate.window(source, batches_left, self.rules, self.steps)
        window.position = self._carried.pop(source, 0)
        window.began = self.clock.began
        self._open.append(window)
        emit(window.loop)
        return window

    def take(self, window: Window) -> None:
        """A batch of `window` is handed out, and another window is in hand, or a block awaits its batch.

        Whoever hands it out calls ``block.decide()`` afterwards, where there is one.
        """
        if self.block is not None:
            self.block.withdraw()
        elif self.window is not window:
            window.sync = self.window.sync if self.depth else True  # a block that is decided stays so
        if self.window is not window:
            window.ends_too = any(one.is_last and not one.is_spent for one in self._open if one is not window)
            self.window = window
            if window not in self._open:  # it was given up, and goes on nevertheless
                self._open.append(window)
            self._handed_out = [one for one in self._handed_out if one is not window] + [window]

    def spend(self) -> None:
        """A block is over that trained on the last batch of a loader."""
        for window in self._open:
            window.is_spent |= window.is_last
            window.ends_too = False

    def may_go_on(self, window: Window) -> bool:
        """Whether `window` is begun and not over, so that another loader's batch may continue it."""
        return window.position > 0 and (window is self.outside or window in self._open)

    @property
    def is_iterating(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._open)

    @property
    def is_at_beginning(self) -> bool:
        """Whether a prepared loader is being iterated, and nothing has been trained since: the loop may come again."""
        return bool(self._open) and self._open[0].began == self.clock.done

    def close(self, window: Window, is_whole: bool = True) -> None:
        """The iteration ended, or (not `is_whole`) was left by ``break`` or by an exception: its window is gone."""
        if window not in self._open:
            return
        was_in_hand, block = self.window, self.block
        if block is not None:
            block.withdraw()
        self._handed_out = [one for one in self._handed_out if one is not window]
        self.window = self._handed_out[-1] if self._handed_out else self.outside
        if block is not None:
            block.decide()  # before the window is gone: what is begun there goes on here
        elif self.depth:
            self.window.sync = was_in_hand.sync
        self._give_up(window)
        self._tell_loop(window, is_whole)
        if self._open:
            self.clock.began = self.window.began
        else:
            self.clock.leave()

    def _tell_loop(self, left: Window, is_whole: bool) -> None:
        """Report which loop goes on; or, where an exception may be passing through, in which one it was raised.

        An exception closes the inner loop first and the outer ones with it, before another batch is handed out.
        """
        if is_whole:
            emit(self.window.loop)
        elif (place := self.clock.place) != self._left_at:
            self._left_at = place
            emit(left.loop)

    def _give_up(self, window: Window) -> None:
        self._open.remove(window)
        self._handed_out = [one for one in self._handed_out if one is not window]
        if not self.rules.sync_with_dataloader and window.source is not None:
            self._carried[window.source] = window.position

    def enter_backward(self) -> float:
        """What the loss of the backward that comes is divided by."""
        block, window = self.block, self.window
        self.backwards += 1
        if block is not None:
            self.block = None
            if not block.is_settled:
                block.settle()
        divisor = self.counted.divisor if self.depth else self.enter_bare_backward()
        return window.weighed(divisor, self.depth > 0) if window.comes_in_parts else divisor

    def enter_bare_backward(self) -> int:
        """A backward outside of `accumulate`: what its loss is divided by. The window is the program's own loop."""
        if self.window is self.outside and not self.clock.is_inside:
            self.clock.enter()
        return self.steps

    def forget(self) -> None:
        """Drop every open window: nothing is prepared any more."""
        self._open.clear()
        self._handed_out.clear()
        self._carried.clear()
        self.window = self.outside = self.counted = Window(rules=self.rules)
