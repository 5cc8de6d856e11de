"""BatchSplitter: decides which samples of an unmodified loop's loaders this rank gets. Runs in ranks.

A pass, one iteration over a loader, begins whole: every rank gets the same batches. Once a backward has followed, each
rank gets its part of every batch; a later pass that begins in the same place is split from its first batch. Evaluations
have no backwards, so they stay whole. Ranks decide alike without communication, by the order of the program's events.
"""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch

from nbaccel.base.events import LoopEntered, emit
from nbaccel.base.quantities import length_or_none
from nbaccel.base.settings import EACH, SPLIT, WHOLE
from nbaccel.errors import CannotSplit
from nbaccel.train.distributed.callers import lasting_place, users_name
from nbaccel.train.raw_loop.batch_parts import ALONE, UNKNOWN, Cutter, GivenBatches, Label, Layout, Split, Turn, is_own
from nbaccel.train.raw_loop.batch_values import BatchWatch
from nbaccel.train.raw_loop.deferred_calls import StepCounter
from nbaccel.train.raw_loop.loader_pass import (
    REMEMBERED,
    SHARED_PASS,
    BatchesByPass,
    PassBegin,
    PassGauges,
    Place,
    SharedPass,
    has_parts,
    key_of,
    not_trained,
    passed_over,
    still_needed,
)
from nbaccel.train.raw_loop.loaders import (
    ask,
    batch_size_of,
    batches_of,
    makes_of_indices,
    nameless,
    samples_of_batch,
    samples_of_index,
    shares_out,
    whole_numbers,
)
from nbaccel.train.raw_loop.rank_streams import Streams, mixed

__all__ = ["BatchSplitter"]

_SEES_ALL = "its collate_fn makes whole batches in every rank, since it may pad or mix samples"
_SEES_PART = "its collate_fn is given a part of each batch; what it pads, if it does, is as long as that part wants it"

_LOOKS = 8
"""Parts after which to check whether the loop draws from NumPy or Python's random, at 0.1 ms each."""

_EXACT = 2**52 - 1
"""Integers up to this one are exact in a float, in which ranks send them."""

_UNWATCHED = nullcontext()

_LOOKED_AT = "a batch was taken and not trained on; as whole ones do not fit, it was a part, another one in each rank"


_LEFT_EARLY = (
    "left before its end, and each batch had come in several parts: a loop that counts its rounds, to leave it or to "
    "end, has counted parts, and has trained on fewer batches"
)


class SplitTraining(Protocol):
    """The training whose batches are split."""

    def is_training(self) -> bool:
        """Return whether the known models are in training mode."""

    def are_lazy(self) -> bool:
        """Return whether a model has parameters that its first batch makes, which is whole then."""

    def batch_norms(self) -> Sequence[str]:
        """Return the names of layers that compute with the statistics of a batch."""

    def next_turn(self, turn: Turn | None) -> None:
        """Follow a part of a batch that comes in several; None when no other part of it will come."""


class SplitNotices(Protocol):
    """Notices about batches."""

    def note_split(self, split: Split) -> None:
        """Note the decision about a loader; called once for each."""

    def decision(self, batch_size: int | None) -> str:
        """Return what the loop would do by a count of a part of a batch; "" where it does nothing by one."""

    def note_drawn(self) -> None:
        """Note that the loop draws from NumPy or Python's random while it has a part."""


