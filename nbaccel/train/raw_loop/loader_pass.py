"""A pass, one iteration over a loader: what identifies it, how far it has come, what was taken of it. Runs in ranks.

A `PassGauge` measures a pass, and `PassGauges` begins and ends those of a task. A rank that shares its batches with
others knows more of a pass, a `SharedPass`. `BatchesByPass` holds the batches, of several passes, from which the next
backward may come.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbaccel.base.events import Gauge, LoopEntered, Progress, emit
from nbaccel.base.quantities import length_or_none
from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.callers import place_of_call
from nbaccel.train.raw_loop.batch_parts import GivenBatches, Label, Layout

__all__ = [
    "LONE_PASS",
    "REMEMBERED",
    "SHARED_PASS",
    "BatchesByPass",
    "LoaderPass",
    "PassBegin",
    "PassGauge",
    "PassGauges",
    "PassKey",
    "Place",
    "SharedPass",
    "has_parts",
    "key_of",
    "not_trained",
    "passed_over",
    "still_needed",
]

PassKey = tuple[Any, ...]
"""Kind and number of the samples, batch size, place in the program, modes: passes with an equal key do the same."""


def key_of(iterator: Any, batch_size: int | None, *modes: bool) -> PassKey:
    """Return the key of a pass that begins now.

    Args:
        *modes: The modes of training, that tell passes in one place apart.
    """
    kind = type(iterator._dataset)
    return (
        f"{kind.__module__}.{kind.__qualname__}",
        batch_size,
        length_or_none(iterator._dataset),
        place_of_call(),
        *modes,
    )


class Place(NamedTuple):
    """A batch of a pass that goes on.

    Args:
        at: Numbers of the pass and of the batch.
        left: How many batches follow it in the pass; None where that is unknown.
    """

    at: tuple[int, int]
    left: int | None


_numbers = itertools.count()


class PassGauge:
    """Progress of one pass, from its begin to its end.

    The loop itself reports nothing: a launcher's thread reads the gauge a few times per second.

    Args:
        steps: Returns how many steps the task has reached.
        rates: Returns the learning rates of its optimizers.
        batches: How many the pass has; None where that is unknown.
        epoch: How many passes trained at the same place before.
        may_train: Gradients were enabled when it began.

    Attributes:
        epoch: The same.
        is_counted: It counts as an epoch, of this process or of the one that this continues.
        taken: Batches that were handed out.
        passed_over: Of these, those of the process that this one continues.
        samples: Of this rank in the largest of them; 0 unknown. Where all ranks have the same batch, that is this
            rank's share of it.
        has_trained: Backwards have come.
        is_over: It has ended, or was left for another at the same place.
        is_left: Returns whether nothing can continue it.
    """

    def __init__(
        self,
        steps: Callable[[], int],
        rates: Callable[[], tuple[float, ...]],
        batches: int | None,
        epoch: int,
        may_train: bool,
    ) -> None:
        self._steps = steps
        self._rates = rates
        self._batches = batches
        self.epoch = epoch
        self.may_train = may_train
        self._first = steps()
        self._began = time.monotonic()
        self.taken = self.passed_over = self.samples = 0
        self.has_trained = self.is_over = self.is_counted = False
        self.is_left: Callable[[], bool] = lambda: False
        self._number = next(_numbers)

    def count_from_here(self) -> None:
        """Count no step that another process has done."""
        self._first = self._steps()

    def place(self) -> Place | None:
        """Return where the program is in this pass; None if it was left, or has ended."""
        if self.is_over or self.is_left() or not self.taken:
            return None
        is_known = self._batches is not None and self.taken <= self._batches
        return Place((self._number, self.taken), self._batches - self.taken if is_known and self._batches else None)

    def read(self) -> Progress | None:
        """Return the present progress; None once the pass has ended. Called from any thread."""
        return None if self.is_over or self.is_left() else self._look()

    def end(self) -> None:
        """End the pass, and report its progress at that time. Calling this again has no effect."""
        if not self.is_over:
            self.is_over = True
            emit(self._look())

    def _look(self) -> Progress:
        is_guess = self.may_train and not self.has_trained and self.taken <= 1 and not self.is_over
        return Progress(
            step=self._steps(),
            batch=self.taken,
            batches=self._batches,
            epoch=self.epoch,
            samples=self.samples or None,
            is_training=self.has_trained or is_guess,
            is_guess=is_guess,
            is_over=self.is_over,
            first=self._first,
            began=self._began,
            learning_rates=self._rates(),
        )


@dataclass(slots=True, eq=False)
class LoaderPass:
    """One iteration over a loader, which it does not hold.

    Args:
        task: That it began in.
    """

    task: object
    key: PassKey
    batch_size: int | None
    gauge: PassGauge

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Return an empty placeholder, since a pickled iterator needs no pass."""
        return _nothing, ()


