"""Position of one loader in its epoch, what is needed to continue there, and its progress. Runs in ranks.

Positions count the batches of the user's loader that all ranks together have had, so they are valid for another number
of ranks. Nothing here iterates a loader. `LoopGauge` measures the progress of one iteration for observers.

Reasons: docs/design/checkpoints.md
"""

from __future__ import annotations

import inspect
import itertools
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from nbaccel.base.events import Progress
from nbaccel.base.values import frozen
from nbaccel.train.data.order import own_states
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.counted_batch import CountedBatch
from nbaccel.train.distributed.nested import leaves
from nbaccel.train.step.accumulation import Accumulation

__all__ = [
    "DatasetStates",
    "EpochProgress",
    "Fetching",
    "Iteration",
    "LoaderPosition",
    "LoopGauge",
    "digests_of",
]


@frozen
class LoaderPosition:
    """The position where an iteration begins, or that it has reached.

    Args:
        epoch: The iteration's number.
        batches: Those of the user's loader before it, for all ranks together.
        seed: The seed of the data order; None where the order is that of plain PyTorch.
        order: States of the generators that determined this order when the epoch began. Where it has not begun: those
            of the loader's own generators now, with which its order will be drawn.
        dataset: State of the dataset, or of a loader that has one, some of those batches before; None where there is
            none.
        batch_size: The batch size of the user's loader; None where batches have sizes of their own.
        loops, looks: Iterations of this number that were under way when it began, loops that may train or looks.
        is_look: This iteration is a look: gradients are disabled.
        goes_on: This epoch began before, so its random draws are repeated.
        is_over: No batch of the epoch is left.
        is_named: The program goes on in this epoch, so that nothing comes if it is over; otherwise the next one comes.
        witness: Digests of the batches between that state and this position; see `DatasetStates`.
    """

    epoch: int = 0
    batches: int = 0
    seed: int | None = None
    order: dict[str, torch.Tensor] = field(default_factory=dict)
    dataset: Any = None
    batch_size: int | None = None
    loops: int = 0
    looks: int = 0
    is_look: bool = False
    goes_on: bool = False
    is_over: bool = False
    is_named: bool = False
    witness: list[int] = field(default_factory=list)

    @property
    def draw(self) -> int:
        """The number of the order within the epoch: 0 and up for loops, -1 and down for looks."""
        return -1 - self.looks if self.is_look else self.loops

    @property
    def is_first(self) -> bool:
        """True if no other such iteration of the epoch was under way."""
        return not (self.looks if self.is_look else self.loops)

    @property
    def is_begun(self) -> bool:
        """True if the epoch has an order already. A look that has handed out nothing is repeated as a whole."""
        return bool(
            self.batches or (not self.is_look and (len(own_states(self.order)) < len(self.order) or not self.is_first))
        )

    def not_begun(self) -> LoaderPosition:
        """Return this beginning of an epoch without an order, which is drawn with the random numbers of then."""
        return replace(self, order=own_states(self.order), loops=0, looks=0)

    def state_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "goes_on"}

    @classmethod
    def from_state(cls, state: dict[str, Any], batch_size: int | None) -> LoaderPosition:
        """Return the position that `state_dict` gave, for a loader with batches of `batch_size`.

        Raises:
            ValueError: The position falls inside one of this loader's batches.
        """
        position = cls(**state, goes_on=True)
        saved = position.batch_size
        is_at_edge = position.is_over or not position.batches
        if saved == batch_size or is_at_edge or saved is None or batch_size is None:
            return replace(position, batch_size=batch_size)
        position = replace(position, dataset=None, witness=[])  # of batches of another size: they cannot be compared
        batches, rest = divmod(position.batches * saved, batch_size)
        if rest:
            samples = position.batches * saved
            raise ValueError(
                f"the saved position is {position.batches} batches of {saved} = {samples} samples into epoch "
                f"{position.epoch}, which is no whole number of batches of {batch_size}. Resume with a batch_size that "
                f"divides {samples}, or start the epoch again with loader.set_epoch({position.epoch})"
            )
        return replace(position, batches=batches, batch_size=batch_size)


