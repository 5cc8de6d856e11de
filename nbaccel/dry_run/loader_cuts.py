"""Give only a few batches of every `DataLoader` in a dry run: the longest, one in between, the last one. Runs in ranks.

Hooks in torch's iterators replace the list of index batches of a pass by some of them; the loader keeps its length.
Of a stream, and of a sampler that has no end, the first batches are given. The second pass at the same place gives
more batches in between, so that their times are known well. Loops see the end of a loader as at the end of an epoch.

A loop of a library that begins the same loader for the third time, while no loop of the program has moved, is left by
`DryRunEnded`. Prepared loaders read ahead of their loop, so that they announce what they hand out (`announce`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from nbaccel.dry_run.batch_choice import FIRST, ChosenBatches, ItemLengths, choose
from nbaccel.dry_run.decisions import SharedDecisions
from nbaccel.dry_run.loop_log import DryRunEnded
from nbaccel.dry_run.worker_times import BatchesMade, WorkerTimes
from nbaccel.notices import PACKAGE_DIR

__all__ = ["LoaderCuts", "LoopRecords", "OnePass", "PassOfLog", "PassWatcher"]

_ROUNDS = 3
_MOST_ROUNDS, _MORE_SECONDS = 40, 2.0
"""Limits of the second pass at a place, which is as long as the sooner of them allows."""

_MOST_INDICES, _MOST_WITHOUT_END = 2_000_000, 100_000
"""Samples whose indices are listed, of a loader with a length, and of one without."""

_MOST_BEGINS = 3
_MOST_LOOKS = 200
"""Begins of a loader at one place that are left after a single batch, such as ``next(iter(loader))``."""

_DEEPEST = 40
_CUT = "_nbaccel_cut"
_BETWEEN = frozenset({"contextlib", "fastprogress", "rich", "runpy", "threading", "tqdm"})
"""Modules whose frames are passed by: they begin a pass for the program, or run it."""


class PassOfLog(Protocol):
    """One iteration over a loader, as the log of the loops counts it."""

    def batch(self, size: float | None, kind: str, waited_s: float, made_s: float | None) -> None:
        """Note that a batch is handed out next, for which the loop has waited `waited_s` seconds.

        made_s: seconds in which a worker process makes a batch; None where that is unknown.
        """

    def end(self, is_whole: bool) -> None:
        """Note the end of the pass.  is_whole: it gave all batches that the loader has."""


class LoopRecords(Protocol):
    """Part of the log of the loops that is told of passes."""

    def begin_pass(
        self, place: str, name: str, batches: int | None, mean_size: float | None, workers: int
    ) -> PassOfLog:
        """Begin a pass that has `batches` batches in a whole run, which are made by so many worker processes."""

    def excluded(self) -> AbstractContextManager[None]:
        """Return what leaves the time that is spent within it out of all times."""

    def present(self) -> tuple[Any, ...]:
        """Return a value that is equal as long as no loop of the program has moved."""


class PassWatcher(Protocol):
    """Observer of passes, such as the one that measures where the time of a step goes."""

    def begin_pass(self, this: OnePass) -> None: ...

    def batch(self, this: OnePass, size: float | None, kind: str) -> None: ...

    def end_pass(self, this: OnePass) -> None: ...


@dataclass(eq=False)
class OnePass:
    """One iteration over a loader in a dry run.

    place: where the program has begun it, its line first, then those that called it.  name: of the loader.
    key: of passes at the same place over such a loader.  number: how many of them came before.
    batches: of the whole pass for the loop; None where unknown.
    stride: batches of the loader that are read for one of the loop: by several ranks that take turns.
    window: batches of the loop that belong together, since an optimizer steps once in them; a round has as many.
    is_alike: every rank must be given the same batches, since they are split over the ranks afterwards.
    begun: identifies the loader, the place, and the rounds of the program's loops.

    workers: processes that make its batches.
    given: batches that the loop had.  reached: the round of the last one.
    waited_s: seconds for which it waited for the next one.
    more: rounds beyond the usual ones; None until that is decided.
    chosen: batches that are given; None until they are known, and where they are the first ones.
    scan_s: seconds in which the batches were chosen.  made: times of worker processes.
    """

    place: str
    name: str
    key: str
    number: int
    batches: int | None
    stride: int
    window: int
    is_alike: bool
    begun: tuple[Any, ...]
    workers: int = 0
    given: int = 0
    reached: int = -1
    waited_s: float = 0.0
    scan_s: float = 0.0
    made: BatchesMade | None = None
    more: int | None = None
    chosen: ChosenBatches | None = None
    log: PassOfLog | None = None
    is_over: bool = False
    times: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Batches that the loop gets, as far as is known."""
        rounds = len(self.chosen.positions) if self.chosen is not None else _ROUNDS + (self.more or 0)
        return rounds * self.window

    @property
    def is_whole(self) -> bool:
        """True if the loop got all batches of the loader."""
        return self.chosen is not None and self.chosen.are_all and self.reached >= len(self.chosen.positions) - 1

    def present_kind(self) -> tuple[float | None, str]:
        """Return size and kind of the batches of the round that the pass has reached."""
        if self.chosen is None:
            return None, FIRST
        at = min(self.reached, len(self.chosen.positions) - 1)
        return self.chosen.sizes[at], self.chosen.kinds[at]

    @property
    def round_s(self) -> float:
        """Seconds of a round, without the first one, which is slower."""
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        return statistics.median(gaps[1:] or gaps) * self.window if gaps else 0.0


