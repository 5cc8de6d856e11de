"""Accumulation: when gradients synchronise, what divides a loss, and where a step begins. Runs in ranks.

Windows are counted per loader iteration, so an evaluation inside a training loop, a `break` or an exception
cannot disturb another loop's window. Nothing here knows models, strategies or the Accelerator.

Reasons: docs/design/step.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbaccel.base.events import LoopEntered, StepsEnded, emit, reports
from nbaccel.errors import RunStopped
from nbaccel.train.step.readings import LearningRates

__all__ = [
    "Accumulation",
    "Gate",
    "GradientAccumulationPlugin",
    "Saver",
    "StepClock",
    "Window",
]

_NO_LOOP = LoopEntered(obstacle="no loop over a prepared loader was under way")


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """Rules of accumulation. The names are Accelerate's, except `scale_last_window`.

    Args:
        num_steps: Batches per optimizer step. None is the launch's choice, else 1.
        adjust_scheduler: Accepted, without effect as in Accelerate 1.15: prepared schedulers move with the steps of
            their optimizer.
        sync_with_dataloader: The last batch of a loader ends its window. False: windows continue from one epoch into
            the next.
        sync_each_batch: Exchange gradients at every batch, which needs less memory with sharded models and more time.
            Optimizers still step once per window.
        scale_last_window: A last window of m < N batches is divided by m, so that each of its samples has the same
            weight as the others. False divides by N as Accelerate does, which gives its samples less weight.

    Example:
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
    """Base of objects that save the training automatically at some step boundaries. The base itself never saves."""

    def enter(self, step: int, may_save: bool) -> None:
        """Handle a step boundary, with `step` training steps complete; may raise `RunStopped`.

        Args:
            may_save: The boundary lies between two training steps of one loop.
        """

    def keep(self) -> Any:
        """Return what to keep of this moment, such as random states: an epoch begins, or its training has ended."""

    def stop(self, step: int) -> Path | None:
        """End the run here, on all ranks, with `step` training steps complete.

        Return where they are saved, if they are.
        """
        return None


