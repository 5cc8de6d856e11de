"""Keep the loops and branches that are open, with their times, and end loops of a dry run in time. Runs in ranks.

`OpenSpans` is what a rank has open at a moment: the whole program, in it loops, in these branches and further loops.
Seconds of a span are its own and those of what is in it. A loop or a branch matters once it has drawn a batch or
stepped an optimizer; the time of others counts as that of the code around them, and nothing is written of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from nbaccel.features.check.dry_run.loop_totals import total_of

__all__ = ["MOST_BATCHES", "Branch", "DryRunEnded", "Loop", "OpenSpans", "Span", "TrainerPart"]

MOST_PASSES, MOST_DRAWS, MOST_STEPS, MOST_STEPPING_LOOPS = 2, 6, 6, 2
"""Rounds after which a loop ends: those that began a pass, drew a batch, stepped, and stepped in an inner loop."""

MOST_BATCHES = 3
"""Batches that each rank gets of a pass over a cut loader, unless it is the second pass at its place."""

KEPT = 160
"""Rounds of one loop, and values of one comparison, that are kept one by one."""

_TIMED = 20
"""Runs of one loop without a draw or a step, after which its rounds are not timed any more."""

_LATE = 3
"""First round that matters from which on the rounds before it are taken for another phase of the program."""

_MOST_COUNTED = 2**53

MOST_RECORDS = 64
"""Records of branches that a loop keeps until it is known to matter, and rounds after which it makes none."""

Write = Callable[[Mapping[str, Any]], None]


class DryRunEnded(BaseException):
    """Ends a loop of a library that could not be ended otherwise. No `except Exception` of the program stops it."""


class Drawn(Protocol):
    """A pass over a loader, as a loop that draws from it sees it; see `MeasuredPass` of `loop_log`."""

    began_in: dict[int, int]
    last_drawn_in: tuple[int, int]
    is_over: bool
    is_cut: bool
    is_of_one_item: bool

    def in_short(self) -> dict[str, Any]: ...


class OpenSpans:
    """The open loops and branches of one thread, its clock, and where its records go.

    Attributes:
        top: The innermost one.
        whole: The outermost one, the program.
        thread: Whose loops these are; None once the process is another one.
        unimportant: Runs of each loop that neither drew nor stepped.
    """

    def __init__(self, write: Write, clock: Callable[[], float]) -> None:
        self.write = write
        self.clock = clock
        self.thread: int | None = threading.get_ident()
        self.unimportant: Counter[int] = Counter()
        self._ids = itertools.count(1)
        self._seen: set[int] = set()
        self._excluded_s = 0.0
        self.setup_s: float | None = None
        self.whole = Span(self, -1, None)
        self.whole.began_s = self.now()
        self.top: Span = self.whole

    def now(self) -> float:
        return self.clock() - self._excluded_s

    @contextmanager
    def excluded(self) -> Iterator[None]:
        began_s = self.clock()
        try:
            yield
        finally:
            self._excluded_s += self.clock() - began_s

    def new_id(self) -> int:
        return next(self._ids)

    def is_first(self, number: int) -> bool:
        """Return whether a place is met for the first time."""
        is_first = number not in self._seen
        self._seen.add(number)
        return is_first

    def is_here(self) -> bool:
        """Return whether the caller is the thread whose loops these are."""
        return threading.get_ident() == self.thread

    def note_setup(self, until_s: float) -> None:
        """Note that what came until then was preparation: a loop that matters began."""
        if self.setup_s is None:
            self.setup_s = until_s - self.whole.began_s
            self.write({"kind": "setup", "seconds": self.setup_s})

    def matter(self) -> None:
        """Note that everything open has drawn or stepped."""
        spans = []
        span: Span | None = self.top
        while span is not None and not span.matters:
            spans.append(span)
            span = span.outer
        for span in reversed(spans):
            span.come_to_matter()

    def loops(self) -> Iterator[Loop]:
        """Yield the open loops, the innermost first."""
        loop = self.innermost()
        while loop is not None:
            yield loop
            loop = loop.outer_loop

    def innermost(self) -> Loop | None:
        top = self.top
        return top if isinstance(top, Loop) else top.outer_loop

    def own(self, number: int) -> Loop | None:
        """Return the innermost loop if it has this number, and the caller is its thread."""
        top = self.top
        return top if top.number == number and isinstance(top, Loop) and threading.get_ident() == self.thread else None


class Span:
    """A stretch of the program that nests with others: a loop, a branch, or the whole program.

    Attributes:
        inner_s: Seconds of the spans in it that matter, and of passes; the rest is its own.
        lifted_s: Those of branches in it that belong to a loop around it.
        pending: Records that are written when it comes to matter, and dropped if it does not.
    """

    # Values that few spans change: a program may run a small loop a million times.
    rounds: int = 0
    began_s: float = 0.0
    inner_s: float = 0.0
    lifted_s: float = 0.0
    pending: Sequence[dict[str, Any]] = ()

    def __init__(self, spans: OpenSpans, number: int, outer: Span | None) -> None:
        self.spans = spans
        self.number = number
        self.outer = outer
        self.outer_loop: Loop | None = outer if isinstance(outer, Loop) else getattr(outer, "outer_loop", None)
        self.id = 0 if outer is None else spans.new_id()
        self.outer_round = 0 if outer is None else outer.rounds
        self.matters = outer is None

    def come_to_matter(self) -> None:
        self.matters = True
        for record in self.pending:
            self.spans.write(record)
        self.pending = ()

    def keep(self, record: dict[str, Any]) -> None:
        """Write the record of a part, now or when this span matters."""
        if self.matters:
            self.spans.write(record)
        elif len(self.pending) < MOST_RECORDS:
            self.pending = [*self.pending, record]

    def place(self) -> dict[str, Any]:
        """Return what a record says of the place of this span."""
        assert self.outer is not None
        return {"id": self.id, "number": self.number, "outer": self.outer.id, "outer_round": self.outer_round}


class Branch(Span):
    """The body of a periodic `if`: a part of the loop whose rounds it counts, not of a loop over callbacks below it."""

    def __enter__(self) -> None:
        self._before = self.spans.top
        self.spans.top = self
        self.began_s = self.spans.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.outer is not None
        self.spans.top = span = self._before
        seconds = self.spans.now() - self.began_s
        while span is not self.outer:
            span.inner_s += seconds
            span.lifted_s += seconds
            assert span.outer is not None
            span = span.outer
        self.outer.inner_s += seconds
        for record in self.pending:
            self.outer.keep(record)
        self.outer.keep({"kind": "branch", **self.place(), "seconds": seconds, "own_s": seconds - self.inner_s})


class TrainerPart(Span):
    """The training of a library's trainer, or an evaluation or a save in it.

    Args:
        facts: That its record gets; they may be filled until it ends.
    """

    def __init__(self, spans: OpenSpans, number: int, facts: Mapping[str, Any]) -> None:
        super().__init__(spans, number, spans.top)
        self._facts = facts

    def __enter__(self) -> None:
        self.spans.top = self
        self.began_s = self.spans.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.outer is not None
        self.spans.top = self.outer
        seconds = self.spans.now() - self.began_s
        self.outer.inner_s += seconds
        for record in self.pending:
            self.outer.keep(record)
        own_s = seconds - self.inner_s
        self.outer.keep({"kind": "trainer_part", **self.place(), "seconds": seconds, "own_s": own_s, **self._facts})


_NO_ROUNDS: Mapping[str, int] = MappingProxyType({"began": 0, "drew": 0, "stepped": 0})


class Loop(Span):
    """One run of a loop, which decides after how many rounds the dry run ends it.

    It ends before its next round when

    - `MOST_PASSES` rounds have begun a pass over a loader, as epochs do; a loop whose own body steps an optimizer, not
      an inner loop, is ended by its steps instead,
    - `MOST_DRAWS` rounds have drawn batches from a pass that began outside of the round,
    - `MOST_STEPS` rounds have stepped an optimizer; `MOST_STEPPING_LOOPS` where an inner loop stepped, or was ended.

    A loop that iterates a cut loader itself gets all the batches that the loader gives, and ends with it. All this
    depends on counts alone, so all ranks decide alike. A loop that neither draws nor steps, such as one that prepares
    texts, runs as it is, and its time counts as that of the code around it.

    Attributes:
        end: How it ended: "exhausted", "cut" by the dry run, "left" by break or return, or "error".
        is_in_round: The body is running; False while the next item is made, or the test of a `while` is evaluated.
    """

    end: str = ""
    total: int | None = None
    must_end: bool = False
    is_in_round: bool = False
    _size: float | None = None
    _is_first_of_pass: bool = False
    _is_announced: bool = False
    _timed: int = 0  # rounds in these seconds
    _own_s: float = 0.0
    _waited_s: float = 0.0
    _start_s: float = 0.0
    _mark_s: float = 0.0  # when the round, or the waiting, began
    _mark_inner_s: float = 0.0
    _first_inner_s: float = 0.0  # when its time began to be taken
    _has_inner: bool = False
    _is_last_batch: bool = False
    _kept: list[list[Any]] | None = None  # [own seconds, seconds of waiting, size of the batches, pass began]
    _rounds: Mapping[str, int] = _NO_ROUNDS  # how many began a pass, drew, stepped
    _last_rounds: Mapping[str, int] = _NO_ROUNDS  # which one did so last
    _passes: Sequence[Drawn] = ()
    _iterated: Drawn | None = None  # the pass that the loop itself iterates, which ends the loop
    _every: dict[int, dict[str, Any]] | None = None
    _compared: dict[int, dict[str, Any]] | None = None

    def __init__(self, spans: OpenSpans, number: int, outer: Span) -> None:
        super().__init__(spans, number, outer)
        self.is_timed = spans.unimportant[number] < _TIMED
        if self.is_timed:
            self._kept = []

    # --- from begin to end --------------------------------------------------------------------------------------

    def __enter__(self) -> Loop:
        if self.spans.is_first(self.number):
            self._announce()
        self.spans.top = self
        if self.is_timed:
            self.began_s = self._mark_s = self.spans.now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.outer is not None
        self.spans.top = self.outer
        if not self.matters:
            self.spans.unimportant[self.number] += 1
            if self._is_announced:
                self.spans.write({"kind": "loop_ended", "id": self.id})
            return
        if self.is_in_round:
            self._end_round()
        if kind is not None:
            self.end = "cut" if issubclass(kind, DryRunEnded) else "error"
        seconds = self.spans.now() - self.began_s
        self.outer.inner_s += seconds - self.lifted_s
        if self.end == "cut" and self.outer_loop is not None:
            self.outer_loop._has_inner = True
        rest_s = seconds - self._own_s - self._waited_s - self._start_s - (self.inner_s - self._first_inner_s)
        limiting = [] if self.end in ("cut", "error") else self._limiting()
        self.spans.write(
            {
                "kind": "loop",
                **self.place(),
                "end": self.end or "left",
                "total": self.total,
                "rounds": self.rounds,
                "timed": self._timed,
                "seconds": seconds,
                "start_s": self._start_s + max(rest_s, 0.0),  # that of the end, as of workers, with that of the start
                "own_s": self._own_s,
                "waited_s": self._waited_s,
                "kept": self._kept,
                "is_cut_by_pass": bool(limiting),
                "passes": [each.in_short() for each in limiting or self._passes[-MOST_BATCHES:]],
                "every": self._every or {},
                "compared": self._compared or {},
            }
        )

    def _announce(self) -> None:
        """Write where the loop is, for the case that the rank does not live to see its end."""
        self._is_announced = True
        self.spans.write({"kind": "loop_began", **self.place()})

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
        return self.rounds >= KEPT and not self.matters

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
        if not self.is_timed or (self.rounds > KEPT and not self.matters):
            return
        now = self.spans.now()
        waited_s = now - self._mark_s - (self.inner_s - self._mark_inner_s)
        if self.rounds == 1:
            self._start_s, waited_s = (waited_s, 0.0) if self._is_first_of_pass else (0.0, waited_s)
        self._waited_s += waited_s
        if self._kept is not None and len(self._kept) < KEPT:
            self._kept.append([None, waited_s, self._size, self._is_first_of_pass])
        self._size, self._is_first_of_pass = None, False
        self._mark_s, self._mark_inner_s = now, self.inner_s

    def _end_round(self) -> None:
        self.is_in_round = False
        if not self.is_timed or (self.rounds > KEPT and not self.matters):
            return
        now = self.spans.now()
        own_s = now - self._mark_s - (self.inner_s - self._mark_inner_s)
        self._own_s += own_s
        self._timed += 1
        if self._kept and self._kept[-1][0] is None:
            self._kept[-1][0] = own_s
            if self._size is not None:  # batches that the body drew
                self._kept[-1][2] = self._size
        self._size = None
        self._mark_s, self._mark_inner_s = now, self.inner_s

    def come_to_matter(self) -> None:
        if not self.is_timed:
            self.is_timed = True
            self.began_s = self.spans.now()
            self._first_inner_s = self.inner_s
        if self.rounds >= _LATE or self._kept is None:
            # rounds until now may have filled a memory, say: they tell nothing of later ones
            self._kept = []
            self._own_s = self._waited_s = 0.0
            self._timed = 0
            self._mark_s, self._mark_inner_s = self.spans.now(), self.inner_s
        if not self._is_announced:
            self._announce()
        self.spans.note_setup(self.began_s)
        super().come_to_matter()

    # --- what happens in it -------------------------------------------------------------------------------------

    def _count(self, what: str) -> int:
        """Count the present round, or the coming one while it is waited for, and return the number of such rounds."""
        present = self.rounds + (not self.is_in_round)
        if self._last_rounds[what] != present:
            self._last_rounds = {**self._last_rounds, what: present}
            self._rounds = {**self._rounds, what: self._rounds[what] + 1}
        return self._rounds[what]

    def _has_had(self, what: str, most: int) -> bool:
        """Count the present round; return whether there were `most`, unless the pass that it iterates ends the loop."""
        return self._count(what) >= most and (self._iterated is None or self._iterated.is_over)

    def note_begin(self, begun: Drawn) -> None:
        if self.is_in_round:
            begun.began_in[self.id] = self.rounds
            if self._is_in_branch():  # an evaluation now and then: the loop's own rounds say when it ends
                self.must_end |= self._has_had("drew", MOST_DRAWS)
            else:
                self.must_end |= self._count("began") >= MOST_PASSES and not self._steps_itself()
        elif self.spans.top is self:
            self._is_first_of_pass = True
            if not self.rounds:
                self._iterated = begun

    def _steps_itself(self) -> bool:
        """Return whether the body steps without an inner loop: then steps end it, which all ranks take.

        A pass in it may be one of the main process alone, such as an evaluation.
        """
        return bool(self._rounds["stepped"]) and not self._has_inner

    def _is_in_branch(self) -> bool:
        """Return whether a periodic `if` of this loop is open."""
        span: Span | None = self.spans.top
        inner: Span | None = None
        while span is not None and span is not self:
            inner, span = span, span.outer
        return isinstance(inner, Branch)

    def note_batch(self, drawn: Drawn, size: float | None, is_last: bool) -> None:
        """Note a batch of a pass that did not begin in this round."""
        self.must_end |= self._has_had("drew", MOST_DRAWS)
        if self.spans.innermost() is not self:
            return
        if drawn not in self._passes:
            # it goes on in the place of those that are over
            self._passes = [*(each for each in self._passes if not each.is_over), drawn]
        drawn.last_drawn_in = self.id, self.rounds + (not self.is_in_round)
        self._is_last_batch = is_last
        if size is not None:
            self._size = (self._size or 0) + size

    def note_step(self, is_inner: bool) -> None:
        self._has_inner |= is_inner
        self.must_end |= self._has_had("stepped", MOST_STEPPING_LOOPS if self._has_inner else MOST_STEPS)

    def _limiting(self) -> list[Drawn]:
        """Return the passes that, being cut, have ended this loop; those that go on beside them, as in `zip`, too."""
        passes = (each for each in self._passes if not each.is_of_one_item)
        last = [each for each in passes if each.last_drawn_in[1] >= self.rounds - 1]
        return last if any(each.is_cut for each in last) else []

    def every(self, number: int, value: int, period: int, remainder: int, is_true: bool, has_moved: bool) -> bool:
        """Keep a value, and return whether its period is to hold now.

        Args:
            has_moved: The value is not always the same.
        """
        if self.is_long():
            return is_true
        if self._every is None:
            self._every = {}
        seen = self._every.setdefault(number, {"period": period, "remainder": remainder, "values": [], "forced": []})
        if len(seen["values"]) < KEPT:
            seen["values"].append([self.rounds, value, self._has_acted()])
        if has_moved and not is_true and not seen.get("was_true") and self._is_last_round():
            seen["forced"].append(self.rounds)
            is_true = True
        seen["was_true"] = is_true or seen.get("was_true", False)
        return is_true

    def moves_within_a_round(self, number: int, value: int) -> bool:
        """Return whether a value has been another one in the same round: then it counts an inner loop."""
        values = (self._every or {}).get(number, {}).get("values", ())
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
            or (before["began"] >= MOST_PASSES - 1 and not self._steps_itself())
            or before["drew"] >= MOST_DRAWS - 1
            or before["stepped"] >= most_steps - 1
        )

    def keep_compared(self, number: int, left: Any, op: str, right: Any) -> None:
        if not (_is_number(left) and _is_number(right)):
            return
        if self._compared is None:
            self._compared = {}
        seen = self._compared.setdefault(number, {"op": op, "values": []})
        if len(seen["values"]) < KEPT:
            round_number = self.rounds + (not self.is_in_round)
            seen["values"].append([round_number, _plain(left), _plain(right), self._has_acted()])

    def _has_acted(self) -> bool:
        """Return whether the present round has drawn or stepped."""
        return self.is_in_round and self.rounds in self._last_rounds.values()


def _is_number(value: Any) -> bool:
    """Return whether a value may be a counter. Numbers that a float cannot hold exactly are none."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(-_MOST_COUNTED < value < _MOST_COUNTED)


def _plain(value: Any) -> int | float:
    return value if type(value) in (int, float) else float(value)
