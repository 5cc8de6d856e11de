"""`LoopLog` answers what rewritten code asks, and writes the records of its loops. Runs in ranks.

Rewritten code (see `nbaccel.features.check.dry_run.rewriting`) asks the log before each round; cut loaders and
optimizers tell it what happens. After how many rounds a loop ends is decided by `loop_spans.Loop`. Records are written
when a loop, a branch or a pass ends, and when a loop matters for the first time: what a killed rank has left says where
it was.

Seconds are those of `clock`, which waits for the GPU first: a round ends when its work is done, not when it was asked
for. So a loop that never waits for its device seems as long as its loader and its device together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbaccel.features.check.dry_run.device_clock import device_seconds
from nbaccel.features.check.dry_run.loop_spans import (
    KEPT,
    MOST_BATCHES,
    MOST_RECORDS,
    Branch,
    DryRunEnded as DryRunEnded,
    Loop,
    OpenSpans,
    Span,
    TrainerPart,
    Write,
)

__all__ = ["DryRunEnded", "LoopLog", "MeasuredPass"]

_COMPARED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

_NOTHING = nullcontext()


class LoopLog:
    """The log of one rank, for one thread: the one that makes it.

    Args:
        write: Takes each record.
        clock: Returns seconds.
    """

    def __init__(self, write: Write, clock: Callable[[], float] = device_seconds) -> None:
        self._open = OpenSpans(write, clock)
        self._own, self._is_here = self._open.own, self._open.is_here
        self._homes: dict[int, int] = {}  # of each period, the number of the loop whose rounds it counts
        self._asked: Loop | None = None  # the loop of the last period
        self._first_values: dict[int, int] = {}  # of each period

    # --- what rewritten code calls ------------------------------------------------------------------------------

    def loop(self, number: int) -> Any:
        """Return the context in which a loop runs."""
        return Loop(self._open, number, self._open.top) if self._is_here() else _NOTHING

    def over(self, number: int, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return what the innermost loop, a `for`, iterates over instead of `iterable`."""
        loop = self._own(number)
        return iterable if loop is None else loop.over(iterable)

    def goes_on(self, number: int) -> bool:
        """Return whether the innermost loop, a `while`, may test whether it has another round."""
        loop = self._own(number)
        return loop is None or loop.may_go_on()

    def holds(self, number: int, test: Any) -> bool:
        """Return the truth of `test`, by which the innermost `while` has another round or ends."""
        is_true = bool(test)
        if (loop := self._own(number)) is not None:
            if is_true:
                loop.begin_round()
            else:
                loop.end = "exhausted"
        return is_true

    def has_ended(self, number: int) -> bool:
        """Return whether the innermost loop, which is in its `else`, has ended by itself: it was not cut."""
        loop = self._own(number)
        return loop is None or loop.end != "cut"

    def every(self, number: int, value: Any, period: Any, remainder: Any) -> Any:
        """Return ``value % period == remainder``; in the last round that a loop gets it is true if it never was."""
        is_true = value % period == remainder
        is_count = type(value) is int and type(period) is int and type(remainder) is int
        loop = self._home_of(number, value) if is_count and self._is_here() else None
        self._asked = loop
        if loop is None:
            return is_true
        has_moved = self._first_values.setdefault(number, value) != value  # the number of a rank does not
        return loop.every(number, value, period, remainder, is_true, has_moved)

    def branch(self, number: int) -> Any:
        """Return the context in which the body of a periodic `if` runs."""
        loop = self._asked if self._is_here() else None
        if loop is None or loop.rounds > MOST_RECORDS or loop.is_long():
            return _NOTHING
        outer = self._open.top
        while not (outer is loop or outer.matters or isinstance(outer, Branch)):
            assert outer.outer is not None
            outer = outer.outer
        return Branch(self._open, number, outer)

    def compare(self, number: int, left: Any, op: str, right: Any) -> Any:
        """Return the result of the comparison, and keep its values."""
        if self._is_here() and (loop := self._open.innermost()) is not None and not loop.is_long():
            loop.keep_compared(number, left, op, right)
        return _COMPARED[op](left, right)

    # --- what loaders and optimizers call -----------------------------------------------------------------------

    def begin_pass(
        self, place: str, name: str, batches: int | None, mean_size: float | None, workers: int = 0
    ) -> MeasuredPass:
        """Begin an iteration over a loader.

        Args:
            place: Where the program iterates.
            name: The name of the loader, for people.
            batches: The batches of the whole pass; None unknown.
            mean_size: Mean of the sizes of all its batches, in the unit of `MeasuredPass.batch`; None unknown.
            workers: Processes that make its batches.
        """
        begun = MeasuredPass(self._open, place, name, batches, mean_size, workers)
        if self._is_here():
            self._open.matter()
            for loop in self._open.loops():
                loop.note_begin(begun)
        return begun

    def note_step(self) -> None:
        """Note that an optimizer stepped."""
        if not self._is_here():
            return
        self._open.matter()
        self._open.note_setup(self._open.now())
        for depth, loop in enumerate(self._open.loops()):
            loop.note_step(is_inner=depth > 0)

    def part(self, number: int, facts: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return the context of a library's training, or of an evaluation or a save in it.

        Args:
            number: A negative one that says which.
            facts: The facts of its record; they may be filled until it ends.
        """
        return TrainerPart(self._open, number, facts) if self._is_here() else _NOTHING

    def present(self) -> tuple[tuple[int, int], ...]:
        """Return the open loops with their rounds: equal twice if no open loop has moved in between."""
        return tuple((loop.id, loop.rounds) for loop in self._open.loops())

    def open_parts(self) -> list[int]:
        """Return the numbers of the open loops and branches, the outermost first."""
        numbers = []
        span: Span | None = self._open.top
        while span is not None and span is not self._open.whole:
            numbers.append(span.number)
            span = span.outer
        return numbers[::-1]

    def excluded(self) -> AbstractContextManager[None]:
        """Leave the seconds of a block out of all times: work of the dry run itself."""
        return self._open.excluded()

    def leave(self) -> None:
        """Log nothing from now on, and let all loops run: in a process that was forked from the rank."""
        self._open.thread = None

    def close(self) -> None:
        """Write the record of the whole program."""
        spans = self._open
        seconds = spans.now() - spans.whole.began_s
        setup_s = seconds if spans.setup_s is None else spans.setup_s
        spans.write({"kind": "whole", "seconds": seconds, "setup_s": setup_s})
        spans.write({"kind": "root", "own_s": seconds - spans.whole.inner_s})

    def _home_of(self, number: int, value: int) -> Loop | None:
        """Return the loop whose rounds a period counts: the innermost one that matters, or that moves the value.

        Callbacks are called in a loop of their own, and count the rounds of the training around it.
        """
        innermost = self._open.innermost()
        home = self._homes.get(number)
        loop = innermost
        while loop is not None and not (loop.matters if home is None else loop.number == home):
            loop = loop.outer_loop
        if loop is None or loop is innermost:
            if loop is not None:
                self._homes[number] = loop.number
            return innermost
        if loop.moves_within_a_round(number, value):
            assert innermost is not None
            loop = innermost
        self._homes[number] = loop.number
        return loop


class MeasuredPass:
    """One iteration over a loader, of which a dry run hands out `MOST_BATCHES` batches.

    Attributes:
        began_in: The round of each loop that was open when it began.
        last_drawn_in: The id of the loop that drew last, and its round.
        is_over: It ended.
        is_cut: It ended, and the loader has more batches.
        is_of_one_item: It began and ended while a loop waited for one item, as in ``for loss in epochs_of(training)``.
    """

    def __init__(
        self, spans: OpenSpans, place: str, name: str, batches: int | None, mean_size: float | None, workers: int
    ) -> None:
        self._open = spans
        self._is_here = spans.is_here()
        self._batches, self._mean_size, self._workers = batches, mean_size, workers
        self._place, self._name = place, name
        self.began_in: dict[int, int] = {}
        self.last_drawn_in = (0, -1)
        self.is_cut = self.is_over = self.is_of_one_item = False
        self._span, self._round = spans.top, spans.top.rounds
        self._is_waited_for = isinstance(spans.top, Loop) and not spans.top.is_in_round
        self._is_of_round = not self._is_waited_for
        self._id = spans.new_id()
        self._handed: list[list[Any]] = []  # [own seconds, seconds of waiting, of a worker, size, kind]
        self._count = 0
        self._has_had_last = False  # of those that the dry run hands out; else the program has left the pass
        self._start_s: float | None = None
        self._mark_s, self._mark_inner_s = spans.now(), spans.top.inner_s
        self._began_s, self._began_inner_s = self._mark_s, self._mark_inner_s

    def batch(self, size: float | None, kind: str, waited_s: float = 0.0, made_s: float | None = None) -> None:
        """Note that a batch is handed out now.

        Args:
            size: In any unit that grows with the work of a step.
            kind: "longest", "between", "last", or "first" where the batches are not known.
            waited_s: Seconds that the program waited for it.
            made_s: Seconds of the worker.
        """
        if not self._is_here:
            return
        self._open.matter()
        self._count += 1
        if self._count > 1:
            self._open.note_setup(self._began_s)
        is_last = kind == "last" or (kind == "first" and self._count >= MOST_BATCHES)
        self._has_had_last |= is_last
        is_natural = self._batches is not None and self._batches <= MOST_BATCHES
        for loop in self._open.loops():
            if self.began_in.get(loop.id) != loop.rounds or not loop.is_in_round:
                loop.note_batch(self, size, is_last and not is_natural)
        self._take_time(waited_s)
        if len(self._handed) < KEPT:
            self._handed.append([None, waited_s, made_s, size, kind])
        self._is_of_round &= self._open.top is self._span and self._span.rounds == self._round

    def end(self, is_whole: bool) -> None:
        """Note that the pass is over.

        Args:
            is_whole: Its batches were all that the loader has.
        """
        if self.is_over or not self._is_here:
            return
        self.is_over = True
        self.is_cut = not is_whole and self._has_had_last
        self._take_time(0.0)
        is_same_round = self._open.top is self._span and self._span.rounds == self._round
        self.is_of_one_item = is_same_round and self._is_waited_for and self._count > 0
        if (self._is_of_round or self.is_of_one_item) and is_same_round:
            seconds = self._open.now() - self._began_s - (self._span.inner_s - self._began_inner_s)
            self._span.inner_s += seconds
            place = {"id": self._id, "outer": self._span.id, "outer_round": self._round + self.is_of_one_item}
            self._span.keep({"kind": "pass", **place, **self.in_short(), "seconds": seconds})

    def in_short(self) -> dict[str, Any]:
        made = [each[2] for each in self._handed if each[2] is not None]
        return {
            "place": self._place,
            "name": self._name,
            "batches": self._batches,
            "mean_size": self._mean_size,
            "workers": self._workers,
            "made_s": sum(made) / len(made) if made else None,
            "start_s": self._start_s or 0.0,
            "count": self._count,
            "is_cut": self.is_cut,
            "handed": self._handed,
        }

    def _take_time(self, waited_s: float) -> None:
        """Give the time since the last batch to it, or to the start of the pass."""
        now, inner_s = self._open.now(), self._open.top.inner_s
        seconds = now - self._mark_s - waited_s
        if self._open.top is self._span:
            seconds -= inner_s - self._mark_inner_s
        if self._start_s is None:
            self._start_s = seconds
        elif self._handed and self._handed[-1][0] is None:
            self._handed[-1][0] = seconds
        self._mark_s, self._mark_inner_s = now, inner_s