class Iteration:
    """One iteration of a prepared loader, from its first batch on.

    Args:
        position: Where it began.
        base: The epoch of its loader by then.
        steps: Training steps done by then.

    Attributes:
        taken: Batches of the user's loader since then, for all ranks together.
        is_over: This rank's last batch was handed out.
        states: The dataset's states after rounds, and the digests of the batches of each; those of the open
            accumulation window, and of `_WITNESSED` rounds before it.
    """

    __slots__ = ("base", "is_over", "position", "states", "steps", "taken")

    def __init__(self, position: LoaderPosition, base: int, steps: int) -> None:
        self.position = position
        self.base = base
        self.steps = steps
        self.taken = 0
        self.is_over = False
        self.states: list[tuple[Any, list[int]]] = [(position.dataset, []), (None, position.witness)]

    @property
    def ahead(self) -> int:
        """Iterations of its kind since `base` that this rank has run through, or holds, and no other rank may know."""
        position = self.position
        return position.epoch - self.base + (position.looks if position.is_look else position.loops)

    def note(self, state: tuple[Any, list[int]], window_position: int) -> None:
        """Add the state after the batch that is handed out now, as number `window_position` of its window."""
        if window_position == 0:
            del self.states[: -1 - _WITNESSED]
        self.states.append(state)

    def dataset_before(self, unseen: int) -> tuple[Any, list[int]]:
        """Return a state, and the digests of batches since, up to the last `unseen`, which belong to the open window.

        None and no digests at the beginning, which is read again.
        """
        end = max(0, len(self.states) - 1 - unseen)
        begin, witness = end, list[int]()
        while begin and (len(witness) < 2 * _WITNESSED or self.states[begin][0] is None):
            witness = [*self.states[begin][1], *witness]
            begin -= 1
        dataset = self.states[begin][0]
        return (None, []) if dataset is None else (dataset, witness)


class EpochProgress:
    """The position of one prepared loader; shared with loaders that `skip_first_batches` made of it.

    Attributes:
        epoch: Its number when it last counted an iteration; see `PreparedLoader.iteration` for the rule.
        loops, looks: Iterations since then that ran to their ends, but neither trained nor did the ranks meet in them:
            those that could have trained, and looks. Each of them has a number of its own.
        open: The iterations that are under way, or held, in the order in which they began.
        resume: Where the next iteration must begin; None for the epoch's first batch.
        over: The end of the epoch before, where a checkpoint was saved: a program may still name that epoch.
        has_trained: An iteration that is over has trained.
        is_joined: Ranks may run out of batches one after the other.
        ended: Where the last iteration ended, if it trained, and how many such passes the program had made by then.
    """

    def __init__(self) -> None:
        self.epoch = self.loops = self.looks = 0
        self.open: list[Iteration] = []
        self.resume: LoaderPosition | None = None
        self.over: LoaderPosition | None = None
        self.has_trained = False
        self.is_joined = False
        self.ended: tuple[dict[str, Any], int] | None = None

    @property
    def current(self) -> Iteration | None:
        """The innermost loop that is under way, or else the innermost look; None outside of them."""
        loops = [one for one in self.open if not one.position.is_look] or self.open
        return loops[-1] if loops else None

    def number(self, is_look: bool) -> tuple[int, int, int]:
        """Return epoch, loops and looks of the next iteration's position."""
        epoch = self.epoch + (self.looks if is_look else self.loops)
        under_way = [one.position for one in self.open]
        alike = [one for one in under_way if one.is_look == is_look and one.epoch == epoch]
        last = max(((one.looks if is_look else one.loops) + 1 for one in alike), default=0)
        return (epoch, 0, last) if is_look else (epoch, last, 0)

    def is_known(self, position: LoaderPosition) -> bool:
        """Return whether the number of an iteration at `position` follows from what all ranks have done together."""
        return position.is_first and not (self.looks if position.is_look else self.loops)

    def begin(self, position: LoaderPosition, steps: int) -> Iteration:
        this = Iteration(position, self.epoch, steps)
        self.open.append(this)
        self.resume = None
        if not position.is_look:
            self.over = None
        return this

    def enter_epoch(self, epoch: int) -> None:
        """Make the next iteration the first one of `epoch`."""
        self.epoch, self.loops, self.looks = epoch, 0, 0

    def end(self, this: Iteration, counts: bool, is_whole: bool) -> None:
        """End an iteration; it was an epoch if it `counts`, and waits to be one if it merely ran to its end."""
        position = this.position
        place = self.open.index(this)
        # A loop that is over leaves none behind that began before it: their iterators are held, and not used.
        del self.open[0 if (counts or is_whole) and not position.is_look else place : place + 1]
        if self.epoch != this.base:  # chosen by the program since, or counted by an iteration beside this one
            return
        if counts:
            self.enter_epoch((this.base if position.is_look else position.epoch) + 1)
        elif is_whole and position.is_look:
            self.looks += 1
        elif is_whole:
            self.loops += 1