def _nothing() -> None:
    return None


class PassBegin(NamedTuple):
    """The begin of a pass: one that goes on in another process begins so, and its batches are cut as they were.

    Args:
        place: See `lasting_place`.
        cut_from: How many batches it had drawn when they began to be cut; None if they were not.
        sliced_from: How many it had handed out then.
        cuts: How many batches had been cut at that place before it: the first ones are cut unevenly.
    """

    place: int
    cut_from: int | None
    sliced_from: int | None
    cuts: int


LONE_PASS, SHARED_PASS = "_nbaccel_lone_pass", "_nbaccel_pass"
"""The attributes of an iterator that hold its pass."""


class PassGauges:
    """Gauges of a task: that of the last pass at each place.

    Args:
        steps, rates: See `PassGauge`.
    """

    def __init__(self, steps: Callable[[], int], rates: Callable[[], tuple[float, ...]]) -> None:
        self._steps = steps
        self._rates = rates
        self._last: dict[PassKey, PassGauge] = {}
        self._alone: PassGauge | None = None  # of a training without a loader
        self._epochs: Counter[PassKey] = Counter()  # passes that have trained
        self._lasting: dict[PassKey, PassKey] = {}  # keys that hold in another process, by key
        self._known: dict[PassKey, tuple[int, int | None]] = {}  # of the process that this one continues

    def state(self) -> dict[PassKey, tuple[int, int | None]]:
        """Return how many passes have trained at each place, and the epoch of one of these that is under way."""
        found = {
            lasting: (self._epochs[key], gauge.epoch if gauge.is_counted and gauge.read() is not None else None)
            for key, lasting in self._lasting.items()
            if (gauge := self._last.get(key)) is not None
        }
        return self._known | found

    def restore(self, state: dict[PassKey, tuple[int, int | None]]) -> None:
        """Go on with the epochs that `state` has returned, maybe in another process."""
        self._known |= state
        for key, lasting in self._lasting.items():
            count, under_way = state.get(lasting, (self._epochs[key], None))
            gauge = self._last[key]
            if under_way is not None and gauge.read() is not None:
                gauge.epoch, gauge.is_counted = under_way, True
            self._epochs[key] = count

    def begin(self, key: PassKey, iterator: Any, batches: int | None, may_train: bool, place: int) -> PassGauge:
        """Return the gauge of a pass that begins, and report it; the one before it at the same place is over.

        Args:
            place: See `lasting_place`.
        """
        if key not in self._lasting:
            lasting = self._lasting[key] = (*key[:3], place, may_train)
            self._epochs[key], _ = self._known.get(lasting, (0, None))
        gauge = PassGauge(self._steps, self._rates, batches, self._epochs[key], may_train)
        alive = weakref.ref(iterator)
        gauge.is_left = lambda: alive() is None
        if key in self._last:
            self._last[key].end()
        self._last[key] = gauge
        emit(Gauge(gauge.read))
        return gauge

    def count_from_here(self) -> None:
        """Note that the steps so far were done by another process, which this one continues."""
        for gauge in self._last.values():
            gauge.count_from_here()

    def note_no_loader(self) -> None:
        """Note a backward before any loader has handed out a batch: steps and rates are reported even so."""
        if self._alone is None:
            self._alone = PassGauge(self._steps, self._rates, None, 0, may_train=True)
            self._alone.has_trained = True
            emit(Gauge(self._alone.read))

    def end_alone(self) -> None:
        """End the report on a training without a loader."""
        if self._alone is not None:
            self._alone.end()

    def note_trained(self, this: LoaderPass) -> None:
        """Note the first backward of a pass."""
        self.end_alone()
        this.gauge.has_trained = True
        self._epochs[this.key] += not this.gauge.is_counted
        this.gauge.is_counted = True

    def end(self) -> None:
        """End all passes."""
        self.end_alone()
        for gauge in self._last.values():
            gauge.end()


