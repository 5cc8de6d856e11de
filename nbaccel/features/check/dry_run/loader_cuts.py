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
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from nbaccel.base.quantities import length_or_none
from nbaccel.features.check.dry_run.batch_choice import ChosenBatches, ItemLengths, choose
from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.check.dry_run.device_clock import device_seconds
from nbaccel.features.check.dry_run.loop_log import DryRunEnded
from nbaccel.features.check.dry_run.loop_spans import MOST_BATCHES
from nbaccel.features.check.dry_run.one_pass import (
    LoopRecords,
    OnePass,
    PassWatcher,
    are_of_cells,
    is_drawn_by_for,
    name_of,
    rows_of,
    users_frames,
)
from nbaccel.features.check.dry_run.worker_times import WorkerTimes

__all__ = ["LoaderCuts"]

_MOST_ROUNDS, _MORE_SECONDS = 160, 2.0
"""Limits of the second pass at a place, which is as long as the sooner of them allows."""

_MOST_INDICES, _MOST_WITHOUT_END = 2_000_000, 100_000
"""Samples whose indices are listed, of a loader with a length, and of one without."""

_MOST_BEGINS, _MOST_BEGINS_OF_CELLS = 3, 20
"""Begins of a loader at one place; the second where cells alone led there: a comprehension, which has an end."""

_MOST_LOOKS = 200
"""Begins of a loader at one place that are left after a single batch, such as ``next(iter(loader))``."""

_CUT = "_nbaccel_cut"


