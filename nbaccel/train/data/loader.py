"""PreparedLoader: the loader that a training loop iterates. Runs in ranks.

It takes this rank's batches from its source to its device, opens an accumulation window per iteration, counts
epochs and positions, and can be resumed inside an epoch. The source decides which rank gets which batch.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader

from nbaccel.base.events import Gauge, emit
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared
from nbaccel.train.data.order import own_states, samplers_of, tell_epoch
from nbaccel.train.data.placement import place
from nbaccel.train.data.position import EpochProgress, Fetching, Iteration, LoaderPosition, LoopGauge
from nbaccel.train.data.shard import StreamShard, counted, refuse_uneven, until_backward
from nbaccel.train.data.sources import Source
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.distributed.transport import CollectivesSince
from nbaccel.train.step.accumulation import Accumulation, Window
from nbaccel.train.step.raw_loop_hooks import step_back

if TYPE_CHECKING:
    from nbaccel.train.data.order_comparison import OrderComparison

__all__ = ["PreparedLoader"]


class PreparedLoader(DataLoader[Any]):
    """A loader whose batches are this rank's, on its device, and whose end the accumulation knows.

    Attributes it does not define are those of the user's loader, which is available as `loader`.

    Args:
        loader: The user's own.

    Attributes:
        end_of_dataloader: The current batch is the last one.
        iteration: The number of the current epoch, or of the next one. An iteration counts as an epoch, and the next
            one has another order, once it has trained, the ranks have met in it (a gather, a barrier), or it has run to
            its end on all ranks. One that is dropped before uses no order up: the next one begins with the same
            batches. That all ranks have run to the end is found out when they meet in the next one. Iterations without
            gradients that neither trained nor met are counted apart, so that one rank alone may evaluate.
        is_bound: It must be iterated in the world it was prepared for; False for loaders of a simulated rank.
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
        self._comparison = self._make_comparison()
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
        """Return a loader of a subclass, whose constructor takes what programs pass.

        Args:
            loader: The program's own loader.
            source: Where the batches of this rank come from.
            world: The position of this process.
            accumulation: The windows that the loader's end closes.
            device: Where batches go; None leaves them.
        """
        prepared = cls.__new__(cls)
        PreparedLoader.__init__(prepared, loader, source, world, accumulation, device)
        return prepared

    def __nbaccel_unwrap__(self) -> DataLoader[Any]:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.loader

    def move_to(self, device: torch.device | None) -> None:
        """Set the device for the next batches.

        Args:
            device: The device. None, or the CPU, does not move batches.
        """
        self._device = None if device is None or device.type == "cpu" else device

    # -- iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        step_back()
        self._refuse_other_world()
        fetching = Fetching() if self._progress.open else self._fetching
        iterator = self._iterate(not torch.is_grad_enabled(), fetching)
        return self.accumulation.gate.over(self, fetching.watch(iterator))

    def _iterate(self, is_look: bool = False, fetching: Fetching | None = None) -> Generator[Any, None, None]:
        if self._progress.over is not None and not is_look:
            self._drained(self._progress.over)
        position = self._next_position(is_look)
        accumulation, clock = self.accumulation, self.accumulation.clock
        progress = self._progress
        source, outer = self._enter_source()
        stride = source.stride
        states = source.states if source.states else None  # read once: this is the step path
        lengths = [0] if position.is_over else source.lengths(position.batches)
        length = None if lengths is None else self._own(lengths)
        joint_ends = frozenset(lengths or ()) if self.is_joined else frozenset()
        meetings = CollectivesSince(self.world, counts_anyway=length == 0)
        resume, is_resumed = progress.resume, progress.resume is position
        is_known = progress.is_known(position)
        this = progress.begin(position, clock.done)
        if not is_resumed:
            progress.resume = resume  # of a later loop: this iteration is a look
        may_train = torch.is_grad_enabled()
        compared = self._compared(this, source, is_known)
        counted = self if self._origin is None else self._origin
        given_up = accumulation.windows_of(counted)
        window = accumulation.open(copy.copy(counted) if is_look and outer is not None else counted, length)
        gauge = self._gauge(this, length, may_train, fetching or self._fetching)
        emit(Gauge(gauge.read))
        is_whole = False
        entered = ExitStack()
        try:
            if lengths is not None and len(set(lengths)) > 1 and may_train and not self.is_joined:
                entered.enter_context(until_backward(partial(refuse_uneven, lengths)))
            batches = self._drained(position) if position.is_over else source.open(position)
            for batch, is_last in place(batches, self._device):
                if compared is not None and (clock.done > this.steps or meetings.look()):
                    compared.compare(this, is_stream=isinstance(source.read_alike, StreamShard))
                    compared = None
                if is_last:
                    window.is_last = self.end_of_dataloader = this.is_over = True
                elif joint_ends:  # where one rank synchronises because its batches end, all must
                    window.is_last = this.taken // stride + 1 in joint_ends
                if accumulation.block is not None or accumulation.window is not window:
                    accumulation.take(window)
                if window.position == 0:
                    clock.enter()
                if states is not None:
                    this.note(states.take(), window.position)
                this.taken += stride
                if accumulation.block is not None:  # the batch is taken inside of `accumulate`
                    accumulation.block.decide()
                yield batch
                if window.batches_left is not None:
                    window.batches_left -= 1
            is_whole = True
            if compared is not None and (clock.done > this.steps or meetings.look()):
                compared.compare(this, is_stream=isinstance(source.read_alike, StreamShard))
        finally:
            entered.close()
            emit(gauge.close())
            self._end(this, meetings, is_whole, is_resumed)
            if outer is not None and self._source is source:
                self._return_to(*outer, [] if is_look else given_up)
            accumulation.close(window, is_whole)

    def _make_comparison(self) -> OrderComparison | None:
        if not self.world.is_distributed:
            return None
        from nbaccel.train.data.order_comparison import OrderComparison

        return OrderComparison(self._name(), self.world)

    def _compared(self, this: Iteration, source: Source, is_known: bool) -> OrderComparison | None:
        """Write down for the peers what an iteration draws; return what compares it with theirs, if that must be."""
        comparison = self._comparison
        if comparison is None or not comparison.is_possible:
            return None
        if is_apart := source.is_drawn_apart and not is_known:
            comparison.show(this)
        if source.read_alike is not None:
            source.read_alike.tell_first = partial(comparison.show_first, this)
        return comparison if is_apart or source.read_alike is not None else None

    def _gauge(self, this: Iteration, length: int | None, may_train: bool, fetching: Fetching) -> LoopGauge:
        """Return the gauge of an iteration that has `length` batches for this rank."""
        stride = self._source.stride
        before = this.position.batches // stride
        return LoopGauge(
            self.accumulation,
            lambda: before + this.taken // stride,
            None if length is None else before + length,
            this.position.epoch,
            self.rank_batch_size,
            may_train,
            fetching,
        )

    def _end(self, this: Iteration, meetings: CollectivesSince, is_whole: bool, is_resumed: bool) -> None:
        """Record the end of an iteration, and count it if it was an epoch.

        Args:
            is_whole: No batch is left.
            is_resumed: Its position was set by `load_state_dict`, or left by a look.
        """
        progress, clock, position = self._progress, self.accumulation.clock, this.position
        has_trained = clock.done > this.steps
        progress.has_trained |= has_trained
        if this not in progress.open:  # another loop is over that began after it
            return
        has_met = meetings.look() and meetings.are_counted
        # Resumed at its end it has nothing left to train.
        if this is progress.current and (has_trained or (position.goes_on and is_whole)):
            clock.end_pass()
            progress.ended = (self._state_of(this), clock.passes)
        is_epoch = has_trained or (has_met if meetings.are_counted else is_whole)
        is_free = progress.resume is None
        progress.end(this, counts=is_epoch and is_free, is_whole=is_whole and is_free)
        if is_resumed and not (has_trained or has_met or is_whole):
            progress.resume = position  # a look: the training that continues there is still to come

    def _enter_source(self) -> tuple[Source, tuple[Source, bool] | None]:
        """Return the source of an iteration that begins, and what `_return_to` takes if it begins inside of another.

        One inside of another, or beside it, draws by itself and leaves the other as it is.
        """
        outer = (self._source, self.end_of_dataloader) if self._progress.open else None
        self._source, self.end_of_dataloader = self._source if outer is None else self._source.apart(), False
        return self._source, outer

    def _return_to(self, source: Source, is_last: bool, given_up: list[Window]) -> None:
        """Continue the iteration that was under way before one inside of it, with its `source` and its windows."""
        self._source = source
        under_way = self._progress.current
        if under_way is not None:
            self.end_of_dataloader = is_last
            tell_epoch(under_way.position.epoch, self.loader.dataset, *samplers_of(self.loader))
            self.accumulation.reopen(given_up)

    def _next_position(self, is_look: bool) -> LoaderPosition:
        """Return the position where an iteration that starts now begins."""
        progress = self._progress
        resumed = progress.resume
        if resumed is not None and not (is_look and resumed.is_over and not resumed.is_look):
            return resumed
        batches, (epoch, loops, looks) = self._skip * self._source.stride, progress.number(is_look)
        first = self._resumed
        if first is not None and first.epoch == epoch and not is_look:
            return replace(first, batches=batches, dataset=None, witness=[])
        order, size = self._source.order(), self._batch_size
        return LoaderPosition(epoch, batches, self._source.seed, order, None, size, loops, looks, is_look)

    def _drained(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        """Draw what the epoch of `position`, which is over, has drawn up to its end; return no batches."""
        for _ in self._source.open(position):  # nothing is left, or less than a round of these ranks
            pass
        return iter(())

    def _is_all(self, batches: int) -> bool:
        """Return whether so many batches of the user's loader are known to be a whole epoch."""
        lengths = self._source.lengths(batches)
        return lengths is not None and not max(lengths)

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
        return self._progress.epoch + self._progress.loops

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.enter_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the first one of `epoch`. Every rank calls it.

        Without it epochs count up from 0. A position inside another epoch, which `load_state_dict` has set, is dropped.
        After one at the end of this epoch the next iteration yields nothing.

        Args:
            epoch: The number of the epoch, 0-based.
        """
        progress = self._progress
        progress.enter_epoch(epoch)
        if progress.over is not None and progress.over.epoch == epoch:
            progress.resume, progress.over = replace(progress.over, is_named=True), None
        elif progress.resume is not None and progress.resume.epoch != epoch:
            progress.resume = None
        loader = self.loader
        tell_epoch(epoch, loader.dataset, *samplers_of(loader))

    def state_dict(self, unseen: int = 0) -> dict[str, Any]:
        """Return the position of the loop as plain data: the epoch, the batches that it has yielded, and the seed of
        its order.

        It reads no sample and waits for no rank. The state of rank 0 is valid for all ranks and for another number of
        ranks. It is valid for another batch size if that divides the number of samples yielded.

        Args:
            unseen: The number of this rank's last batches that do not count as yielded: those of an open accumulation
                window, whose gradients are in no checkpoint. The current batch counts.
        """
        this = self._progress.current
        if this is not None:
            return self._state_of(this, unseen)
        size, order = self._batch_size, own_states(self._source.order())
        resumed = self._progress.resume
        return (resumed or LoaderPosition(self.iteration, 0, self._source.seed, order, None, size)).state_dict()

    def _state_of(self, this: Iteration, unseen: int = 0) -> dict[str, Any]:
        # A window may have begun in the epoch before, whose batches are not read again.
        batches = this.position.batches + max(0, this.taken - unseen * self._source.stride)
        dataset, witness = this.dataset_before(unseen)
        reached = replace(this.position, batches=batches, seed=self._source.seed, dataset=dataset, witness=witness)
        was_over = this.position.is_over  # nothing came, since the program has named this epoch
        is_over = was_over or (not unseen and (this.is_over if self._source.is_stream else self._is_all(batches)))
        return replace(reached, batch_size=self._batch_size, is_over=is_over, is_named=was_over).state_dict()

    def state_in_epoch(self, since: int, unseen: int) -> dict[str, Any]:
        """Return `state_dict` for an epoch of the program that is not over.

        A loader that has trained in the epoch and is exhausted is at its end, not before the next epoch. A loader that
        is being iterated and has not trained is at its beginning: an evaluation is repeated as a whole. An order that
        it has drawn is drawn again, with the random numbers that are saved then, which are those of before.

        Args:
            since: The number of passes that this loader had made when the epoch began.
            unseen: As for `state_dict`.
        """
        progress, this = self._progress, self._progress.current
        if this is not None and not self.accumulation.clock.done > this.steps:
            begun = this.position
            return (begun if begun.goes_on or begun.batches else begun.not_begun()).state_dict()
        if this is not None:
            return {**self.state_dict(unseen), "is_named": True}
        has_ended = progress.ended is not None and progress.ended[1] > since
        return {**progress.ended[0], "is_named": True} if progress.ended and has_ended else self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration at the position that `state_dict` describes. Every rank calls it.

        Samples that were yielded before are not read again if the dataset has indices. A stream continues from the
        state of its dataset. If the dataset has no `state_dict` and `load_state_dict`, or the loader has worker
        processes, the stream is read again up to the position. The end of an epoch is the beginning of the next one:
        the next iteration is whole, unless the program names the epoch that is over, by `set_epoch`. Random numbers
        that worker processes draw start again.

        Args:
            state: What `state_dict` returned.

        Example:
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
        if position.batches and self._is_all(position.batches):  # in another number of ranks nothing may be left
            position = replace(position, is_over=True)
        is_begun = position.is_begun
        if not self.world.is_main_process:
            position = replace(position, order={})  # rank 0's: worker processes of all ranks would draw alike
        if position.seed is not None and self._source.seed is not None:
            self._source.seed = position.seed
        if not (is_begun or position.is_over):
            self._source.draw_from(position.order)
        progress = self._progress
        progress.enter_epoch(position.epoch)
        progress.resume, progress.over = position if is_begun or position.is_over else None, None
        if position.is_over and not position.is_named:
            self._pass_over(position)

    def _pass_over(self, position: LoaderPosition) -> None:
        """Make the next iteration the first one after the epoch of `position`, which is over."""
        progress = self._progress
        progress.enter_epoch(position.epoch + 1)
        progress.resume, progress.over = None, position

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint, or with a whole epoch if this loader has trained.

        A program that has trained past a checkpoint and loads it goes back to better weights, and then trains for
        epochs. Its next iteration is the epoch of the checkpoint from its first batch, in the order that it had, or the
        one after it if that was over. `load_state_dict` continues at the position all the same. Every rank calls it.

        Args:
            state: What `state_dict` returned.

        Example:
            >>> from nbaccel import Accelerator
            >>> loader = Accelerator().prepare(DataLoader(range(8), 2))
            >>> for batch in loader:  # no step: it has not trained
            ...     state = loader.state_dict()
            ...     break
            >>> loader.restore(state)
            >>> [batch.tolist() for batch in loader]
            [[2, 3], [4, 5], [6, 7]]
        """
        progress, steps = self._progress, self.accumulation.clock.done
        has_trained = progress.has_trained or any(steps > each.steps for each in progress.open)
        self.load_state_dict(state)
        position = progress.resume
        if position is None or not has_trained:
            return
        if position.is_over:
            self._pass_over(position)
            return
        progress.resume = replace(position, batches=0, dataset=None, witness=[])
        done = position.batches // self._source.stride
        if done and self.world.is_main_process:
            warn_user(
                f"load_state: {self._name()} was {done} batches into epoch {position.epoch} (0-based) when this "
                "checkpoint was saved, and it has trained in this process since it was prepared. So the next loop over "
                "it is that epoch from its first batch, in the same order. To leave out what the checkpoint has "
                f"trained on: accelerator.skip_first_batches(loader, {done})"
            )

    @property
    def goes_on_at(self) -> tuple[int, int, int | None]:
        """The epoch of the next iteration, from 0; this rank's batches of it that are done; and how many it has."""
        resume = self._progress.resume
        batches = 0 if resume is None else resume.batches
        done, lengths = batches // self._source.stride, self._source.lengths(batches)
        return self.iteration, done, None if lengths is None else done + self._own(lengths)

    @property
    def is_joined(self) -> bool:
        """True if uneven lengths are handled; see `Accelerator.join_uneven_inputs`."""
        return self._progress.is_joined

    @contextmanager
    def joined(self, even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks run out of batches one after the other, inside this block.

        Args:
            even_batches: Replaces this choice inside the block; None keeps it.
        """
        even, was_joined = self.even_batches, self._progress.is_joined
        self._progress.is_joined = True
        if even_batches is not None:
            self.even_batches = even_batches
        try:
            yield
        finally:
            self.even_batches, self._progress.is_joined = even, was_joined

    def without_first(self, batches: int) -> PreparedLoader:
        """Return this loader without this rank's first batches, in every iteration.

        Both loaders count epochs together. A position that `load_state_dict` has set is dropped; the order of that
        epoch stays. After one at the end of an epoch these are batches of the next one, or of that one if it is all.

        Args:
            batches: The number of batches to leave out.
        """
        if batches < 0:
            raise ValueError(f"num_batches must be at least 0, got {batches}")
        rest = copy.copy(self)
        rest._skip = self._skip + batches
        rest._origin = self if self._origin is None else self._origin
        progress = self._progress
        if progress.over is not None and self._is_all(rest._skip * self._source.stride):
            self.set_epoch(progress.over.epoch)
        rest._resumed, progress.resume = progress.resume, None
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
    def rank_samples(self) -> int | None:
        """Samples of this rank's current batch; None where that is not known."""
        return self._source.last_samples(self.rank_batch_size) if self.end_of_dataloader else self.rank_batch_size

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
        """Return the batches of each rank in an epoch, one number if all have equally many; None if unknown."""
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
            ValueError: The numbers differ.
        """
        lengths = self.lengths()
        if lengths is not None and len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks see different numbers of batches ({counted(lengths)}), so a gather in each of them would "
                f"keep rank {lengths.index(max(lengths))} waiting in its last one. Prepare this loader with "
                "even_batches=True (gather_for_metrics leaves the repeated samples out), or gather once after the "
                "loop, as objects."
            )