class StepClock:
    """Step boundaries of one rank: points where a run can be stopped at the same step on all ranks.

    The rule. A *boundary* is crossed
      - immediately before a prepared loader hands out a batch, unless that batch continues an accumulation
        window of that loader (such a batch belongs to the step that is in progress);
      - where no prepared loader is being iterated: at the `accumulate` that opens a window, or, outside
        `accumulate`, at the first `backward` after a synchronised one.
    Where the program calls ``loss.backward()`` itself, the steps of prepared optimizers stand for backwards.
    Each boundary emits ``StepEntered(step, substep)``. `step` counts the synchronised training steps that are
    complete: between two boundaries at least one backward synchronised gradients, however many optimizers or
    losses took part. `substep` counts the boundaries since the last such step, so it also numbers the batches of
    an evaluation; a loop that only one rank runs changes only its substep, and the next training step
    makes the ranks equal again. When the outermost prepared loader is exhausted or closed, ``StepsEnded`` is
    emitted. The outlet may raise `RunStopped` from a boundary; the clock is consistent by then.

    Attributes:
        saver: Is told every boundary; it may save once per step, between two training steps of one loop. At the first
            boundary of a loop it may not: that loop may be an evaluation inside of another loop, and a program that
            resumes there would leave the evaluation out. Where a whole loop had only one step, the only possible place
            is the first boundary of the next.
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
        self.follows_single_step = False  # the loop before had a single step, and no loop is around it
        self.offered = 0  # the last step at which the saver might save
        self.passes = 0  # iterations of prepared loaders that trained and are over
        self.kept: Any = None  # what the saver kept at the end of the last one, or at the begin of an epoch after that
        self.substep = -1
        self.trained = False  # a synchronised backward has run since the last boundary
        self.is_inside = False  # a step was entered and is not trained yet

    @property
    def done(self) -> int:
        """Training steps that are complete."""
        return self.step + self.trained

    @property
    def place(self) -> tuple[int, int]:
        """The last boundary that was crossed."""
        return self.step, self.substep

    def enter(self) -> None:
        """Cross a step boundary."""
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
        """Note that a loop begins."""
        self.follows_single_step = is_outermost and self.done - self.began == 1
        self.began = self.done

    def train(self) -> None:
        """Note that a synchronised backward is complete."""
        self.trained = True
        self.is_inside = False

    def restart(self, step: int) -> None:
        """Reset the clock: the program starts again, with `step` training steps complete."""
        self.step = self.began = self.offered = step
        self.substep = -1
        self.trained = self.is_inside = False

    def end_pass(self) -> None:
        """Note that an iteration of a prepared loader that trained is over."""
        self.passes += 1
        self.keep()

    def keep(self) -> None:
        """Let the saver keep the state before a loop begins, since a resumed program may continue here."""
        if self.saver is not None:
            self.kept = self.saver.keep()

    def leave(self) -> None:
        """Note that the outermost loop is over."""
        if self.trained:
            self.trained = False
            self.step += 1
            self.substep = -1
        self.is_inside = False
        emit(StepsEnded())


class Window:
    """The accumulation windows of one loader iteration, one after the other.

    Batches are not split here; see `nbaccel.train.oom.split_batches` for windows over batches in parts.

    Args:
        source: The prepared loader; None for loops over anything else.
        batches_left: Batches this rank will still see, the current one included; None where that is unknown.

    Attributes:
        is_last: The current batch is the loader's last one.
        is_spent: That one was trained on.
        ends_too: The last batch of another loader is trained on with the current one.
        position: Batches of the open window before the current one; 0 when no window is open.
        divisor: The number that divides the losses of the open window.
        is_told: The program has read the divisor of the open window, and may have multiplied its losses by it.
        about: The ids of the models that `position`, `divisor` and `is_told` belong to.
        sync: The backward of this batch synchronises gradients, and optimizers step.
        is_scaled: A window is divided by its real length, not by its planned one.
        ends_with_source: The loader's last batch ends the window.
        began: Training steps that were complete when the iteration began.
        loop: The event that was emitted when the iteration began.
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
        "is_told",
        "loop",
        "position",
        "source",
        "sync",
    )

    comes_in_parts = False
    """True if batches may come in parts. Otherwise the hooks below do nothing, and a step need not call them."""

    has_more = False
    """True while more parts of the current batch follow: what happens once per batch waits for the last one."""

    is_repeated = False
    """True if the current part was handed out before, and has weight zero."""

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
        self.is_scaled = rules.scale_last_window and self.ends_with_source  # otherwise every window has full length
        self.is_last = self.is_spent = self.ends_too = False
        self.position = 0
        self.divisor = 1
        self.is_told = False
        self.about: tuple[int, ...] = ()
        self._apart: dict[tuple[int, ...], tuple[int, int, bool]] = {}  # the same of windows of other models
        self.began = 0
        self.sync = True
        self.loop = _NO_LOOP

    @property
    def unfinished(self) -> int:
        """Number of batches of the open window whose gradients no optimizer has used yet."""
        return self.position

    def turn_to(self, models: tuple[int, ...]) -> None:
        """Count for `models` from now on: a batch that trains two models, in a block each, counts for both."""
        if self.about:  # otherwise the window comes from an earlier iteration, and continues with these
            self._apart[self.about] = (self.position, self.divisor, self.is_told)
            self.position, self.divisor, self.is_told = self._apart.pop(models, (0, 1, False))
        self.about = models

    def begun_for(self) -> list[tuple[int, ...]]:
        """Return the models, by their ids, of each window that is begun here."""
        apart = [models for models, (position, *_) in self._apart.items() if position and models != self.about]
        return [self.about, *apart] if self.position else apart

    def hand_over(self, other: Window) -> None:
        """Let the window that is begun here for the models of `other` continue there."""
        if self.about == other.about:
            other.position, other.divisor, other.is_told = self.position, self.divisor, self.is_told
            self.position = 0
        else:
            other.position, other.divisor, other.is_told = self._apart.pop(other.about)

    def weighed(self, divisor: float, in_accumulate: bool) -> float:
        """Return the divisor of the current loss, where that of a whole batch is divided by `divisor`."""
        return divisor

    def after_backward(self) -> None:
        """Note that a backward that synchronised nothing is complete."""

    def deferred_step(self, closure: Any) -> None:
        """Note that a prepared optimizer was told to step and does not, since the window is still open."""

    def refuse_raw(self) -> None:
        """Refuse, in subclasses, a step of a prepared optimizer with gradients of the program's own backward."""

    def real(self, samples: int, world_size: int) -> int:
        """Return how many of the samples that all ranks now process are among the first `samples` of the round."""
        return samples

    def held(self, samples: int | None) -> int | None:
        """Return how many samples this rank now processes, of a batch of `samples`."""
        return samples

    def advance(self, steps: int, has_more: bool = False) -> float:
        """Take the next batch into the window; return the factor for the gradients so far.

        That factor is 1 except where the window turns out to be shorter or longer than planned when it was
        opened (a loader without length that ended): then each of its losses must weigh one over its real length. Where
        the program was told the divisor, it stays.

        Args:
            has_more: Parts of the batch are still to come; the batch counts with the last one.
        """
        if steps == 1 and not (has_more or self.position):  # every batch is a window, as in most trainings
            self.divisor, self.sync = 1, True
            return 1.0
        if self.position == 0 or not self.is_scaled:  # the divisor of its losses, as far as it is known
            left = self.batches_left  # below 1 where a loader has more batches than its length says
            self.divisor = left if self.is_scaled and left is not None and 0 < left < steps else steps
            self.is_told = self.is_told and self.position > 0
        if has_more:
            self.sync = False
            return 1.0
        self.position += 1
        self.sync = self.position >= steps or ((self.is_last or self.ends_too) and self.ends_with_source)
        if not self.sync:
            return 1.0
        length, self.position = self.position, 0
        if length == self.divisor or self.is_told or not self.is_scaled:
            return 1.0
        factor = self.divisor / length
        self.divisor = length
        return factor