class LoaderCuts:
    """Cuts every loader of this process's main program, between `begin` and `end`.

    Begin it after `RawLoopTraining` has installed its hooks in torch's iterators: a loop may get one of many batches.

    Args:
        log: The log of the loops.
        write: Appends a record.
        decisions: The decisions of all ranks.
        watchers: Observers of passes.
        part: Returns what measures the time of a part of a step, "loader" or "scan", while entered.
        stride: Batches of an unprepared loader that are read for one of the loop: the number of ranks where each of
            them gets whole batches.
        begins_whole: The first batch of an unprepared loop is not split over the ranks.
        before_draw: Called before indices are drawn: where worker processes read, that is before torch would draw them.
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
        before_draw: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._write = write
        self._decisions = decisions
        self._watchers = watchers
        self.part = part
        self._stride = stride
        self._begins_whole = begins_whole
        self.before_draw = before_draw
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

        The iterators that torch begins meanwhile read for this pass.

        Args:
            stride: See `OnePass`.
        """
        try:
            this = self.begin_pass(loader, length_or_none(loader), stride)
            try:
                while True:
                    self.note_draw(this)
                    with self._reading_for(this), self.waiting(this):
                        batch = next(batches, batches)  # which it never yields
                    if batch is batches:
                        return
                    self.hand_out(this, rows_of(batch))
                    yield batch
            finally:
                self.end_pass(this, getattr(loader, "remainder", -1))
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

        Args:
            batches: The batches of this rank's loop, or of the loader if `stride` is None: then no loader announces the
                pass.

        Raises:
            DryRunEnded: A loop that is not rewritten has begun this loader at this place as often as it may.
        """
        is_alike = stride is None and not _shares_out(loader)
        if stride is None:
            stride = self._stride
            batches = None if batches is None else math.ceil(batches / stride)
        frames = users_frames()
        place = " < ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames) or "?"
        if loader not in self._numbers:
            self._numbers[loader] = next(self._next_number)
        begun = (self._numbers[loader], place, self._log.present())
        self._refuse_endless(begun, _MOST_BEGINS_OF_CELLS if are_of_cells(frames) else _MOST_BEGINS)
        key = f"{place} {type(loader.dataset).__qualname__} {loader.batch_size} {batches}"
        number = self._passes[key]
        self._passes[key] += 1
        return OnePass(
            place,
            name_of(frames, loader),
            key,
            number,
            batches,
            stride,
            next((window for known, window in reversed(self._windows) if known() is loader), 1),
            is_alike=is_alike,
            begun=begun,
            workers=loader.num_workers,
        )

    def _refuse_endless(self, begun: tuple[Any, ...], most: int) -> None:
        looks = self._looks[begun]
        if self._begins[begun] - looks >= most - 1 or looks >= _MOST_LOOKS:
            raise DryRunEnded(
                f"a loop of a library, or a comprehension, has begun the same loader {self._begins[begun]} times at "
                f"{begun[1]}: the dry run leaves it there, and does not check the lines that follow"
            )
        self._begins[begun] += 1

    def more_of(self, this: OnePass) -> int:
        """Return how many rounds the pass gets beyond the usual ones: some in the second pass at its place.

        A first pass that is split gets one, as its first two parts have unequal sizes, which its last may not have: a
        program that works on with the last batch draws as many random numbers in each rank.
        """
        if this.more is None:
            this.more = int(self._begins_whole and this.is_alike and this.number == 0)
            if this.number == 1:
                this.more = int(self._decisions.take(_file_name(this, "more"), lambda: self._more_by_time(this), 0))
        return this.more

    def _more_by_time(self, this: OnePass) -> int:
        round_s = self._round_s.get(this.key, _MORE_SECONDS)
        rounds = int(min(_MOST_ROUNDS, _MORE_SECONDS / max(round_s, 1e-6)))
        return max(0, rounds - MOST_BATCHES)

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

    def note_draw(self, this: OnePass) -> None:
        """Note that a batch is drawn next, and whether by a call that differs from the one before.

        A `for` ends with its loader. A ``next(iterator)`` in a loop that counts its steps would fail at the end; so
        would a second one in another line. The log ends such loops. A ``list(loader)`` draws in one place, and ends.
        """
        frames = users_frames(passes_bars=False)
        before, this.drawn_at = this.drawn_at, ()
        if frames and not is_drawn_by_for(frame := frames[0]):
            this.drawn_at = frame.f_code, frame.f_lasti, self._log.present()
        this.goes_on = bool(before and this.drawn_at) and before != this.drawn_at

    def start(self, this: OnePass) -> None:
        """Note that the first batch is read next, or was read: the log begins the pass. Once for each pass."""
        if this.log is None and not this.is_over:
            mean_size = None if this.chosen is None else this.chosen.mean_size
            this.log = self._log.begin_pass(this.place, this.name, this.batches, mean_size, this.workers)
            for watcher in self._watchers:
                watcher.begin_pass(this)

    def hand_out(self, this: OnePass, samples: int, read: int | None = None) -> None:
        """Note that a batch is handed out next.

        Args:
            read: Batches that were read until now; None: one for each.
        """
        self.start(this)
        this.given += 1
        this.samples += samples
        this.last_samples = samples
        this.reached = (this.given - 1 if read is None else (read - 1) // this.stride) // this.window
        size, kind = this.present_kind()
        this.times.append(device_seconds())
        for watcher in self._watchers:
            watcher.batch(this, size, kind)
        if this.log is not None:
            this.log.batch(size, kind, this.waited_s, None if this.made is None else this.made.mean_s)
        this.waited_s = 0.0

    def end_pass(self, this: OnePass, remainder: int = -1) -> None:
        """Note that the loop has all batches, or has left the pass. Calling this again has no effect.

        Args:
            remainder: Samples of all ranks in the last round, without those that fill it up; -1 if all are real.
        """
        if this.is_over:
            return
        this.is_over = True
        if self._is_on and os.getpid() == self._pid:
            this.times.append(device_seconds())
            self._looks[this.begun] += this.given <= 1 < this.length
            self._round_s.setdefault(this.key, this.round_s)
            if this.log is not None:
                for watcher in self._watchers:
                    watcher.end_pass(this)
                this.log.end(this.is_whole)
            if this.is_cut and this.samples:
                samples = {"samples": this.samples, "last_samples": this.last_samples, "remainder": remainder}
                self._write({"kind": "cut", "place": this.place, "number": this.number, **samples})

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

    Attributes:
        this: Its pass.
        is_announced: A loader that reads ahead announces its batches.
    """

    def __init__(self, cuts: LoaderCuts, iterator: Any, loader: Any, earlier: _Cut | None = None) -> None:
        """Begin the pass of `iterator`.

        Args:
            earlier: The cut of the pass before, with the same worker processes.
        """
        from torch.utils.data.dataloader import _DatasetKind

        self._cuts = cuts
        self._is_map = iterator._dataset_kind == _DatasetKind.Map
        length = length_or_none(iterator._index_sampler if self._is_map else loader)
        self.is_announced = cuts.reader is not None
        self.this = cuts.reader or cuts.begin_pass(loader, length, None)
        if iterator._num_workers:
            self.this.made = cuts.worker_times.share(iterator._num_workers) if earlier is None else earlier.this.made
        self._given: _GivenIndices | None = None
        self._left = weakref.finalize(iterator, self.end)
        self._left.atexit = False
        iterator.__dict__[_CUT] = self

    def take_indices(self, iterator: Any, is_first: bool) -> None:
        """Replace the indices that `iterator` draws next.

        With worker processes they are chosen before these start, so that the pass has the time that the start takes.

        Args:
            is_first: The pass begins; torch begins some twice.
        """
        if not self._is_map:
            if iterator._num_workers and is_first:
                self._cuts.start(self.this)
        elif is_first or self._given is None:
            self._given = _GivenIndices(self.this, self._cuts, iterator)
            if iterator._num_workers:
                self._given.choose()
        if self._given is not None:
            iterator._sampler_iter = self._given

    def read(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the next batch, by torch's function `real`."""
        cuts, this, before = self._cuts, self.this, iterator._num_yielded
        if not self.is_announced:
            cuts.note_draw(this)
        if not self._is_map:
            if before >= (MOST_BATCHES + cuts.more_of(this)) * this.stride * this.window and not this.goes_on:
                iterator._next_data = _end_of_stream
            cuts.start(this)
        try:
            with nullcontext() if self.is_announced else cuts.waiting(this), cuts.reading():
                batch = real(iterator)
        except StopIteration:
            self.end()
            raise
        if not self.is_announced:
            cuts.hand_out(this, rows_of(batch), iterator._num_yielded)
        return batch

    def end(self) -> None:
        """End the pass, unless its loader announces the end."""
        if not self.is_announced:
            self._cuts.end_pass(self.this)


class _GivenIndices(Iterator[Any]):
    """The indices of the chosen batches. Nothing is drawn before the first is asked for, as in torch."""

    def __init__(self, this: OnePass, cuts: LoaderCuts, iterator: Any) -> None:
        self._this = this
        self._cuts = cuts
        self._drawn = iterator._sampler_iter
        self._length = length_or_none(iterator._index_sampler)
        self._dataset = iterator._dataset
        self._batches: list[Any] | None = None
        self._given = self._at = 0

    def __next__(self) -> Any:
        batches = self.choose() if self._batches is None else self._batches
        if self._at >= len(batches) or (self._at >= self._given and not self._this.goes_on):
            raise StopIteration
        self._at += 1
        return batches[self._at - 1]

    def choose(self) -> list[Any]:
        """Draw the indices of the pass, and return those of the chosen batches, followed by spare ones."""
        this = self._this
        with self._cuts.choosing(this):
            self._cuts.before_draw()
            batches, has_last = self._listed()
            size = this.stride * this.window
            rounds = [batches[start : start + size] for start in range(0, len(batches), size)]
            given = MOST_BATCHES + self._cuts.more_of(this)
            if rounds and (has_last or self._length is not None):
                chosen = self._cuts.choose(this, self._dataset, rounds, has_last)
                rounds, given = [rounds[position] for position in chosen.positions], chosen.given
            self._given = sum(map(len, rounds[:given]))
            self._batches = list(itertools.chain.from_iterable(rounds))
        self._cuts.start(this)
        return self._batches

    def _listed(self) -> tuple[list[Any], bool]:
        """Return the indices of the pass, and whether these are all."""
        limit = _MOST_WITHOUT_END if self._length is None else _MOST_INDICES
        batches, samples = [], 0
        for batch in self._drawn:
            batches.append(batch)
            samples += len(batch) if isinstance(batch, Sequence) else 1
            if samples >= limit:
                break
        return batches, samples < limit


def _end_of_stream() -> Any:
    raise StopIteration


def _shares_out(loader: Any) -> bool:
    """Return whether a sampler gives each rank batches of its own."""
    tops = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    parts = tops + [getattr(top, name, None) for top in tops for name in ("sampler", "batch_sampler")]
    names = ("num_replicas", "num_processes")
    return any(getattr(part, name, None) not in (None, 1) for part in parts for name in names)


def _file_name(this: OnePass, what: str) -> str:
    digest = hashlib.blake2b(this.key.encode(), digest_size=8).hexdigest()
    return f"{digest}-{this.number}-{what}"