class BatchSplitter:
    """Gives this rank its part of each batch that is trained on, and whole batches where nothing is trained.

    After a run that ran out of memory a batch comes in several parts, one after the other, and never whole while
    gradients are on: the first backward may be the one that does not fit.

    Args:
        training: Knows the models, and follows the parts.
        notices: Is told of what a person should know.
        steps: The steps of this task.
        watch: Told of the batches that are to be watched: those before the first backward of a loop.

    Attributes:
        batches: How many were handed out in this task.
        has_split: Ranks got different batches.
        is_shared_out: A sampler, or a data set, gives each rank samples of its own.
        drawn: A digest of the sample numbers of all batches that were cut, compared between ranks; 0 before the first
            one.
    """

    needs_order = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        training: SplitTraining,
        notices: SplitNotices,
        steps: StepCounter,
        watch: BatchWatch,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._training = training
        self._notices = notices
        self._steps = steps
        self._watch = watch
        self._streams = Streams(rank)
        self._gauges = self._new_gauges()
        self.begin()
        self._is_on = False

    # -- the task

    def install(self) -> None:
        """Make torch's loaders call this object. Calling this again has no effect."""
        ask(self)

    def begin(self, mode: str = SPLIT, parts: int = 1, order_seed: int | None = None) -> None:
        """Begin a task: forget the loaders.

        Args:
            mode: "split", "each" for separate batches of each rank, or "whole".
            parts: The least number of parts of a batch, counted over all ranks.
            order_seed: See `Streams`.
        """
        self._streams.begin(order_seed)
        self._watch.forget()
        self._watches_next = False  # even a part
        self._mode, self._keeps_whole = (SPLIT if mode == WHOLE else mode), mode == WHOLE
        self._turns = math.ceil(parts / self._world_size) if mode == SPLIT else 1
        self._is_short = parts > 1 and mode == SPLIT  # of memory
        self._in_turn: SharedPass | None = None  # the pass of the current part, if others of its batch follow
        self._looks = 0  # at whether the loop draws from NumPy or Python's random
        self._noise_before: int | None = None
        self._passed_over = self._untrained = ""  # loaders of which no part trained; in this pass, which was split
        self._looked_at = ""  # a loader of which a part was taken, and no more
        self._left_early = ""  # a loader whose batches came in several parts, which was left before its end
        self._now: SharedPass | None = None  # the pass that the last batch came from
        self._reported: SharedPass | None = None  # the same, as soon as what can be cut of it was reported
        self._news = object()  # replaced as soon as what was reported may be out of date
        self._task = object()
        self._thread = threading.get_ident()
        self._trained: dict[tuple[Any, ...], tuple[int, int | None]] = {}  # by key: lead and ahead
        self._whole: set[tuple[Any, ...]] = set()  # keys of passes that are not to be split
        self.next_begin: PassBegin | None = None
        self._lasting: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # keys that hold in another process, by key
        self._known: dict[tuple[Any, ...], Any] = {}  # by such keys: what another process has known of passes
        self._told: set[tuple[Any, ...]] = set()
        self._read: set[tuple[Any, ...]] = set()  # keys of passes whose program was read
        self._gauges.end_alone()
        self._gauges = self._new_gauges()
        self._cutter = Cutter(self._rank, self._world_size, self._turns)
        self._handed_parts: Counter[tuple[Any, ...]] = Counter()  # parts that were handed out, by key
        self._losses: Counter[tuple[Any, ...]] = Counter()  # those that begin with a part, by its key
        self._loss = 0  # the number of the present one of them; 0 if its first batch was whole
        self._of_use: set[tuple[Any, ...]] = set()  # keys of passes of which a part has trained
        self._layouts: dict[tuple[Any, ...], Layout] = {}  # by loader
        self._are_cycled: dict[tuple[Any, ...], bool] = {}  # by key
        self._drawn: Any = None  # the iterator whose batch is being made
        self.batches = self.drawn = 0
        self.has_split = self.is_shared_out = self._has_wrapper = False
        self._is_on = True
        self._forget_handed()

    def _new_gauges(self) -> PassGauges:
        return PassGauges(lambda: self._steps.done, self._steps.rates.read)

    def step_back(self) -> None:
        """Leave batches as torch makes them from now on, since the program prepares by itself."""
        self._is_on = False
        self._watch.end()
        self._gauges.end()
        self._forget_handed()
        self._streams.end()

    def end(self) -> None:
        """End the task: the common random stream continues."""
        self.step_back()

    def _forget_handed(self) -> None:
        self._taken: BatchesByPass = {}
        self._is_used = False  # a backward has come of what was taken
        self._begins_loss = True  # the next batch does, after that of another one
        self._is_pending = False  # a part is handed out, and its backward has not come
        self._replay: Iterator[GivenBatches] | None = None
        self._handed: GivenBatches | None = None

    def state(self) -> dict[str, Any]:
        """Return the random streams, and what is known of passes, for a process that goes on with this loop."""
        for key, lasting in self._lasting.items():
            layout = self._layouts.get(lasting[:3])
            known = None if layout is None else vars(layout)
            found = self._trained.get(key), key in self._whole, self._cutter.cuts[key], known
            if any(found) or found[0] is not None:  # otherwise another process knows more
                self._known[lasting] = found
        return {"streams": self._streams.state(), "passes": self._known}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` has returned, maybe in another process; what is known already stays known."""
        self._streams.restore(state["streams"])
        self._known = state["passes"] | self._known

    def note_wrapper(self) -> None:
        """Note that the program shares a model out itself: a run whose batches would be cut fails again."""
        self._has_wrapper, self._news = True, object()

    @property
    def gauges(self) -> PassGauges:
        """The progress of passes."""
        return self._gauges

    def _remember(self, key: tuple[Any, ...], place: int) -> None:
        """Use what another process has known of the pass that begins with `key`, or this one of one that went on."""
        lasting = (*key[:3], place, *key[4:])
        if lasting in self._lasting:  # a pass that was made anew elsewhere
            self.state()
        self._lasting[key] = lasting
        if key in self._trained or lasting not in self._known:
            return
        trained, is_whole, cuts, layout = self._known[lasting]
        self._cutter.cuts[key] = cuts
        if trained is not None:
            self._trained[key] = trained
        if is_whole:
            self._whole.add(key)
        if layout is not None and key[:3] not in self._layouts:
            self._layouts[key[:3]] = found = Layout()
            vars(found).update(layout)

    # -- backwards

    @property
    def handed(self) -> GivenBatches:
        if self._handed is None:
            labels = [label for labels in self._taken.values() for label in labels]
            parts = [label for label in labels if label.is_apart and self._mode == SPLIT]
            largest = max(parts or labels, key=lambda label: label.whole, default=UNKNOWN)
            last = [*self._taken.values()][-1] if self._taken else deque()
            sizes, turn = largest.sizes, last[-1].turn if last else ALONE
            if any(this.iterator_of() is not None and each[-1].turn != turn for this, each in self._taken.items()):
                turn = turn._replace(is_mixed=True)
            self._handed = GivenBatches(bool(parts), largest.rows, largest.whole, sizes, len(last), turn)
        return self._handed

    @property
    def gives_own(self) -> bool:
        """True if ranks now have batches of their own."""
        return self._mode == EACH and has_parts(self._taken)

    def note_backward(self, keep_whole: str = "") -> None:
        """Note a backward of the batches in `handed`.

        Args:
            keep_whole: Why their loaders must not be split; they stay whole from now on.
        """
        if not self._is_on:
            return
        before, self._noise_before = self._noise_before, None
        if before is not None and before != self._streams.noise():
            self._looks = _LOOKS
            self._notices.note_drawn()
        handed, trains = self.handed, self._training.is_training()
        is_followed = False  # by a batch of a pass that continues
        for this in reversed(self._taken):
            is_alive = this.iterator_of() is not None
            if this.is_over:
                this.ahead = max(0, (this.ahead or 0) - 1)
            elif (not trains or this.was_training) and (is_alive or not is_followed) and this.may_split:
                is_followed = is_followed or is_alive
                self._note_trained(this, keep_whole if self._mode == SPLIT else "")
                if any(label.is_apart for label in self._taken[this]):
                    self._of_use.add(this.key)
                this.record.append(this.record[-1] if this.record[-1:] == [handed] else handed)
            # Otherwise it is an evaluation that was left early, or a single batch that was inspected.
        self._is_used, self._is_pending = True, has_parts(still_needed(self._taken))
        self._begins_loss = True
        if self._replay is not None:
            self.batches += 1
            self._handed = next(self._replay)

    def place(self) -> Place | None:
        """Return which batch was handed out last; None where no loader's pass goes on."""
        return None if self._now is None else self._now.gauge.place()

    def note_no_loader(self) -> None:
        """Note a backward before any loader has handed out a batch."""
        self._gauges.note_no_loader()

    def _note_trained(self, this: SharedPass, keep_whole: str) -> None:
        if keep_whole and this.key not in self._whole:
            self._keep_whole(this, keep_whole)
        if not this.has_trained:
            this.has_trained = True
            self._gauges.note_trained(this)
            this.lead = min(this.taken, this.lead or this.taken)
            this.is_split = this.key not in self._whole
        elif this.ahead is None and this.taken > this.lead:
            this.ahead = max(0, 2 * this.lead - this.taken)
        self._trained[this.key] = this.lead, this.ahead

    def watch_next(self) -> None:
        """Watch what is computed of the next part: its loss is a new one."""
        self._watches_next = True

    def report_anew(self) -> None:
        """Report again, with the next batch, what can be cut."""
        self._reported, self._news = None, object()

    def _keep_whole(self, this: SharedPass, why: str) -> None:
        self._whole.add(this.key)
        self.report_anew()
        this.is_split = False
        self._tell(this, False, why)

    def _tell(self, this: SharedPass, is_split: bool, why: str = "") -> None:
        remark = ""
        if is_split and this.layout is not None:
            remark = _SEES_PART if this.cuts_indices else _SEES_ALL
        said = this.loader, is_split, remark
        if said not in self._told:
            self._told.add(said)
            iterator = this.iterator_of()
            batches = None
            if iterator is not None and makes_of_indices(iterator):
                batches = length_or_none(iterator._index_sampler)
            is_own = self._mode != SPLIT
            self._notices.note_split(Split(this.name, batches, this.batch_size, is_split, why, remark, is_own))

    # -- what the hooks call

    def minds(self, iterator: Any) -> bool:
        """Return whether to handle `iterator`: not within another iterator's batch, nor in another thread."""
        if not self._is_on or threading.get_ident() != self._thread:
            this = iterator.__dict__.get(SHARED_PASS)
            if this is not None and self._is_on:
                this.may_split = this.is_split = False  # threads take batches at times that differ between ranks
            return False
        return self._drawn is None or self._drawn is iterator

    @property
    def noise(self) -> int:
        """The digest of `Streams.noise`."""
        return self._streams.noise()

    def share_noise(self, gather: Callable[[Any], list[Any]]) -> None:
        """Share rank 0's generators, see `Streams`. Collective."""
        self._streams.share_noise(gather)

    def before(self) -> None:
        """Prepare for a draw that all ranks make alike."""
        self._watch.step_aside()  # workers may be about to be forked
        self._streams.common()

    def begin_pass(self, iterator: Any, loader: Any = None) -> SharedPass:
        """Begin a pass; its properties follow from earlier ones.

        Args:
            loader: None in the middle of the pass.
        """
        old = iterator.__dict__.get(SHARED_PASS)
        if old is not None:
            old.is_over = True
        size, is_map, kind = batch_size_of(iterator, loader), makes_of_indices(iterator), type(iterator._dataset)
        modes = torch.is_grad_enabled(), self._training.is_training()
        key, begin = key_of(iterator, size, *modes), self.next_begin
        if begin is not None and begin.place != lasting_place():  # it is made anew elsewhere than it was made
            key = (*key[:3], begin.place, *key[4:])
        if key not in self._lasting:
            self._remember(key, lasting_place() if begin is None else begin.place)
        lead, ahead = self._trained.get(key, (0, None))
        is_shared_out = shares_out(iterator)
        self.is_shared_out = self.is_shared_out or is_shared_out
        batches = batches_of(iterator, loader)
        if batches is not None and self._mode == EACH:
            batches = math.ceil(batches / self._world_size)
        this = SharedPass(
            self._task,
            key,
            size,
            gauge=self._gauges.begin(key, iterator, batches, modes[0], self._lasting[key][3]),
            name=(users_name(loader) if loader is not None else "") or nameless(kind),
            iterator_of=lambda: None,  # type: ignore[arg-type]  # set below
            may_split=not is_shared_out and (loader is not None or not iterator._num_workers),
            is_map=is_map,
            is_collated=bool(iterator._auto_collation),
            is_shared_out=is_shared_out,
            gives_each=self._mode == EACH,
            place=self._lasting[key][3],
            cuts=self._cutter.cuts[key],
            lead=lead,
            ahead=ahead,
        )
        if is_map and this.is_collated and self._mode == SPLIT and is_own(iterator._collate_fn):
            this.layout = self._layouts.setdefault(this.loader, Layout())
        self._whole |= {key} if self._keeps_whole else set()
        if begin is not None:
            this.cut_from, this.sliced_from, this.cuts = begin.cut_from, begin.sliced_from, begin.cuts
            if iterator._num_workers or not is_map:  # otherwise nothing is cut while it is passed over
                self._cutter.cuts[key] = begin.cuts
        is_known = (lead > 0 or (self._is_short and all(modes))) and not self._training.are_lazy()
        this.is_split = this.may_split and is_known and key not in self._whole
        this.began_split = this.is_split and not this.cut_from
        this.iterator_of = weakref.ref(iterator, lambda _: self._left(this))
        if this.began_split and this.cuts_indices and iterator._num_workers:
            iterator._base_seed = mixed(iterator._base_seed, self._rank)  # of the noise that workers draw
        iterator.__dict__[SHARED_PASS] = this
        self._settle()
        self._watch.go_on()
        return this

    def draw(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the index of the next batch, cut to this rank's part."""
        this = self._pass_of(iterator)
        self._streams.common()
        if not this.is_map:
            return real(iterator)
        is_split = this.is_split and torch.is_grad_enabled() and this.drawn >= (this.cut_from or 0)
        if is_split and this.cut_from is None:
            this.cut_from = this.drawn
        if self._mode == EACH:
            index, is_apart = self._next_own(this, lambda: real(iterator), is_split)
            this.drawn += 1
            count = samples_of_index(index, this.is_collated)
            label = Label(is_apart, count, count)
        elif this.indices:
            index, label = this.indices.popleft()
        else:
            index = real(iterator)
            this.drawn += 1
            count = samples_of_index(index, this.is_collated)
            label = Label(False, count, count)
            if is_split and this.cuts_indices and count >= self._world_size:
                self.drawn = mixed(self.drawn, *whole_numbers(index)) & _EXACT
                (index, label), *others = [
                    (index[start:stop], label) for start, stop, label in self._cutter.parts(this.key, count)
                ]
                this.indices.extend(others)
        this.labels.append(label)
        if label.is_apart and not iterator._num_workers:
            self._streams.own()
            self._streams.fetch_apart(this.loader, self._handed_parts[this.key], this.parts)
        return index

    def hand_out(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the next batch, or this rank's part of it.

        Raises:
            NotPrepared: It was the last one, and the batches of this pass were split, but not trained on.
        """
        this = self._pass_of(iterator)
        is_watched = self._watch.is_open
        if is_watched and (self._begins_loss or not torch.is_grad_enabled()):
            self._watch.end()
            is_watched = False
        self.refuse_passed_over()
        self.say_left_early()
        if this is not self._reported:
            self._report(this)
        if this.rest:
            batch, label = this.rest.popleft()
            self._note_taken(this, label)
            return batch
        if this.is_split and self._mode == SPLIT and this.key not in self._read and torch.is_grad_enabled():
            self._read.add(this.key)
            if decision := self._notices.decision(this.batch_size):
                self._keep_whole(this, decision)
        self._streams.common()
        self._drawn = iterator
        is_split = this.is_split and torch.is_grad_enabled() and this.gauge.taken >= (this.sliced_from or 0)
        if is_split and this.sliced_from is None:
            this.sliced_from = this.gauge.taken
        try:
            with self._watch.paused() if is_watched else _UNWATCHED:  # a sampler draws numbers
                if this.is_map or self._mode == SPLIT:
                    batch, is_apart = real(iterator), False
                else:
                    batch, is_apart = self._next_own(this, lambda: real(iterator), is_split)
        except StopIteration:
            self._end_pass(this, iterator)
            raise
        except Exception:
            if this.labels:  # its batch is lost
                this.labels.popleft()
            raise
        finally:
            self._drawn = None
            self._streams.fetched()
        label = this.labels.popleft() if this.labels else Label(is_apart, 0, 0)
        if this.layout is not None and label.whole and not label.is_apart and torch.is_grad_enabled():
            this.layout.learn(batch, label.whole)
        if self._mode == SPLIT and is_split and not label.is_apart:
            batch, label = self._sliced(this, batch, label.whole)
        if not label.rows and not this.has_trained and torch.is_grad_enabled():
            with suppress(CannotSplit):
                count = samples_of_batch(batch, 0, this.is_collated, this.batch_size).count
                label = Label(label.is_apart, count, count)
        self._note_taken(this, label)
        if torch.is_grad_enabled():
            self._watch_from(this, batch, label, is_watched)
        return batch

    def note_passed(self, iterator: Any) -> None:
        """Note that the batches of a pass that were handed out by now are no news: another process trained on them."""
        this = self._pass_of(iterator)
        self._forget_handed()
        if this.parts:
            self._of_use.add(this.key)
        if this.taken and this.key in self._trained:
            self._note_trained(this, "")

    # -- parts of it

    def _watch_from(self, this: SharedPass, batch: Any, label: Label, is_open: bool) -> None:
        """Watch what is computed of a batch, if it is to be.

        Several batches may make one loss, and what it uses from outside may meet any of them: losses are counted, not
        batches, and watched from the first batch after the backward of another one. Values of the whole batch are
        looked for before a loop's first backward, in a part that may have a new loss, and now and then again, since a
        loop may do otherwise from some epoch or step on: at the first part of each pass, and at losses 1, 2, 4, 8...
        """
        begins, self._begins_loss = self._begins_loss, False
        if begins:
            self._losses[this.key] += label.is_apart
            self._loss = self._losses[this.key] if label.is_apart and self._mode == SPLIT else 0
        is_due = bool(self._loss) and not self._loss & (self._loss - 1)
        is_new = self._watches_next or (this.key not in self._trained and this.taken < REMEMBERED)
        like = this.key, label.rows
        is_again = label.is_apart and (is_due or this.taken == 1 or not self._watch.is_known(like))
        is_marked = is_open and self._watch.is_on and label.rows > 1
        if (is_new or is_again) and self._may_be_watched(this, label):
            is_marked = True
        if is_marked or is_due:
            self._watches_next = self._watches_next and not is_marked
            self._watch.begin(batch, label.rows, is_marked, None if is_new else like, label.turn.share != 1.0)
        elif self._loss and not self._loss & (self._loss + 1):
            self._watch.remember(batch, anew=begins)
        elif is_open and this.taken >= REMEMBERED and not label.is_apart:
            self._watch.end()
        elif is_open:
            self._watch.add(batch)
        if label.is_apart and self._watch.has_counts:
            self._watch.count()

    def _may_be_watched(self, this: SharedPass, label: Label) -> bool:
        may_train = this.may_split and self._training.is_training()
        # A single sample shows little, and nothing beside a larger batch.
        is_of_use = label.rows > 1 or (label.rows == 1 and not self._watch.is_on)
        return may_train and self._mode == SPLIT and is_of_use and this.key not in self._whole

    def _pass_of(self, iterator: Any) -> SharedPass:
        this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
        return this if this is not None and this.task == self._task else self.begin_pass(iterator)

    def _next_own(self, this: SharedPass, take: Callable[[], Any], is_split: bool) -> tuple[Any, bool]:
        """Return this rank's one of the next batches, and True; before they train, the next one and False.

        Where the pass ends within them, the ranks that lack one begin again with its first ones.
        """
        group = [take()]
        with suppress(StopIteration):
            while is_split and len(group) < self._world_size:
                group.append(take())
        this.first += group[: self._world_size - len(this.first)]
        mine = self._rank if is_split else 0
        return (group[mine] if mine < len(group) else this.first[(mine - len(group)) % len(this.first)]), is_split

    def _sliced(self, this: SharedPass, batch: Any, known: int) -> tuple[Any, Label]:
        """Return this rank's part of a batch that is here as a whole."""
        if 0 < known < self._world_size:
            return batch, Label(False, known, known)
        try:
            if this.layout is None:
                samples = samples_of_batch(batch, known, this.is_collated, this.batch_size)
            else:
                samples = this.layout.samples(batch, known)
        except CannotSplit as error:
            is_too_early = bool(this.cuts_indices and known)  # to be cut by its indices
            if not is_too_early and (this.layout is None or not this.layout.is_known):
                whose = "the batches of its collate_fn" if this.layout is not None else "its batches"
                self._keep_whole(this, f"{whose} cannot be cut ({str(error).partition('. ')[0]})")
            return batch, Label(False, known, known)
        count = samples.count
        if count < self._world_size:
            return batch, Label(False, count, count)
        first, *others = [
            (samples.take(start, stop), label) for start, stop, label in self._cutter.parts(this.key, count)
        ]
        this.rest.extend(others)
        return first

    def _note_taken(self, this: SharedPass, label: Label) -> None:
        if label.is_apart or torch.is_grad_enabled():
            this.was_training = this.has_trained or self._training.is_training()
            if self._is_used:
                self._taken, self._is_used = still_needed(self._taken), False
            labels = self._taken.pop(this, deque(maxlen=REMEMBERED))
            labels.append(label)
            self._taken[this] = labels
            self._replay = self._handed = None
        self._now = this
        self.batches += 1
        this.taken += 1
        this.gauge.taken += label.turn.is_first
        this.gauge.samples = max(this.gauge.samples, self._share_of(this, label))
        if self._turns > 1 and (label.is_apart or this.is_split):
            self._training.next_turn(label.turn)
            self._in_turn = None if label.turn.is_last else this
            if self._looked_at:
                name, self._looked_at = self._looked_at, ""
                self._notices.note_split(Split(name, None, None, True, _LOOKED_AT))
        if label.is_apart:
            this.parts += 1
            self._handed_parts[this.key] += 1
            if self._looks < _LOOKS:
                self._looks += 1
                self._noise_before = self._streams.noise()
            self._is_pending = self.has_split = True
            self._tell(this, True, self._of_its_own(this))
        self._settle()

    def _share_of(self, this: SharedPass, label: Label) -> int:
        """Return this rank's share of a batch's samples, also while all ranks have the whole of it."""
        if this.is_shared_out or self._mode == EACH:
            return label.rows
        return (label.whole + self._world_size - 1 - self._rank) // self._world_size

    def _report(self, this: SharedPass) -> None:
        """Report what can be cut in the present loop, if memory runs out in it."""
        self._reported = this
        if this.loop is None or this.loop[0] is not self._news:
            this.loop = self._news, self._loop_of(this)
        emit(this.loop[1])

    def _loop_of(self, this: SharedPass) -> LoopEntered:
        parts = self._world_size * self._turns if this.is_split else 1
        obstacle = ""
        if not (torch.is_grad_enabled() and self._training.is_training()):
            obstacle = "the loop does not train, and an evaluation is not cut (give its loader a smaller batch_size)"
        elif self._has_wrapper:
            obstacle = "the program, or a library in it, shares its model out itself, with batches of its own"
        elif self._mode == EACH:
            obstacle = "--batches each gives every rank whole batches"
        elif not this.may_split or this.key in self._whole:
            obstacle = f"the batches of {this.name} are whole in every rank"
        elif this.batch_size is not None and this.batch_size <= parts:
            obstacle = "its batches, or the parts of them, are single samples already"
        norms = () if obstacle else self._training.batch_norms()
        return LoopEntered(this.batch_size, parts, obstacle=obstacle, batch_norms=norms, sharing_ranks=self._world_size)

    def _of_its_own(self, this: SharedPass) -> str:
        if self._mode == SPLIT:
            return ""
        return (
            f"each of {self._world_size} ranks trains on batches of its own, so it takes fewer steps than "
            f"the length of {this.name} says, each of {self._world_size} batches"
        )

    def _settle(self) -> None:
        """Keep the rank's own random stream while a part is handed out whose backward is to come."""
        if self._is_pending:
            self._streams.own()

    def _end_pass(self, this: SharedPass, iterator: Any) -> None:
        was_over, this.is_over = this.is_over, True
        this.gauge.end()
        self._note_passed_over(this)
        self.refuse_passed_over()
        this.labels.clear()
        this.indices.clear()
        if self._is_used:
            self._taken, self._is_used, self._handed = still_needed(self._taken), False, None
        if was_over or self._mode == EACH:
            self._settle()
            return
        if this.began_split and this.parts and not this.has_trained and this.taken >= this.lead:
            self._trained.pop(this.key, None)
            self._forget_handed()
            self._untrained = this.name
            self.refuse_passed_over("memory ran out with whole ones" if this.lead == 0 else "")
        self._settle()
        is_cuttable = this.is_split and (this.layout is None or this.layout.is_known)
        if is_cuttable and this.taken and not this.parts and (this.began_split or this.taken > this.lead):
            self._tell(this, False, f"its batches have fewer than {self._world_size} samples")
        if this.record and this.parts and self._is_cycled(this, iterator):
            self._replay = itertools.cycle(this.record)
            self._handed = next(self._replay)

    def _is_cycled(self, this: SharedPass, iterator: Any) -> bool:
        """Return whether an ``itertools.cycle`` stores a pass's batches: it then repeats them without the loader."""
        if this.key not in self._are_cycled:
            holders = gc.get_referrers(iterator)
            self._are_cycled[this.key] = any(type(holder) is itertools.cycle for holder in holders)
        return self._are_cycled[this.key]

    def _note_passed_over(self, this: SharedPass) -> None:
        """Note whether two parts were handed out and none trained, although whole batches did: the loop skips parts."""
        has_trained = this.has_trained or this.key in self._trained
        if self._mode == SPLIT and has_trained and this.key not in self._of_use and self._handed_parts[this.key] > 1:
            self._passed_over = this.name
        elif self._mode == SPLIT and this.began_split and not this.has_trained and this.parts > max(1, this.lead):
            self._untrained = this.name  # it was left before its end, as by an engine that counts its batches

    def refuse_passed_over(self, why: str = "") -> None:
        """Refuse a loop that skips parts, or evaluates on them.

        Args:
            why: They were parts; empty for the usual reason.

        Raises:
            NotPrepared: See `_note_passed_over`.
        """
        name, skipped = self._untrained, self._passed_over
        self._untrained = self._passed_over = ""
        if name:
            raise not_trained(self._rank, self._world_size, name, why) from None
        if skipped:
            raise passed_over(self._rank, self._world_size, skipped) from None

    def _is_early(self, this: SharedPass) -> bool:
        """Return whether a pass whose batches come in several parts has trained, and has not ended."""
        return self._turns > 1 and this.has_trained and this.parts > 0 and not this.is_over

    def say_left_early(self, is_end: bool = False) -> None:
        """Report a loader that was left before its end.

        Args:
            is_end: The program is over: the pass that goes on is left, too.
        """
        this = self._now
        if is_end and this is not None and this.iterator_of() is not None and self._is_early(this):
            self._left_early = this.name
        if name := self._left_early:
            self._left_early = ""
            self._notices.note_split(Split(name, None, None, True, _LEFT_EARLY))

    def _left(self, this: SharedPass) -> None:
        """Handle the end of a pass whose iterator was deleted."""
        if self._is_on and not this.is_over:
            self._note_passed_over(this)
        if self._is_on and self._is_early(this):
            self._left_early = this.name
        if self._is_on and this is self._in_turn:
            self._in_turn = None
            self._training.next_turn(None)
            if not this.has_trained:
                self._looked_at = this.name
        is_idle = self._is_on and not self._is_pending and self._drawn is None
        if is_idle and this.parts and threading.get_ident() == self._thread:
            self._streams.common()
