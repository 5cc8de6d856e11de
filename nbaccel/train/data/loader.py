"""PreparedLoader: the loader that a training loop iterates. Runs in ranks.

It takes this rank's batches from its source to its device, opens an accumulation window per iteration, counts
epochs and positions, and can be resumed inside an epoch. The source decides which rank gets which batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from nbaccel.errors import NotPrepared
from nbaccel.events import Gauge, emit
from nbaccel.train.data.draws import Comparison, Meetings, takes_one_batch
from nbaccel.train.data.order import samplers_of, tell_epoch
from nbaccel.train.data.placement import place
from nbaccel.train.data.position import EpochProgress, Fetching, LoaderPosition, LoopGauge
from nbaccel.train.data.shard import counted, refuse_uneven, until_backward
from nbaccel.train.data.sources import Source
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.step.accumulation import Accumulation
from nbaccel.train.step.implicit_hooks import step_back
from nbaccel.world import World

__all__ = ["PreparedLoader"]


class PreparedLoader(DataLoader[Any]):
    """A loader whose batches are this rank's, on its device, and whose end the accumulation knows.

    Attributes it does not define are those of the user's loader, which is available as `loader`.

    loader: the user's own.  end_of_dataloader: the current batch is the last one.
    iteration: the number of the current epoch, or of the next one. With several ranks an iteration counts as an
    epoch if it trained, or the ranks met in it (a gather, a barrier); in one process if it trained, or was iterated to
    the end. An epoch that is begun again has another order. Looks, which are ``next(iter(loader))`` and loops without
    gradients, are counted separately from loops: a look on one rank does not change which samples it trains on.
    is_bound: it must be iterated in the world it was prepared for; False for loaders of a simulated rank.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        source: Source,
        world: World,
        accumulation: Accumulation,
        device: torch.device | None,
    ) -> None:
        """Iterate `source`; batches go to `device` (None: they stay)."""
        # No super().__init__(): this is the user's loader seen from one rank, not a second loader.
        self.loader = loader
        self.world = world
        self.accumulation = accumulation
        self.end_of_dataloader = False
        self.is_bound = True
        self._source = source
        self._progress = EpochProgress()
        self._origin: PreparedLoader | None = None  # the loader of which this one is the rest
        self._resumed: LoaderPosition | None = None  # the position that the skipped batches replace
        self._comparison = Comparison(self._name(), world)
        self._skip = 0  # this rank's batches that every iteration leaves out
        self._fetching = Fetching()
        self.move_to(device)

    @classmethod
    def over(
        cls,
        loader: DataLoader[Any],
        source: Source,
        world: World,
        accumulation: Accumulation,
        device: torch.device | None,
    ) -> Self:
        """Make a loader of a subclass, whose constructor takes what programs pass."""
        prepared = cls.__new__(cls)
        PreparedLoader.__init__(prepared, loader, source, world, accumulation, device)
        return prepared

    def __nbaccel_unwrap__(self) -> DataLoader[Any]:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.loader

    def move_to(self, device: torch.device | None) -> None:
        """Set the device for batches from now on; batches for the CPU are not moved."""
        self._device = None if device is None or device.type == "cpu" else device

    # -- iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        step_back()
        self._refuse_other_world()
        takes_one = takes_one_batch(sys._getframe(1))
        is_look = takes_one or not torch.is_grad_enabled()
        this = self._apart() if is_look and self._progress.begun is not None else self
        this.end_of_dataloader = False
        return this.accumulation.gate.over(this, this._fetching.watch(this._iterate(is_look, takes_one)))

    def _apart(self) -> PreparedLoader:
        """Return a copy for a look during an iteration, which continues as if there had been no look."""
        apart = copy.copy(self)
        apart._origin, apart._source = None, self._source.apart()
        apart._progress, apart._fetching = EpochProgress(), Fetching()
        apart._progress.enter_epoch(self._progress.epoch, self._progress.loops, self._progress.looks)
        self._progress.looks += 1
        return apart

    def _iterate(self, is_look: bool = False, takes_one: bool = False) -> Generator[Any, None, None]:
        position = self._next_position(is_look)
        accumulation, clock = self.accumulation, self.accumulation.clock
        source, progress, stride = self._source, self._progress, self._source.stride
        states = source.states if source.states else None  # read once: this is the step path
        lengths = source.lengths(position.batches)
        length = None if lengths is None else self._own(lengths)
        joint_ends = frozenset(lengths or ()) if self.is_joined else frozenset()
        meetings = Meetings(self.world, counts_anyway=length == 0)
        resume, is_resumed = progress.resume, progress.resume is position
        progress.begin(position, clock.done)
        if not is_resumed:
            progress.resume = resume  # of a later loop: this iteration is a look
        may_train = torch.is_grad_enabled()
        is_compared = source.is_drawn_apart and not (position.is_first or takes_one) and self._comparison.is_possible
        if is_compared:
            self._comparison.show(position)
        window = accumulation.open(self if self._origin is None else self._origin, length)
        gauge = self._gauge(position, length, may_train)
        emit(Gauge(gauge.read))
        is_whole = False
        entered = ExitStack()
        try:
            if lengths is not None and len(set(lengths)) > 1 and may_train and not self.is_joined:
                entered.enter_context(until_backward(partial(refuse_uneven, lengths)))
            for batch, is_last in place(source.open(position), self._device):
                if is_compared and (clock.done > progress.steps or meetings.look()):
                    self._comparison.compare(position)
                    is_compared = False
                if is_last:
                    window.is_last = self.end_of_dataloader = True
                elif joint_ends:  # where one rank synchronises because its batches end, all must
                    window.is_last = progress.taken // stride + 1 in joint_ends
                if accumulation.block is not None or accumulation.window is not window:
                    accumulation.take(window)
                if window.position == 0:
                    clock.enter()
                if states is not None:
                    progress.note(states.take(), window.position)
                progress.taken += stride
                if accumulation.block is not None:  # the batch is taken inside of `accumulate`
                    accumulation.block.decide()
                yield batch
                if window.batches_left is not None:
                    window.batches_left -= 1
            is_whole = True
            if is_compared and (clock.done > progress.steps or meetings.look()):
                self._comparison.compare(position)
        finally:
            entered.close()
            emit(gauge.close())
            if progress.begun is position:
                self._end(position, meetings, is_whole, is_resumed)
            accumulation.close(window, is_whole)

    def _gauge(self, position: LoaderPosition, length: int | None, may_train: bool) -> LoopGauge:
        """Return the gauge of an iteration that starts at `position` and has `length` batches for this rank."""
        progress, stride = self._progress, self._source.stride
        before = position.batches // stride
        return LoopGauge(
            self.accumulation,
            lambda: before + progress.taken // stride,
            None if length is None else before + length,
            position.epoch,
            self.rank_batch_size,
            may_train,
            self._fetching,
        )

    def _end(self, position: LoaderPosition, meetings: Meetings, is_whole: bool, is_resumed: bool) -> None:
        """Record the end of the iteration that started at `position`, and count it if it was an epoch.

        is_whole: no batch is left.  is_resumed: `position` was set by `load_state_dict`, or left by a look.
        """
        progress, clock = self._progress, self.accumulation.clock
        has_met = meetings.look() and meetings.are_counted
        has_trained = clock.done > progress.steps
        if has_trained or (position.goes_on and is_whole):  # resumed at its end it has nothing left to train
            clock.end_pass()
            progress.ended = (self.state_dict(), clock.passes)
        is_epoch = has_trained or (has_met if meetings.are_counted else is_whole)
        progress.end(counts=is_epoch and progress.resume is None)
        if is_resumed and not (has_trained or has_met or is_whole):
            progress.resume = position  # a look: the training that continues there is still to come

    def _next_position(self, is_look: bool) -> LoaderPosition:
        """Return the position where an iteration that starts now begins."""
        progress = self._progress
        resumed = progress.resume
        if resumed is not None and not (is_look and self._is_through(resumed)):
            return resumed
        batches, epoch = self._skip * self._source.stride, progress.epoch
        counts = (progress.loops, progress.looks, is_look)
        first = self._resumed
        if first is not None and first.epoch == epoch and not is_look:
            return replace(first, batches=batches, dataset=None)
        return LoaderPosition(epoch, batches, self._source.seed, self._source.order(), None, self._batch_size, *counts)

    def _is_through(self, position: LoaderPosition) -> bool:
        """Return whether a loop that may train has no batches left at `position`, so that no look may resume there."""
        lengths = self._source.lengths(position.batches)
        return not position.is_look and lengths is not None and not max(lengths)

    # -- how long

    def __len__(self) -> int:
        """Return this rank's batches in an epoch; for a loader without the first `n` batches, those of the rest."""
        lengths = self._source.lengths(self._skip * self._source.stride)
        if lengths is None:
            raise TypeError(f"this loader has no length: its {type(self.loader.dataset).__name__} has none")
        return self._own(lengths)

    def _own(self, lengths: list[int]) -> int:
        return lengths[self.world.rank] if len(lengths) > 1 else lengths[0]

    # -- epochs and positions

    @property
    def iteration(self) -> int:
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.enter_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the first one of `epoch`; without this they count up from 0. Every rank calls it.

        A position inside another epoch, which `load_state_dict` has set, is dropped.
        """
        progress = self._progress
        progress.enter_epoch(epoch)
        if progress.resume is not None and progress.resume.epoch != epoch:
            progress.resume = None
        loader = self.loader
        tell_epoch(epoch, loader.dataset, *samplers_of(loader))

    def state_dict(self, unseen: int = 0) -> dict[str, Any]:
        """Return the position of the loop: epoch, its batches had so far, and what its order follows from; plain data.

        The current batch counts as had; `unseen` of this rank's last batches do not (those of an accumulation window
        that is still open, whose gradients are in no checkpoint). The state of rank 0 is valid for all ranks, for
        another number of them, and for another batch size if it divides the samples had so far. Reads nothing and
        waits for no rank.
        """
        progress, begun = self._progress, self._progress.begun
        if begun is None:
            counts = (progress.loops, progress.looks)
            size = self._batch_size
            resumed = progress.resume or LoaderPosition(progress.epoch, 0, self._source.seed, {}, None, size, *counts)
            return resumed.state_dict()
        # A window may have begun in the epoch before, whose batches are not read again.
        batches = begun.batches + max(0, progress.taken - unseen * self._source.stride)
        dataset = progress.dataset_before(unseen)
        looks = begun.looks if begun.is_look else progress.looks
        reached = replace(begun, batches=batches, seed=self._source.seed, dataset=dataset, looks=looks)
        return replace(reached, batch_size=self._batch_size).state_dict()

    def state_in_epoch(self, since: int, unseen: int) -> dict[str, Any]:
        """Return `state_dict` for an epoch of the program that continues, and began `since` passes after the first.

        A loader that has trained in it and is exhausted is at its end, not before the next epoch. One that is being
        iterated and has not trained is at its beginning: an evaluation is repeated as a whole.
        """
        progress = self._progress
        if progress.begun is not None:
            has_trained = self.accumulation.clock.done > progress.steps
            return self.state_dict(unseen) if has_trained else progress.begun.state_dict()
        return progress.ended[0] if progress.ended is not None and progress.ended[1] > since else self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration at the position that `state_dict` describes. Every rank calls it.

        Samples of a dataset with indices that were had are not read again; a stream continues from its dataset's own
        state, or is read again up to there if it has none (`state_dict` and `load_state_dict`, without worker
        processes). An iteration that was at its end yields nothing; the epoch after it is whole again. Random numbers
        that worker processes draw start again.

        >>> from nbaccel import Accelerator
        >>> loader = Accelerator().prepare(DataLoader(range(8), 2))
        >>> for batch in loader:
        ...     state = loader.state_dict()
        ...     break
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5], [6, 7]]
        """
        position = LoaderPosition.from_state(state, self._batch_size)
        if not self.world.is_main_process:
            position = replace(position, order={})  # rank 0's: worker processes of all ranks would draw alike
        if position.seed is not None and self._source.seed is not None:
            self._source.seed = position.seed
        self._progress.enter_epoch(position.epoch, position.loops, position.looks)
        self._progress.resume = position if position.batches else None

    @property
    def goes_on_at(self) -> tuple[int, int, int | None]:
        """The epoch of the next iteration, from 0; this rank's batches of it that are done; and how many it has."""
        progress, resume = self._progress, self._progress.resume
        batches = 0 if resume is None else resume.batches
        done, lengths = batches // self._source.stride, self._source.lengths(batches)
        return progress.epoch, done, None if lengths is None else done + self._own(lengths)

    @property
    def is_joined(self) -> bool:
        """True if uneven lengths are handled; see `Accelerator.join_uneven_inputs`."""
        return self._progress.is_joined

    @contextmanager
    def joined(self, even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks run out of batches one after the other while entered; apply `even_batches` unless None."""
        even, was_joined = self.even_batches, self._progress.is_joined
        self._progress.is_joined = True
        if even_batches is not None:
            self.even_batches = even_batches
        try:
            yield
        finally:
            self.even_batches, self._progress.is_joined = even, was_joined

    def without_first(self, batches: int) -> PreparedLoader:
        """Return this loader without this rank's first `batches`, in every iteration; both count epochs together.

        It replaces a position that `load_state_dict` has set; the order of that epoch stays.
        """
        if batches < 0:
            raise ValueError(f"num_batches must be at least 0, got {batches}")
        rest = copy.copy(self)
        rest._skip = self._skip + batches
        rest._origin = self if self._origin is None else self._origin
        rest._resumed, self._progress.resume = self._progress.resume, None
        return rest

    # -- attributes that programs read

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return self._source.batch_sampler

    @property
    def even_batches(self) -> bool:
        """True if the last round is filled up, so that all ranks see equally many batches; may be changed."""
        return self._source.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._source.even = even

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take per batch; None where batches have sizes of their own."""
        size = self._batch_size
        return size if size is None or self._source.is_split else size * self.world.world_size

    @property
    def rank_batch_size(self) -> int | None:
        """Samples that this rank takes per batch; None where batches have sizes of their own."""
        size = self._batch_size
        return size // self.world.world_size if size is not None and self._source.is_split else size

    @property
    def total_dataset_length(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        """Real samples in the last round of all ranks, once it was dealt; -1 where nothing was repeated."""
        return self._source.remainder

    @property
    def may_be_uneven(self) -> bool:
        return self._source.may_be_uneven

    def lengths(self) -> list[int] | None:
        """Return the batches of each rank in an epoch, one number if all have equally many; None where unknown."""
        return self._source.lengths(self._skip * self._source.stride)

    def _name(self) -> str:
        size = "of its own sizes" if self._batch_size is None else f"of {self._batch_size}"
        return f"the loader over {type(self.loader.dataset).__name__} (batches {size})"

    @property
    def _batch_size(self) -> int | None:
        size: int | None = getattr(self.loader.batch_sampler, "batch_size", self.loader.batch_size)
        return size

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    # -- refusals

    def _refuse_other_world(self) -> None:
        if not self.is_bound:
            return
        world = current_world()
        if world.world_size != self.world.world_size:
            raise NotPrepared(
                f"this loader was prepared for {self.world.world_size} process(es) and is iterated in "
                f"{world.place}: the ranks would see the wrong batches. Prepare it here, before the loop:\n"
                "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )

    def refuse_to_gather(self) -> None:
        """Refuse a gather in each batch where ranks get different numbers of batches: the last gather would not end.

        Raises:
            ValueError: the numbers differ.
        """
        lengths = self.lengths()
        if lengths is not None and len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks see different numbers of batches ({counted(lengths)}), so a gather in each of them would "
                f"keep rank {lengths.index(max(lengths))} waiting in its last one. Prepare this loader with "
                "even_batches=True (gather_for_metrics leaves the repeated samples out), or gather once after the "
                "loop, as objects."
            )