_WITNESSED = 8
"""Batches that a stream must yield again before its state counts. A few may be those of another place by chance."""

_VALUES = 64
"""Values of a tensor in its digest, evenly spaced."""


class DatasetStates:
    """The state of a dataset after each round that was read; rounds are read before they are handed out.

    A state may be incomplete: that of Hugging Face's streams has no samples of a shuffle buffer (accelerate#2859). So
    the state some batches before a position is kept, with digests of these batches, and it counts if it leads to the
    same ones.

    Attributes:
        owner: The dataset, or a loader that keeps its own state; None where neither has one to resume by, or without a
            loader.
    """

    def __init__(self, loader: DataLoader[Any] | None) -> None:
        self.owner: Any = None if loader is None else _stateful(loader)
        self._states: deque[tuple[Any, list[int]]] = deque()
        self._beginning: Any = None
        if self.owner is not None and self.owner is not loader:  # a loader's own state would start its workers
            with suppress(Exception):  # one that has no state before it is read begins anew by itself
                self._beginning = self.owner.state_dict()

    def __bool__(self) -> bool:
        return self.owner is not None

    def noted(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Return `rounds`, lists of batches, noting the state after each was read; unchanged where there is none."""
        self._states.clear()
        return rounds if self.owner is None else self._noted(rounds)

    def noted_singly(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return `batches`, as `noted` does for rounds."""
        self._states.clear()
        return batches if self.owner is None else (batch for (batch,) in self._noted([batch] for batch in batches))

    def _noted(self, rounds: Iterable[list[Any]]) -> Iterator[list[Any]]:
        for round_ in rounds:
            digests = [number for batch in round_ for number in digests_of(batch)]
            self._states.append((self.owner.state_dict(), digests))
            yield round_

    def take(self) -> tuple[Any, list[int]]:
        """Return the state after the oldest round that was not taken yet, and the digests of its batches."""
        return self._states.popleft()

    def resumed(self, position: LoaderPosition, begin: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
        """Return the batches from `position` on, by the dataset's state; None if all before must be read again.

        Args:
            begin: Begins to iterate the loader.
        """
        has_state = position.dataset is not None and bool(position.witness)
        if self.owner is None or not position.goes_on:
            return None
        if has_state:
            self.owner.load_state_dict(position.dataset)
            batches = begin()
            read = itertools.islice(batches, len(position.witness) // 2)
            if _meets([number for batch in read for number in digests_of(batch)], position.witness):
                return batches
        if self._beginning is not None:
            self.owner.load_state_dict(self._beginning)
        if has_state:
            warn_user(
                f"the state of {type(self.owner).__name__} does not lead back to the batches before the save, as where "
                f"it shuffles by a buffer, which is in no state: all {position.batches} batches up to there are read "
                "again."
            )
        return None


def digests_of(batch: Any) -> tuple[int, int]:
    """Return digests of some values of a batch: of all kinds, and of those that are no floats (0 without any)."""
    every = exact = 0
    for leaf in leaves(batch.batch if isinstance(batch, CountedBatch) else batch):
        is_exact = not isinstance(leaf, (float, complex))
        said = f"{type(leaf).__name__}"
        if isinstance(leaf, Tensor):
            is_exact = not (leaf.is_floating_point() or leaf.is_complex())
            said += f"{leaf.dtype}{tuple(leaf.shape)}"
            if leaf.device.type == "cpu" and leaf.layout is torch.strided:
                flat = leaf.detach().reshape(-1)
                said += str(flat[:: max(1, len(flat) // _VALUES)].tolist())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, complex)):
            said += repr(leaf[:_VALUES] if isinstance(leaf, (str, bytes)) else leaf)
        elif type(leaf).__module__ == "numpy":
            said += repr(leaf)
            is_exact = getattr(getattr(leaf, "dtype", None), "kind", "f") not in "fc"
        every = zlib.crc32(said.encode(errors="replace"), every)
        if is_exact:
            exact = zlib.crc32(said.encode(errors="replace"), exact)
    return every, exact


def _meets(read: list[int], witness: list[int]) -> bool:
    """Return whether these are the same batches; floats may differ if the rest tells them apart, as augmented ones."""
    labels = witness[1::2]
    return read == witness or (read[1::2] == labels and len(set(labels)) >= _WITNESSED // 2)


def _stateful(loader: DataLoader[Any]) -> Any:
    """Return the object whose state gives the position, or None. Worker processes have copies that advance instead."""
    is_read_here = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
    candidates = [loader, *([loader.dataset] if is_read_here else [])]
    for candidate in candidates:
        if hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict"):
            return candidate
    return None


_ENOUGH_LOOKS = 20  # 5 s: some 10 % of the time, give or take


class Fetching:
    """Estimates how much of their time the loops over one loader wait for batches. Only the loop holds the generator.

    Attributes:
        waiting: A fraction of 1; None before there were enough looks.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[Generator[Any, None, None]] | None = None
        self._looks = self._waits = 0

    def __reduce__(self) -> tuple[type[Fetching], tuple[()]]:
        """Return an empty object, so that a copied or pickled loader starts to count again."""
        return Fetching, ()

    @property
    def waiting(self) -> float | None:
        return round(self._waits / self._looks, 2) if self._looks >= _ENOUGH_LOOKS else None

    def watch(self, generator: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Note that a loop begins which takes its batches from `generator`; return it."""
        self._generator = weakref.ref(generator)
        return generator

    def look(self) -> None:
        """Count whether the generator is running now. Called from another thread than the loop's."""
        generator = None if self._generator is None else self._generator()
        self._looks += 1
        self._waits += generator is not None and inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


class LoopGauge:
    """Progress of one iteration, from its first batch to its end.

    The loop itself reports nothing: a launcher's thread reads the gauge a few times per second, so that reporting costs
    the loop nothing. The loop trains if backwards come, otherwise it evaluates. How long it waits for data is estimated
    from how often the loader was found busy.

    Args:
        taken: Returns how many batches of the epoch this rank has had, including those that it left out.
        batches: How many the epoch has for this rank; None where that is unknown.
        epoch: That of the loader; where the program has announced epochs (`Accelerator.epochs`), theirs is used
            instead.
        samples: In one batch of this rank; None where batches have sizes of their own.
        may_train: Gradients were enabled when it began.
        fetching: That of its loader.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        taken: Callable[[], int],
        batches: int | None,
        epoch: int,
        samples: int | None,
        may_train: bool,
        fetching: Fetching,
    ) -> None:
        self._accumulation = accumulation
        self._taken = taken
        self._batches = batches
        self._epoch = epoch if accumulation.epoch is None else accumulation.epoch
        self._epochs = accumulation.epochs
        self._samples = samples
        self._may_train = may_train
        self._fetching = fetching
        self._steps_before = accumulation.clock.done
        self._taken_before = taken()
        self._began = time.monotonic()
        self._end: Progress | None = None

    def read(self) -> Progress | None:
        """Return the present progress; None once the loop has ended. Called from any thread but the loop's."""
        if self._end is not None:
            return None
        self._fetching.look()
        return self._look()

    def close(self) -> Progress:
        """Note that the iteration has ended, or was left; return its progress at that time."""
        self._end = self._look(is_over=True)
        return self._end

    def _look(self, is_over: bool = False) -> Progress:
        steps, taken = self._accumulation.clock.done, self._taken()
        has_trained = steps > self._steps_before
        # Before the first step is complete, loops that train and loops that evaluate differ only in enabled gradients.
        is_first_window = self._may_train and taken <= self._taken_before + self._accumulation.steps and not is_over
        return Progress(
            step=steps,
            batch=taken,
            batches=self._batches,
            epoch=self._epoch,
            epochs=self._epochs,
            samples=self._samples,
            is_training=has_trained or is_first_window,
            is_guess=is_first_window and not has_trained,
            is_over=is_over,
            first=self._steps_before,
            began=self._began,
            waiting=self._fetching.waiting,
            learning_rates=self._accumulation.rates.read(),
        )
