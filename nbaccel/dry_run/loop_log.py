"""`LoopLog`: which loops run, with the seconds of their rounds, and when a dry run ends them. Runs in ranks.

Rewritten code (see `nbaccel.dry_run.rewriting`) asks the log before each round; cut loaders and optimizers tell it what
happens. A loop ends before its next round when

- 2 of its rounds have begun a pass over a loader, as epochs do,
- 6 of its rounds have drawn batches from a pass that began outside of the round,
- 6 of its rounds have stepped an optimizer; 2 if an inner loop stepped in them, or was ended.

These depend on counts alone, so all ranks decide alike. Loops that neither draw nor step, such as those that prepare
texts, run as they are, and their time counts as that of the code around them. Records are written when a loop, a
branch or a pass ends, and when a loop matters for the first time: what a killed rank has left says where it was.

Seconds are those of `clock`. On a GPU it should wait for the device first: it is read in the first rounds only.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Number
from types import TracebackType
from typing import Any

from nbaccel.dry_run.loop_totals import total_of

__all__ = ["DryRunEnded", "LoopLog", "MeasuredPass"]

MOST_PASSES, MOST_DRAWS, MOST_STEPS, MOST_STEPPING_LOOPS = 2, 6, 6, 2
"""Rounds after which a loop ends: those that began a pass, drew a batch, stepped, and stepped in an inner loop."""

MOST_BATCHES = 3
"""Batches of a pass over a cut loader."""

_KEPT = 16
"""Rounds of one loop, and values of one comparison, that are kept one by one."""

_TIMED = 20
"""Runs of one loop without a draw or a step, after which its rounds are not timed any more."""

_MOST_PENDING = 64
"""Records of branches that a loop keeps until it is known to matter."""

_COMPARED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

Write = Callable[[Mapping[str, Any]], None]


class DryRunEnded(BaseException):
    """Ends a loop of a library that could not be ended otherwise. No `except Exception` of the program stops it."""


class LoopLog:
    """The log of one rank, for one thread: the one that makes it.

    write: takes each record.  clock: returns seconds.
    steps: of optimizers, so far.
    """

    def __init__(self, write: Write, clock: Callable[[], float] = time.perf_counter) -> None:
        self.write = write
        self.steps = 0
        self._clock = clock
        self._excluded_s = 0.0
        self._thread: int | None = threading.get_ident()
        self._last_id = 0
        self.unimportant: Counter[int] = Counter()  # runs of each loop that neither drew nor stepped
        self._seen: set[int] = set()
        self._whole = _Span(self, -1, None)
        self._whole.began_s = self.now()
        self.top = self._whole  # the innermost open loop or branch
        self._setup_s: float | None = None
        self._homes: dict[int, int] = {}  # of each period, the number of the loop whose rounds it counts
        self._asked: _Loop | None = None  # the loop of the last period

    # --- what rewritten code calls ------------------------------------------------------------------------------

    def loop(self, number: int) -> Any:
        """Return the context in which a loop runs."""
        return _Loop(self, number, self.top) if self._is_here() else _NOTHING

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

    def every(self, number: int, value: Any, period: Any, remainder: Any) -> Any:
        """Return ``value % period == remainder``; in the last round that a loop gets it is true if it never was."""
        is_true = value % period == remainder
        is_count = type(value) is int and type(period) is int and type(remainder) is int
        loop = self._home_of(number, value) if is_count and self._is_here() else None
        self._asked = loop
        return is_true if loop is None else loop.every(number, value, period, remainder, is_true)

    def branch(self, number: int) -> Any:
        """Return the context in which the body of a periodic `if` runs."""
        loop = self._asked if self._is_here() else None
        if loop is None or loop.rounds > _MOST_PENDING or loop.is_long():
            return _NOTHING
        outer = self.top
        while not (outer is loop or outer.matters or isinstance(outer, _Branch)):
            assert outer.outer is not None
            outer = outer.outer
        return _Branch(self, number, outer)

    def compare(self, number: int, left: Any, op: str, right: Any) -> Any:
        """Return the result of the comparison, and keep its values."""
        if self._is_here() and (loop := self._innermost()) is not None and not loop.is_long():
            loop.keep_compared(number, left, op, right)
        return _COMPARED[op](left, right)

    # --- what loaders and optimizers call -----------------------------------------------------------------------

    def begin_pass(
        self, place: str, name: str, batches: int | None, mean_size: float | None, workers: int = 0
    ) -> MeasuredPass:
        """Begin an iteration over a loader.

        place: where the program iterates.  name: of the loader, for people.  batches: of the whole pass; None unknown.
        mean_size: mean of the sizes of all its batches, in the unit of `MeasuredPass.batch`; None unknown.
        workers: processes that make its batches.
        """
        begun = MeasuredPass(self, place, name, batches, mean_size, workers)
        if self._is_here():
            self._matters()
            for loop in self._loops():
                loop.note_begin(begun)
            begun.write_begin()
        return begun

    def note_step(self) -> None:
        """Note that an optimizer stepped."""
        if not self._is_here():
            return
        self.steps += 1
        self._matters()
        self.note_setup(self.now())
        for depth, loop in enumerate(self._loops()):
            loop.note_step(is_inner=depth > 0)

    def present(self) -> tuple[tuple[int, int], ...]:
        """Return the open loops with their rounds: equal twice if no open loop has moved in between."""
        return tuple((loop.id, loop.rounds) for loop in self._loops())

    def open_loops(self) -> list[int]:
        """Return the numbers of the open loops, the outermost first."""
        return [loop.number for loop in self._loops()][::-1]

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the seconds of the block out of all times: work of the dry run itself."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - began_s

    def leave(self) -> None:
        """Log nothing from now on, and let all loops run: in a process that was forked from the rank."""
        self._thread = None

    def close(self, ended_well: bool) -> None:
        """Write the record of the whole program.  ended_well: it reached its end, without an error."""
        own_s = self.now() - self._whole.began_s
        setup_s = own_s if self._setup_s is None else self._setup_s
        self.write({"kind": "whole", "ended_well": ended_well, "seconds": own_s, "setup_s": setup_s})
        own_s -= self._whole.inner_s
        self.write({"kind": "root", "own_s": own_s, "steps": self.steps})

    # --- its parts ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock() - self._excluded_s

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def is_first(self, number: int) -> bool:
        """Return whether a place is met for the first time."""
        is_first = number not in self._seen
        self._seen.add(number)
        return is_first

    def note_setup(self, until_s: float) -> None:
        """Note that what came until then was preparation: a loop that matters began."""
        if self._setup_s is None:
            self._setup_s = until_s - self._whole.began_s
            self.write({"kind": "setup", "seconds": self._setup_s})

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def _matters(self) -> None:
        """Note that everything open has drawn or stepped."""
        spans = []
        span: _Span | None = self.top
        while span is not None and not span.matters:
            spans.append(span)
            span = span.outer
        for span in reversed(spans):
            span.come_to_matter()

    def _loops(self) -> Iterator[_Loop]:
        """Yield the open loops, the innermost first."""
        loop = self._innermost()
        while loop is not None:
            yield loop
            loop = loop.outer_loop

    def _own(self, number: int) -> _Loop | None:
        """Return the innermost loop if it has this number, and the caller is the thread of the log."""
        top = self.top
        return top if top.number == number and isinstance(top, _Loop) and self._is_here() else None

    def _home_of(self, number: int, value: int) -> _Loop | None:
        """Return the loop whose rounds a period counts: the innermost one that matters, or that moves the value.

        Callbacks are called in a loop of their own, and count the rounds of the training around it.
        """
        innermost = self._innermost()
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

    def _innermost(self) -> _Loop | None:
        top = self.top
        return top if isinstance(top, _Loop) else top.outer_loop


class _Span:
    """A stretch of the program that nests with others: a loop, a branch, or the whole program.

    inner_s: seconds of the spans in it that matter, and of passes; the rest is its own.
    lifted_s: those of branches in it that belong to a loop around it.
    pending: records that are written when it comes to matter, and dropped if it does not.
    """

    def __init__(self, log: LoopLog, number: int, outer: _Span | None) -> None:
        self.log = log
        self.number = number
        self.outer = outer
        self.outer_loop: _Loop | None = outer if isinstance(outer, _Loop) else getattr(outer, "outer_loop", None)
        self.id = 0 if outer is None else log.new_id()
        self.outer_round = 0 if outer is None else outer.rounds
        self.rounds = 0
        self.began_s = 0.0
        self.inner_s = self.lifted_s = 0.0
        self.matters = outer is None
        self.pending: list[dict[str, Any]] = []

    def come_to_matter(self) -> None:
        self.matters = True
        for record in self.pending:
            self.log.write(record)
        self.pending = []

    def keep(self, record: dict[str, Any]) -> None:
        """Write the record of a part, now or when this span matters."""
        if self.matters:
            self.log.write(record)
        elif len(self.pending) < _MOST_PENDING:
            self.pending.append(record)

    def place(self) -> dict[str, Any]:
        """Return what a record says of the place of this span."""
        assert self.outer is not None
        return {"id": self.id, "number": self.number, "outer": self.outer.id, "outer_round": self.outer_round}


class _Branch(_Span):
    """The body of a periodic `if`: a part of the loop whose rounds it counts, not of a loop over callbacks below it."""

    def __enter__(self) -> None:
        self._before = self.log.top
        self.log.top = self
        self.began_s = self.log.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.outer is not None
        self.log.top = span = self._before
        seconds = self.log.now() - self.began_s
        while span is not self.outer:
            span.inner_s += seconds
            span.lifted_s += seconds
            assert span.outer is not None
            span = span.outer
        self.outer.inner_s += seconds
        for record in self.pending:
            self.outer.keep(record)
        self.outer.keep({"kind": "branch", **self.place(), "seconds": seconds, "own_s": seconds - self.inner_s})


class _Loop(_Span):
    """One run of a loop.

    end: how it ended: "exhausted", "cut" by the dry run, "left" by break or return, or "error".
    is_in_round: the body is running; False while the next item is made, or the test of a `while` is evaluated.
    """

    def __init__(self, log: LoopLog, number: int, outer: _Span) -> None:
        super().__init__(log, number, outer)
        self.end = ""
        self.total: int | None = None
        self.must_end = False
        self.is_in_round = False
        self.is_timed = log.unimportant[number] < _TIMED
        self._kept: list[list[Any]] = []  # [own seconds, seconds of waiting, size of the batches, pass began]
        self._size: float | None = None
        self._is_first_of_pass = False
        self._own_s = self._waited_s = self._start_s = 0.0
        self._mark_s = self._mark_inner_s = 0.0  # when the round, or the waiting, began
        self._rounds = {"began": 0, "drew": 0, "stepped": 0}
        self._last_rounds = {"began": 0, "drew": 0, "stepped": 0}
        self._has_inner = False
        self._is_last_batch = False
        self._passes: list[MeasuredPass] = []
        self._every: dict[int, dict[str, Any]] = {}
        self._compared: dict[int, dict[str, Any]] = {}

    # --- from begin to end --------------------------------------------------------------------------------------

    def __enter__(self) -> _Loop:
        if self.log.is_first(self.number):
            open_loops = [[loop.number, loop.rounds] for loop in self.log._loops()]
            self.log.write({"kind": "loop_began", **self.place(), "open": open_loops[::-1]})
        self.log.top = self
        if self.is_timed:
            self.began_s = self._mark_s = self.log.now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.outer is not None
        self.log.top = self.outer
        if not self.matters:
            self.log.unimportant[self.number] += 1
            return
        if self.is_in_round:
            self._end_round()
        if kind is not None:
            self.end = "cut" if issubclass(kind, DryRunEnded) else "error"
        seconds = self.log.now() - self.began_s
        self.outer.inner_s += seconds - self.lifted_s
        if self.end == "cut" and self.outer_loop is not None:
            self.outer_loop._has_inner = True
        limiting = [] if self.end in ("cut", "error") else self._limiting()
        self.log.write(
            {
                "kind": "loop",
                **self.place(),
                "end": self.end or "left",
                "total": self.total,
                "rounds": self.rounds,
                "seconds": seconds,
                "start_s": self._start_s,
                "own_s": self._own_s,
                "waited_s": self._waited_s,
                "kept": self._kept,
                "is_cut_by_pass": bool(limiting),
                "passes": [each.in_short() for each in limiting or self._passes[-MOST_BATCHES:]],
                "every": self._every,
                "compared": self._compared,
            }
        )

    def over(self, iterable: Iterable[Any]) -> Iterator[Any]:
        self.total = total_of(iterable)
        return self._items(iter(iterable))

    def _items(self, iterator: Iterator[Any]) -> Iterator[Any]:
        try:
            while self.may_go_on():
                item = [next(iterator)]
                self.begin_round()
                yield item.pop()  # this frame keeps no batch alive
                while self.is_long() and not self.must_end:
                    self.rounds += 1
                    yield next(iterator)
        except StopIteration:
            self.end = "exhausted"
            self.is_in_round = False

    def is_long(self) -> bool:
        """Return whether the loop has had many rounds, none of which mattered: then nothing of it is kept."""
        return self.rounds >= _KEPT and not self.matters

    def goes_on(self) -> bool:
        """Begin the next round of a `while True`, and return whether there is one."""
        if self.may_go_on():
            self.begin_round()
        return self.end != "cut"

    def may_go_on(self) -> bool:
        """End the round, and return whether the dry run allows another one."""
        if self.is_in_round:
            self._end_round()
        if self.must_end:
            self.end = "cut"
            return False
        return True

    def begin_round(self) -> None:
        self.rounds += 1
        self.is_in_round = True
        if not self.is_timed or (self.rounds > _KEPT and not self.matters):
            return
        now = self.log.now()
        waited_s = now - self._mark_s - (self.inner_s - self._mark_inner_s)
        if self.rounds == 1:
            self._start_s, waited_s = (waited_s, 0.0) if self._is_first_of_pass else (0.0, waited_s)
        self._waited_s += waited_s
        if len(self._kept) < _KEPT:
            self._kept.append([None, waited_s, self._size, self._is_first_of_pass])
        self._size, self._is_first_of_pass = None, False
        self._mark_s, self._mark_inner_s = now, self.inner_s

    def _end_round(self) -> None:
        self.is_in_round = False
        if not self.is_timed or (self.rounds > _KEPT and not self.matters):
            return
        now = self.log.now()
        own_s = now - self._mark_s - (self.inner_s - self._mark_inner_s)
        self._own_s += own_s
        if self._kept and self._kept[-1][0] is None:
            self._kept[-1][0] = own_s
            if self._size is not None:  # batches that the body drew
                self._kept[-1][2] = self._size
        self._size = None
        self._mark_s, self._mark_inner_s = now, self.inner_s

    def come_to_matter(self) -> None:
        if not self.is_timed:
            self.is_timed = True
            self.began_s = self._mark_s = self.log.now()
            self._mark_inner_s = self.inner_s
        self.log.note_setup(self.began_s)
        super().come_to_matter()

    # --- what happens in it -------------------------------------------------------------------------------------

    def _count(self, what: str) -> int:
        """Count the present round, or the coming one while it is waited for, and return the number of such rounds."""
        present = self.rounds + (not self.is_in_round)
        if self._last_rounds[what] != present:
            self._last_rounds[what] = present
            self._rounds[what] += 1
        return self._rounds[what]

    def note_begin(self, begun: MeasuredPass) -> None:
        if self.is_in_round:
            begun.began_in[self.id] = self.rounds
            if self._is_in_branch():  # an evaluation now and then: the loop's own rounds say when it ends
                self.must_end |= self._count("drew") >= MOST_DRAWS
            else:
                self.must_end |= self._count("began") >= MOST_PASSES
        elif self.log.top is self:
            self._is_first_of_pass = True

    def _is_in_branch(self) -> bool:
        """Return whether a periodic `if` of this loop is open."""
        span: _Span | None = self.log.top
        inner: _Span | None = None
        while span is not None and span is not self:
            inner, span = span, span.outer
        return isinstance(inner, _Branch)

    def note_batch(self, drawn: MeasuredPass, size: float | None, is_last: bool) -> None:
        """Note a batch of a pass that did not begin in this round."""
        self.must_end |= self._count("drew") >= MOST_DRAWS
        if self.log._innermost() is not self:
            return
        if drawn not in self._passes:
            self._passes = [each for each in self._passes if not each.is_over]  # `drawn` goes on in their place
            self._passes.append(drawn)
        drawn.last_drawn_in = self.id, self.rounds + (not self.is_in_round)
        self._is_last_batch = is_last
        if size is not None:
            self._size = (self._size or 0) + size

    def note_step(self, is_inner: bool) -> None:
        self._has_inner |= is_inner
        self.must_end |= self._count("stepped") >= (MOST_STEPPING_LOOPS if self._has_inner else MOST_STEPS)

    def _limiting(self) -> list[MeasuredPass]:
        """Return the passes that, being cut, have ended this loop; those that go on beside them, as in `zip`, too."""
        last = [each for each in self._passes if each.last_drawn_in[1] >= self.rounds - 1]
        return last if any(each.is_cut for each in last) else []

    def every(self, number: int, value: int, period: int, remainder: int, is_true: bool) -> bool:
        if self.is_long():
            return is_true
        seen = self._every.setdefault(number, {"period": period, "remainder": remainder, "values": [], "forced": []})
        if len(seen["values"]) < _KEPT:
            seen["values"].append([self.rounds, value])
        if not is_true and not seen.get("was_true") and self._is_last_round():
            seen["forced"].append(self.rounds)
            is_true = True
        seen["was_true"] = is_true or seen.get("was_true", False)
        return is_true

    def moves_within_a_round(self, number: int, value: int) -> bool:
        """Return whether a value has been another one in the same round: then it counts an inner loop."""
        values = self._every.get(number, {}).get("values", ())
        return bool(values) and values[-1][0] == self.rounds and values[-1][1] != value

    def _is_last_round(self) -> bool:
        """Return whether the dry run will end the loop after this round, where the loop itself would go on."""
        if self.total is not None and self.rounds >= self.total:
            return False
        before = {name: self._rounds[name] - (self._last_rounds[name] == self.rounds) for name in self._rounds}
        most_steps = MOST_STEPPING_LOOPS if self._has_inner else MOST_STEPS
        return (
            self.must_end
            or self._is_last_batch
            or before["began"] >= MOST_PASSES - 1
            or before["drew"] >= MOST_DRAWS - 1
            or before["stepped"] >= most_steps - 1
        )

    def keep_compared(self, number: int, left: Any, op: str, right: Any) -> None:
        if not (_is_number(left) and _is_number(right)):
            return
        seen = self._compared.setdefault(number, {"op": op, "values": []})
        if len(seen["values"]) < _KEPT:
            round_number = self.rounds + (not self.is_in_round)
            has_acted = round_number in (*self._last_rounds.values(),) and self.is_in_round
            seen["values"].append([round_number, _plain(left), _plain(right), has_acted])


class MeasuredPass:
    """One iteration over a loader, of which a dry run hands out `MOST_BATCHES` batches.

    began_in: the round of each loop that was open when it began.
    last_drawn_in: the id of the loop that drew last, and its round.
    is_over: it ended.  is_cut: it ended, and the loader has more batches.
    """

    def __init__(
        self, log: LoopLog, place: str, name: str, batches: int | None, mean_size: float | None, workers: int
    ) -> None:
        self._log = log
        self._is_here = log._is_here()
        self._batches, self._mean_size, self._workers = batches, mean_size, workers
        self._place, self._name = place, name
        self.began_in: dict[int, int] = {}
        self.last_drawn_in = (0, -1)
        self.is_cut = self.is_over = False
        self._span, self._round = log.top, log.top.rounds
        self._is_of_round = not (isinstance(log.top, _Loop) and not log.top.is_in_round)
        self._id = log.new_id()
        self._handed: list[list[Any]] = []  # [own seconds, seconds of waiting, of a worker, size, kind]
        self._count = 0
        self._start_s: float | None = None
        self._mark_s, self._mark_inner_s = log.now(), log.top.inner_s
        self._began_s, self._began_inner_s = self._mark_s, self._mark_inner_s

    def batch(self, size: float | None, kind: str, waited_s: float = 0.0, made_s: float | None = None) -> None:
        """Note that a batch is handed out now.

        size: in any unit that grows with the work of a step.  kind: "longest", "between", "last", or "first" where the
        batches are not known.  waited_s: seconds that the program waited for it.  made_s: seconds of the worker.
        """
        if not self._is_here:
            return
        self._log._matters()
        self._count += 1
        if self._count > 1:
            self._log.note_setup(self._began_s)
        is_last = kind == "last" or self._count >= MOST_BATCHES
        is_natural = self._batches is not None and self._batches <= MOST_BATCHES
        for loop in self._log._loops():
            if self.began_in.get(loop.id) != loop.rounds or not loop.is_in_round:
                loop.note_batch(self, size, is_last and not is_natural)
        self._take_time(waited_s)
        if len(self._handed) < _KEPT:
            self._handed.append([None, waited_s, made_s, size, kind])
        self._is_of_round &= self._log.top is self._span and self._span.rounds == self._round

    def end(self, is_whole: bool) -> None:
        """Note that the pass is over.  is_whole: its batches were all that the loader has."""
        if self.is_over or not self._is_here:
            return
        self.is_over = True
        self.is_cut = not is_whole and self._count >= MOST_BATCHES
        self._take_time(0.0)
        if self._is_of_round and self._log.top is self._span and self._span.rounds == self._round:
            seconds = self._log.now() - self._began_s - (self._span.inner_s - self._began_inner_s)
            self._span.inner_s += seconds
            self._span.keep({"kind": "pass", **self._own_place(), **self.in_short(), "seconds": seconds})

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

    def write_begin(self) -> None:
        self._log.write({"kind": "pass_began", **self._own_place(), "place": self._place, "name": self._name})

    def _own_place(self) -> dict[str, Any]:
        return {"id": self._id, "outer": self._span.id, "outer_round": self._round}

    def _take_time(self, waited_s: float) -> None:
        """Give the time since the last batch to it, or to the start of the pass."""
        now, inner_s = self._log.now(), self._log.top.inner_s
        seconds = now - self._mark_s - waited_s
        if self._log.top is self._span:
            seconds -= inner_s - self._mark_inner_s
        if self._start_s is None:
            self._start_s = seconds
        elif self._handed and self._handed[-1][0] is None:
            self._handed[-1][0] = seconds
        self._mark_s, self._mark_inner_s = now, inner_s


_NOTHING = nullcontext()


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and type(value) is not bool and not isinstance(value, complex)


def _plain(value: Any) -> int | float:
    return value if type(value) in (int, float) else float(value)