# --- Passes whose batches ranks share ---


@dataclass(slots=True, eq=False)
class SharedPass(LoaderPass):
    """A pass in a rank that may be given parts of its batches.

    Args:
        name: The name of its loader.
        iterator_of: Returns its iterator, if that still exists.
        may_split: Its batches can be cut.
        is_map: Batches are made of indices.
        is_collated: Of several samples.
        is_shared_out: Ranks have batches of their own already.
        gives_each: Each rank is given batches of its own: one after the other of a group.
        place: See `lasting_place`.
        drawn: Batches that it has drawn.
        cut_from, sliced_from, cuts: See `PassBegin`.
        layout: The layout of batches that a function of the program's own makes.
        loop: What was reported of it, and when.
        lead: Batches that were taken before the first backward, once known.
        ahead: Of them, how many the program takes before it needs them.
        labels: Of batches that were drawn, and are not handed out yet.
        indices, rest: Further parts of the last batch, to be fetched or cut from it.
        first: The batches with which to begin again.
        record: The batches of its backwards.
    """

    name: str
    iterator_of: weakref.ref[Any]
    may_split: bool
    is_map: bool
    is_collated: bool
    is_shared_out: bool
    gives_each: bool
    place: int
    cuts: int
    drawn: int = 0
    cut_from: int | None = None
    sliced_from: int | None = None
    layout: Layout | None = None
    loop: tuple[object, LoopEntered] | None = None
    is_split: bool = False
    began_split: bool = False
    was_training: bool = True
    has_trained: bool = False
    is_over: bool = False
    taken: int = 0
    parts: int = 0
    lead: int = 0
    ahead: int | None = None
    labels: deque[Label] = field(default_factory=deque)
    indices: deque[tuple[Any, Label]] = field(default_factory=deque)
    rest: deque[tuple[Any, Label]] = field(default_factory=deque)
    first: list[Any] = field(default_factory=list)
    record: list[GivenBatches] = field(default_factory=list)

    @property
    def loader(self) -> tuple[Any, ...]:
        """The part of the key that is of the loader, and not of the place."""
        return self.key[:3]

    @property
    def cuts_indices(self) -> bool:
        """True if a rank fetches only its samples; otherwise a batch is cut after it was made."""
        return self.is_map and (self.layout is None or self.layout.makes_parts)


BatchesByPass = dict[SharedPass, deque[Label]]
"""Batches that were handed out, by pass, in the order of each pass's last one."""

REMEMBERED = 64
"""Limit of the batches of one pass without a backward that are kept; an evaluation takes thousands."""


def still_needed(taken: BatchesByPass) -> BatchesByPass:
    """Return those batches, of batches that had a backward, that the program has taken ahead of it."""
    return {this: deque(list(labels)[-this.ahead :], REMEMBERED) for this, labels in taken.items() if this.ahead}


def has_parts(taken: BatchesByPass) -> bool:
    """Return whether other ranks have other samples in one of them."""
    return any(label.is_apart for labels in taken.values() for label in labels)


# --- Errors of loops that do not train on their parts ---


def not_trained(rank: int, world_size: int, name: str, why: str) -> NotPrepared:
    """Return the error of a pass that was split and did not train.

    Args:
        name: The name of its loader.
        why: It was split; empty for the usual reason.
    """
    why = why or "a pass that began in the same place trained"
    return NotPrepared(
        f"rank {rank} of {world_size}: the batches of {name} were split over the ranks, for {why}. This pass did not "
        "train: no backward has come, so what it computed is of this rank's samples only. Call model.eval(), or enter "
        "torch.no_grad(), before the loop that evaluates begins and not inside of it; or use --strict and prepare the "
        "loop."
    )


def passed_over(rank: int, world_size: int, name: str) -> NotPrepared:
    """Return the error of a loop that leaves out each part of the batches of the loader `name`."""
    error = NotPrepared(
        f"rank {rank} of {world_size}: whole batches of {name} were trained on, and then each was split over the ranks "
        "and no part was: the loop has passed them over, as one does that leaves out batches with "
        "len(x) != batch_size. Leave that out (drop_last=True in the loader does the same), or start the cell with "
        "--batches each."
    )
    error.is_of_parts = True
    return error