class Gate:
    """Hands the batches of prepared loaders to their loops whole. Base of those that split them."""

    def over(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what an iteration of `loader` hands out of its `batches`."""
        return batches

    def window(self, source: Any, batches_left: int | None, rules: GradientAccumulationPlugin, steps: int) -> Window:
        """Return the window of a new iteration.

        Args:
            steps: Batches per optimizer step.
        """
        return Window(source, batches_left, rules)


class Block(Protocol):
    """A block of `accumulate` that has seen no backward: the batch it trains on may still be handed out inside it.

    Attributes:
        is_settled: Its first backward needs nothing beyond what was decided.
    """

    is_settled: bool

    def withdraw(self) -> None:
        """Undo what the block has decided: it will train on another batch than the current one."""

    def decide(self) -> None:
        """Count the current batch, and hold back gradients where its window continues."""

    def rescale(self) -> None:
        """Multiply the gradients so far by the factor that the real length of their window requires."""

    def settle(self) -> None:
        """Prepare the first backward: scale the gradients so far, and let it synchronise, as was decided."""


class Accumulation:
    """The windows that are open in this process, and the clock they share.

    A block of `accumulate` trains on the batch that is current at its first backward, wherever that was taken. Batches
    of several loaders that are trained on in turn, by the same models, share one window.

    Args:
        steps: Batches per optimizer step; may be changed between windows.
        rules: The other choices.

    Attributes:
        window: The window of the loader that handed out the current batch; the one to ask ``window.sync``.
        outside: The window of loops over anything else than a prepared loader.
        counted: The window in which the last block has counted its batch.
        block: The block that awaits its batch, if any.
        depth: How many `accumulate` blocks are entered.
        is_held: Inside `no_sync`.
        gate: How batches reach the loops.
        epoch, epochs: The current epoch, and how many the program has announced; None where it has not.
        backwards: How many backwards have run through `accelerator.backward`.
        is_local: Inside `hold_gradients`, where ranks exchange parameters instead.
        left: Where a window is begun that its loop has left, by `break` for one, by the ids of its models. Its
            gradients are where they were, so the next batch of these models continues it.
        rates: The learning rates of the optimizers that step with these windows.
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
        self.rates = LearningRates()
        self.block: Block | None = None
        self._open: list[Window] = []
        self._handed_out: list[Window] = []  # those with a batch that the program now uses, the newest one last
        self._left_at: tuple[int, int] | None = None  # the place of the clock where the last loop was left
        self.left: dict[tuple[int, ...], Window] = {}
        self._carried: dict[Any, int] = {}  # positions of windows that continue in the next epoch, by loader
        self.window = self.outside = self.counted = Window(rules=self.rules)

    def open(self, source: Any, batches_left: int | None) -> Window:
        """Open and return the window of a new iteration over `source`; it becomes current with its first batch.

        An earlier iteration over the same loader that is still referenced is given up.
        """
        for window in self.windows_of(source):
            self._give_up(window)
        self.clock.begin(is_outermost=not self._open)
        window = self.gate.window(source, batches_left, self.rules, self.steps)
        window.position = self._carried.pop(source, 0)
        window.began = self.clock.began
        self._open.append(window)
        emit(window.loop)
        return window

    def windows_of(self, source: Any) -> list[Window]:
        """Return the open windows of iterations over `source`, which another one would give up."""
        return [window for window in self._open if window.source is source]

    def reopen(self, windows: list[Window]) -> None:
        """Continue `windows`: the iteration that they were given up for is dropped, and its own is still open."""
        self._open[:0] = windows
        self._handed_out[:0] = windows
        self._is_back(windows)

    def take(self, window: Window) -> None:
        """Make `window` current: it hands out a batch, and another window was current, or a block awaits its batch.

        The caller calls ``block.decide()`` afterwards, where there is a block.
        """
        if self.block is not None:
            self.block.withdraw()
        elif self.window is not window:
            window.sync = self.window.sync if self.depth else True  # a block that has decided keeps its decision
        if self.window is not window:
            window.ends_too = any(one.is_last and not one.is_spent for one in self._open if one is not window)
            self.window = window
            if window not in self._open:  # it was given up, and continues nevertheless
                self._open.append(window)
                self._is_back([window])
            self._handed_out = [one for one in self._handed_out if one is not window] + [window]

    def end_of_block(self) -> None:
        """Note the end of a block that trained on the last batch of a loader."""
        for window in self._open:
            window.is_spent |= window.is_last
            window.ends_too = False

    def may_go_on(self, window: Window) -> bool:
        """Return whether `window` is begun and not over, so that another loader's batch may continue it."""
        return window.position > 0 and (window is self.outside or window in self._open)

    @property
    def is_iterating(self) -> bool:
        """True while a prepared loader is being iterated."""
        return bool(self._open)

    @property
    def is_at_beginning(self) -> bool:
        """True if a prepared loader is being iterated and nothing was trained since: the loop may be run again."""
        return bool(self._open) and self._open[0].began == self.clock.done

    def close(self, window: Window, is_whole: bool = True) -> None:
        """Drop `window`: its iteration ended, or (not `is_whole`) was left by ``break`` or by an exception."""
        if window not in self._open:
            return
        was_in_hand, block = self.window, self.block
        if block is not None:
            block.withdraw()
        self._handed_out = [one for one in self._handed_out if one is not window]
        self.window = self._handed_out[-1] if self._handed_out else self.outside
        if block is not None:
            block.decide()  # before the window is removed: what is begun there continues here
        elif self.depth:
            self.window.sync = was_in_hand.sync
        self._give_up(window)
        self._tell_loop(window, is_whole)
        if self._open:
            self.clock.began = self.window.began
        else:
            self.clock.leave()

    def _tell_loop(self, left: Window, is_whole: bool) -> None:
        """Report which loop continues; or, where an exception may be propagating, in which loop it was raised.

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
        else:
            self.left |= dict.fromkeys(window.begun_for(), window)

    def _is_back(self, windows: list[Window]) -> None:
        """Note that the loops of these windows go on."""
        if self.left:
            self.left = {models: window for models, window in self.left.items() if window not in windows}

    def enter_backward(self) -> float:
        """Return the divisor for the loss of the backward that follows."""
        block, window = self.block, self.window
        self.backwards += 1
        if block is not None:
            self.block = None
            if not block.is_settled:
                block.settle()
        divisor = self.counted.divisor if self.depth else self.enter_bare_backward()
        return window.weighed(divisor, self.depth > 0) if window.comes_in_parts else divisor

    def tell_divisor(self) -> int:
        """Return the divisor of the losses in the present block of `accumulate`, and keep it for its window."""
        self.counted.is_told = True
        return self.counted.divisor

    def enter_bare_backward(self) -> int:
        """Return the loss's divisor for a backward outside of `accumulate`; the window is the program's own loop."""
        if self.window is self.outside and not self.clock.is_inside:
            self.clock.enter()
        return self.steps

    def forget(self) -> None:
        """Drop every open window, since nothing is prepared any more."""
        self._open.clear()
        self._handed_out.clear()
        self._carried.clear()
        self.left.clear()
        self.window = self.outside = self.counted = Window(rules=self.rules)