class LoaderCuts:
    """Cuts every loader of this process's main program, between `begin` and `end`.

    Begin it after `ImplicitTraining` has installed its hooks in torch's iterators: a loop may get one of many batches.

    log: of the loops.  write: appends a record; "scan" says how long lengths were read, which a whole run does not do.
    decisions: of all ranks.  watchers: observers of passes.
    part: returns what measures the time of a part of a step, "loader" or "scan", while entered.
    stride: batches of an unprepared loader that are read for one of the loop: the number of ranks where each of them
        gets whole batches.
    begins_whole: the first batch of an unprepared loop is not split over the ranks.
    """

    def __init__(
        self,
        log: LoopRecords,
        write: Callable[[Mapping[str, Any]], None],
        decisions: SharedDecisions,
        watchers: Sequence[PassWatcher] = (),
        part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        *,
        stride: int = 1,
        begins_whole: bool = False,
    ) -> None:
        self._log = log
        self._write = write
        self._decisions = decisions
        self._watchers = watchers
        self.part = part
        self._stride = stride
        self._begins_whole = begins_whole
        self._lengths = ItemLengths()
        self._passes: Counter[str] = Counter()
        self._round_s: dict[str, float] = {}
        self._begins: Counter[tuple[Any, ...]] = Counter()
        self._looks: Counter[tuple[Any, ...]] = Counter()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of loaders
        self._next_number = itertools.count()
        self._announced: list[OnePass] = []
        self._windows: list[tuple[weakref.ref[Any], int]] = []
        self._reading = 0
        self._hooks = _IteratorHooks(self)
        self.worker_times = WorkerTimes()
        self._is_on = False

    def begin(self) -> None:
        """Cut loaders from now on, in this process and this thread."""
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._is_on = True
        self.worker_times.begin()
        self._hooks.install()

    def end(self) -> None:
        """Leave loaders as they are from now on."""
        self._is_on = False
        self._hooks.remove()
        self.worker_times.end()

    @property
    def minds(self) -> bool:
        """True where loaders are cut: not in worker processes or other threads, nor within another loader's batch."""
        is_here = self._is_on and not self._reading
        return is_here and os.getpid() == self._pid and threading.get_ident() == self._thread

    def window_of(self, loader: Any, batches: int) -> None:
        """Take `batches` batches of `loader` as one round from now on, since an optimizer steps once in them."""
        self._windows.append((weakref.ref(loader), batches))

    # -- passes of loaders that read ahead of their loop

    def announce(self, loader: Any, batches: Generator[Any, None, None], stride: int) -> Generator[Any, None, None]:
        """Yield `batches`, which `loader` has made for the loop, each noted when the loop gets it.

        The iterators that torch begins meanwhile read for this pass.  stride: see `OnePass`.
        """
        try:
            this = self.begin_pass(loader, _length_of(loader), stride)
            try:
                while True:
                    with self._reading_for(this), self.waiting(this):
                        batch = next(batches, batches)  # which it never yields
                    if batch is batches:
                        return
                    self.hand_out(this)
                    yield batch
            finally:
                self.end_pass(this)
        finally:
            batches.close()

    @contextmanager
    def _reading_for(self, this: OnePass) -> Iterator[None]:
        self._announced.append(this)
        try:
            yield
        finally:
            self._announced.pop()

    @property
    def reader(self) -> OnePass | None:
        """The announced pass for which an iterator reads that begins now."""
        return self._announced[-1] if self._announced else None

    # -- the course of a pass

    def begin_pass(self, loader: Any, batches: int | None, stride: int | None) -> OnePass:
        """Return a new pass over `loader`, which the program begins now.

        batches: of this rank's loop, or of the loader if `stride` is None: then no loader announces the pass.
        Raises:
            DryRunEnded: a loop that is not the program's has begun this loader at this place twice already.
        """
        is_alike = stride is None and not _shares_out(loader)
        if stride is None:
            stride = self._stride
            batches = None if batches is None else math.ceil(batches / stride)
        frames = list(_users_frames())
        place = " < ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames) or "?"
        if loader not in self._numbers:
            self._numbers[loader] = next(self._next_number)
        begun = (self._numbers[loader], place, self._log.present())
        self._refuse_third(begun)
        key = f"{place} {type(loader.dataset).__qualname__} {loader.batch_size} {batches}"
        number = self._passes[key]
        self._passes[key] += 1
        return OnePass(
            place,
            _name_in(frames, loader),
            key,
            number,
            batches,
            stride,
            next((window for known, window in reversed(self._windows) if known() is loader), 1),
            is_alike=is_alike,
            begun=begun,
            workers=loader.num_workers,
        )

    def _refuse_third(self, begun: tuple[Any, ...]) -> None:
        looks = self._looks[begun]
        if self._begins[begun] - looks >= _MOST_BEGINS - 1 or looks >= _MOST_LOOKS:
            raise DryRunEnded(
                f"a loop that is not the program's has begun the same loader {self._begins[begun]} times at "
                f"{begun[1]}: the dry run leaves it there, and does not check the lines that follow"
            )
        self._begins[begun] += 1

    def more_of(self, this: OnePass) -> int:
        """Return how many rounds the pass gets beyond the usual ones: some in the second pass at its place."""
        if this.more is None:
            this.more = 0
            if this.number == 1:
                this.more = int(self._decisions.take(_file_name(this, "more"), lambda: self._more_by_time(this), 0))
        return this.more

    def _more_by_time(self, this: OnePass) -> int:
        round_s = self._round_s.get(this.key, _MORE_SECONDS)
        rounds = int(min(_MOST_ROUNDS, _MORE_SECONDS / max(round_s, 1e-6)))
        return max(0, rounds - _ROUNDS)

    def choose(self, this: OnePass, dataset: Any, rounds: Sequence[Sequence[Any]], has_last: bool) -> ChosenBatches:
        """Decide which of `rounds` are given in the pass; collective where all ranks must be given the same."""
        more = self.more_of(this)
        first = {"is_between_first": self._begins_whole and this.is_alike, "has_last": has_last}
        plain = choose(len(rounds), {}, more, **first)
        if this.is_alike:
            found = ChosenBatches.from_record(
                self._decisions.take(
                    _file_name(this, "choice"),
                    lambda: choose(len(rounds), self._lengths.sizes(dataset, rounds), more, **first).record(),
                    plain.record(),
                )
            )
            this.chosen = found if found.rounds == len(rounds) else plain
        else:
            this.chosen = choose(len(rounds), self._lengths.sizes(dataset, rounds), more, **first)
        return this.chosen

    @contextmanager
    def choosing(self, this: OnePass) -> Iterator[None]:
        """Leave the time that is spent within out of all times of the program: a whole run does not choose."""
        began = time.perf_counter()
        with self.part("scan"), self._log.excluded():
            yield
        this.scan_s += time.perf_counter() - began

    @contextmanager
    def waiting(self, this: OnePass) -> Iterator[None]:
        """Count the time that is spent within as the loop's waiting for the next batch."""
        began, scanned = time.perf_counter(), this.scan_s
        with self.part("loader"):
            yield
        this.waited_s += time.perf_counter() - began - (this.scan_s - scanned)

    def start(self, this: OnePass) -> None:
        """Note that the first batch is read next, or was read: the log begins the pass. Once for each pass."""
        if this.log is None and not this.is_over:
            mean_size = None if this.chosen is None else this.chosen.mean_size
            this.log = self._log.begin_pass(this.place, this.name, this.batches, mean_size, this.workers)
            if this.scan_s:
                self._write({"kind": "scan", "place": this.place, "seconds": this.scan_s})
            for watcher in self._watchers:
                watcher.begin_pass(this)

    def hand_out(self, this: OnePass, read: int | None = None) -> None:
        """Note that a batch is handed out next.  read: batches that were read until now; None: one for each."""
        self.start(this)
        this.given += 1
        this.reached = (this.given - 1 if read is None else (read - 1) // this.stride) // this.window
        size, kind = this.present_kind()
        this.times.append(time.perf_counter())
        for watcher in self._watchers:
            watcher.batch(this, size, kind)
        if this.log is not None:
            this.log.batch(size, kind, this.waited_s, None if this.made is None else this.made.mean_s)
        this.waited_s = 0.0

    def end_pass(self, this: OnePass) -> None:
        """Note that the loop has all batches, or has left the pass. Calling this again has no effect."""
        if this.is_over:
            return
        this.is_over = True
        if self._is_on and os.getpid() == self._pid:
            this.times.append(time.perf_counter())
            self._looks[this.begun] += this.given <= 1 < this.length
            self._round_s.setdefault(this.key, this.round_s)
            if this.log is not None:
                for watcher in self._watchers:
                    watcher.end_pass(this)
                this.log.end(this.is_whole)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Leave loaders alone that the data set of another one reads."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1


# -- torch's iterators


class _IteratorHooks:
    """Makes torch's iterators give what `cuts` chooses."""

    def __init__(self, cuts: LoaderCuts) -> None:
        self._cuts = cuts
        self._real: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def install(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        kind: Any = _BaseDataLoaderIter
        cuts = self._cuts
        torchs_init, torchs_reset, torchs_next = kind.__init__, kind._reset, kind.__next__

        @functools.wraps(torchs_init)
        def init(iterator: Any, loader: Any) -> None:
            torchs_init(iterator, loader)
            if cuts.minds:
                iterator._shutdown = True  # of worker processes, which are not there yet if this is refused
                cut = _Cut(cuts, iterator, loader)
                del iterator._shutdown
                cut.take_indices(iterator, is_first=True)

        @functools.wraps(torchs_reset)
        def reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            iterator.__dict__.pop("_next_data", None)
            if not first_iter:
                earlier = iterator.__dict__.pop(_CUT, None)
                if earlier is not None:
                    earlier.end()
                if cuts.minds:
                    _Cut(cuts, iterator, loader, earlier)
            with cuts.part("loader"):
                torchs_reset(iterator, loader, first_iter)
            if (cut := iterator.__dict__.get(_CUT)) is not None:
                cut.take_indices(iterator, is_first=not first_iter)

        @functools.wraps(torchs_next)
        def next_batch(iterator: Any) -> Any:
            cut = iterator.__dict__.get(_CUT)
            return torchs_next(iterator) if cut is None else cut.read(iterator, torchs_next)

        self._real = {"__init__": torchs_init, "_reset": torchs_reset, "__next__": torchs_next}
        self._ours = {"__init__": init, "_reset": reset, "__next__": next_batch}
        for name, method in self._ours.items():
            setattr(kind, name, method)

    def remove(self) -> None:
        """Take the hooks away, unless others were installed upon them: those then call torch's own by these."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        for name, method in self._ours.items():
            if getattr(_BaseDataLoaderIter, name) is method:
                setattr(_BaseDataLoaderIter, name, self._real[name])
        self._ours = {}


class _Cut:
    """The cut of one iterator of torch, which holds it.

    this: its pass.  is_announced: a loader that reads ahead announces its batches.
    """

    def __init__(self, cuts: LoaderCuts, iterator: Any, loader: Any, earlier: _Cut | None = None) -> None:
        """Begin the pass of `iterator`.  earlier: the cut of the pass before, with the same worker processes."""
        from torch.utils.data.dataloader import _DatasetKind

        self._cuts = cuts
        self._is_map = iterator._dataset_kind == _DatasetKind.Map
        self._dataset = iterator._dataset
        self._length = _length_of(iterator._index_sampler if self._is_map else loader)
        self.is_announced = cuts.reader is not None
        self.this = cuts.reader or cuts.begin_pass(loader, self._length, None)
        if iterator._num_workers:
            self.this.made = cuts.worker_times.share(iterator._num_workers) if earlier is None else earlier.this.made
        self._given: Iterator[Any] | None = None
        self._left = weakref.finalize(iterator, self.end)
        self._left.atexit = False
        iterator.__dict__[_CUT] = self

    def take_indices(self, iterator: Any, is_first: bool) -> None:
        """Replace the indices that `iterator` draws next.  is_first: the pass begins; torch begins some twice.

        With worker processes they are chosen before these start, so that the pass has the time that the start takes.
        """
        if not self._is_map:
            if iterator._num_workers and is_first:
                self._cuts.start(self.this)
        elif is_first or self._given is None:
            self._given = self._indices(iterator._sampler_iter)
            if iterator._num_workers:
                self._given = iter(list(self._given))
        if self._given is not None:
            iterator._sampler_iter = self._given

    def _indices(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """Yield the indices of the chosen batches. Nothing is drawn before the first is asked for, as in torch."""
        this = self.this
        with self._cuts.choosing(this):
            batches, has_last = self._listed(drawn)
            size = this.stride * this.window
            rounds = [batches[start : start + size] for start in range(0, len(batches), size)]
            if self._length is None and not has_last:
                given = rounds[: _ROUNDS + self._cuts.more_of(this)]
            elif rounds:
                chosen = self._cuts.choose(this, self._dataset, rounds, has_last)
                given = [rounds[position] for position in chosen.positions]
            else:
                given = []
        self._cuts.start(this)
        yield from itertools.chain.from_iterable(given)

    def _listed(self, drawn: Iterator[Any]) -> tuple[list[Any], bool]:
        """Return the indices of the pass, and whether these are all."""
        limit = _MOST_WITHOUT_END if self._length is None else _MOST_INDICES
        batches, samples = [], 0
        for batch in drawn:
            batches.append(batch)
            samples += len(batch) if isinstance(batch, Sequence) else 1
            if samples >= limit:
                break
        return batches, samples < limit

    def read(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the next batch, by torch's function `real`."""
        cuts, this, before = self._cuts, self.this, iterator._num_yielded
        if not self._is_map:
            if before >= (_ROUNDS + cuts.more_of(this)) * this.stride * this.window:
                iterator._next_data = _end_of_stream
            cuts.start(this)
        try:
            with nullcontext() if self.is_announced else cuts.waiting(this), cuts.reading():
                batch = real(iterator)
        except StopIteration:
            self.end()
            raise
        if not self.is_announced:
            cuts.hand_out(this, iterator._num_yielded)
        return batch

    def end(self) -> None:
        """End the pass, unless its loader announces the end."""
        if not self.is_announced:
            self._cuts.end_pass(self.this)


def _end_of_stream() -> Any:
    raise StopIteration


def _length_of(sized: Any) -> int | None:
    with suppress(Exception):  # of the program's own classes, or where there is none
        return len(sized)
    return None


def _shares_out(loader: Any) -> bool:
    """Return whether a sampler gives each rank batches of its own."""
    tops = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    parts = tops + [getattr(top, name, None) for top in tops for name in ("sampler", "batch_sampler")]
    names = ("num_replicas", "num_processes")
    return any(getattr(part, name, None) not in (None, 1) for part in parts for name in names)


# -- the program's lines


def _users_frames() -> Iterator[FrameType]:
    """Yield the frames of the program that led here, innermost first: not this package's, nor torch's."""
    torch = sys.modules["torch"]
    passed_by = (PACKAGE_DIR, os.path.dirname(str(torch.__file__)) + os.sep)
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and depth < _DEEPEST:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN and not frame.f_code.co_filename.startswith(passed_by):
            depth += 1
            yield frame
        frame = frame.f_back


def _name_in(frames: Sequence[FrameType], loader: Any) -> str:
    """Return the variable that holds `loader`, or a description of it."""
    for frame in frames:  # a function's own variables are not read: its frame would hold a copy of them all
        for name, each in list(frame.f_globals.items()):
            if each is loader and not name.startswith("_"):
                return name
    return f"a loader over {type(loader.dataset).__qualname__}"


def _file_name(this: OnePass, what: str) -> str:
    digest = hashlib.blake2b(this.key.encode(), digest_size=8).hexdigest()
    return f"{digest}-{this.number}-{what}"
