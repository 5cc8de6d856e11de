"""Train an unmodified loop on all ranks: its gradients are averaged, and its batches split. Runs in ranks.

`setup_rank` makes an ``RawLoopTraining`` in a world larger than one. It decides by what a program does: a backward
that adds gradients to parameters trains, and its batches are split from then on; a pass without one stays whole. As
soon as the program prepares by itself, the loop is left unmodified. `Notices` print once, before the first step and by
rank 0, how the loop is changed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.events import LoopKind, Loss, TrainingMode, emit
from nbaccel.base.quantities import short_count
from nbaccel.base.settings import FIRST, SPLIT, STATES, RunSettings
from nbaccel.base.world import World
from nbaccel.errors import CannotCut, NotPrepared, RunStopped
from nbaccel.train.checkpoint.serialization import pack, unpack
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.raw_loop.averaging import Averaging
from nbaccel.train.raw_loop.batch_parts import Split, Turn
from nbaccel.train.raw_loop.batch_splitter import BatchSplitter
from nbaccel.train.raw_loop.batch_values import BatchWatch
from nbaccel.train.raw_loop.deferred_calls import DeferredCalls, StepCounter
from nbaccel.train.raw_loop.graph import leave_scalers, watch_scalers
from nbaccel.train.raw_loop.hooks import Hooks
from nbaccel.train.raw_loop.last_batch import LastBatch
from nbaccel.train.raw_loop.loader_pass import Place
from nbaccel.train.raw_loop.part_numbers import PartNumbers
from nbaccel.train.raw_loop.rank_streams import Seeds, idle_gpu
from nbaccel.train.raw_loop.trained_tensors import Model
from nbaccel.train.step.raw_loop_hooks import (
    count_steps_by,
    forget,
    hold_loop_state,
    when_beginning_anew,
    when_stepping_back,
)

if TYPE_CHECKING:
    from nbaccel.train.raw_loop.changes_by_flags import LoopChange

__all__ = [
    "Notices",
    "RawLoopTraining",
]

_OF_SHAPES = (RuntimeError, ValueError, IndexError, AssertionError)
"""Errors that a number of samples may cause; some of them only with a text that mentions shapes."""

_SHAPES = re.compile(r"size|shape|dimension|broadcast|mismatch|unpack|expected", re.IGNORECASE)

_OURS = (CannotCut, NotPrepared, RunStopped)
"""Errors that explain the cause themselves."""

_MOST_MODELS = 4
"""That are named; a search over parameters trains hundreds."""

_OF_GRADIENTS = (TypeError, AttributeError, RuntimeError, AssertionError)
"""Errors that a gradient which is None may cause."""


class RawLoopTraining:
    """Keeps one training equal in all ranks, with one object per rank; a launcher calls it around a task.

    world: this rank's.  settings: `batches`, "split" or "each", and `split`, the parts of a batch, are used.
    changes: what flags change of the loop, the outermost first.

    Raises:
        NotPrepared: from within a backward, in all ranks: they do not train one model any more.
    """

    def __init__(self, world: World, settings: RunSettings, changes: Sequence[LoopChange] = ()) -> None:
        self._world = world
        self._mode = settings.batches or SPLIT
        self._notices = Notices(world)
        self._parts = settings.split or 1
        self._draws_alike = bool(settings.seeds_alike)
        self._seeds = Seeds.now()
        self._order_seed = None if settings.seeds_alike else settings.seed  # otherwise ranks are seeded differently
        watch = BatchWatch(is_trained=lambda tensor: self._averaging.models.number(tensor) is not None)
        self._steps = StepCounter(lambda: self._passes.batches)
        self._passes = BatchSplitter(world.rank, world.world_size, self, self._notices, self._steps, watch)
        self._deferred = DeferredCalls(self._steps.choices)
        self._averaging = Averaging(world, self._passes, self._steps, self._deferred, watch, self, self._notices)
        self._is_armed = False
        self.fails_on_parts = ""  # the task has failed on parts of batches, see `TaskWatch`
        self._has_trained_on_parts = False
        self._hooks = Hooks(
            self._averaging.run,
            self._before_step,
            self._after_step,
            changes,
            on_given=lambda given: self._averaging.models.note_given(given, self._passes.batches),
            is_alike=lambda tensor: self._averaging.models.number(tensor) is not None,
        )
        self._changes = changes
        for change in changes:
            change.attach(self)
        self._last_batch = LastBatch(None)

    # -- the task

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task: its backwards are averaged from now on.  namespace: its globals, if it is a cell."""
        self._disarm()
        self._averaging.begin()
        self._steps.begin()
        self._notices.begin(namespace)
        self._last_batch = LastBatch(namespace)
        self._passes.install()
        self._passes.begin(self._mode, self._parts, self._order_seed)
        self._order_seed = None  # persistent ranks continue with common numbers
        self.fails_on_parts, self._has_trained_on_parts = "", False
        self._deferred.begin()
        watch_scalers(self._defers, self._changes)
        self._hooks.install()
        self._is_armed = True
        self._seeds = Seeds.now()
        when_stepping_back(self.step_back)
        when_beginning_anew(self._begin_anew)
        count_steps_by(lambda: self._steps.under_way)
        hold_loop_state("loop", self)

    def end(self) -> None:
        """End a task whose program is over: make the ranks end with equal weights.

        Raises:
            NotPrepared: the ranks trained different models.
        """
        if not self._is_armed:
            return
        try:
            self._passes.refuse_passed_over()
            self._passes.say_left_early(is_end=True)
            taken = self._averaging.answer_until_all_are_done()
            if taken:
                self._finish(taken)
                self._last_batch.join(self.collectives().gather_objects)
                if self._passes.batches and not self.has_split and not self._passes.is_shared_out:
                    self._notices.note_same_work(is_stepped=any(taken))
        finally:
            self._leave()

    def stop(self) -> None:
        """End a task that ended in another way. Waits for no rank, and never raises."""
        with suppress(Exception):
            error = sys.exc_info()[1]
            if self._deferred.is_used and isinstance(error, _OF_GRADIENTS) and not isinstance(error, _OURS):
                error.add_note(self._deferred.explain())
            is_of_parts = self.has_split and (_is_of_shapes(error) or getattr(error, "is_of_parts", False))
            if is_of_parts and self._parts == 1:
                has_states = getattr(error, "is_of_states", False)
                self.fails_on_parts = STATES if has_states else "" if self._has_trained_on_parts else FIRST
            if error is not None and self.has_split and _is_of_shapes(error):
                error.add_note(
                    "The loop prepares nothing, so each rank has a part of every batch: code that counts on batches of "
                    "a fixed size has to ask len(x). %%accelerate --batches each gives ranks whole batches."
                )
            self._leave()

    def keeps(self, tensors: Sequence[Any]) -> bool:
        """Return whether this training keeps all of `tensors` equal in all ranks."""
        models = self._averaging.models
        if not self._is_armed:
            return False
        return models.knows(tensors) or (self._passes.batches > 0 and models.has_met(tensors))

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        """Return whether the program made `tensors` for one batch, so that ranks rightly have different ones."""
        return self._passes.batches > 0 and self._averaging.models.is_of_batch(tensors)

    def note_wrapper(self) -> None:
        """Give ranks random numbers of their own: the program, or a library below it, shares a model out itself.

        Only its names tell that of a cell beforehand, and those of a library do not. Ranks that draw their samples
        would otherwise train on the same ones, and nothing would show it.
        """
        if not self._is_armed:
            return
        self._passes.note_wrapper()
        if self._draws_alike and not self._averaging.meetings:
            self._seeds.draw_apart(self._world.rank)

    @property
    def is_at_work(self) -> bool:
        """True if it has trained something in this task."""
        return self._averaging.meetings > 0

    @property
    def has_split(self) -> bool:
        """True if batches were split in this task."""
        return self._passes.has_split

    def explain(self) -> str:
        """Return why it does not keep equal what ranks train separately; empty if there is no reason."""
        return self._notices.explain()

    # -- its state, see `LoopState`

    def window_is_open(self) -> bool:
        """Return whether other parts of the present batch follow."""
        return self._deferred.is_on

    def batches_are_parts(self) -> bool:
        return self.has_split

    def state(self) -> dict[str, Any]:
        passes, losses = self._passes.state(), self._averaging.losses.known()
        return {
            "steps": self._steps.done,
            "epochs": pack(self._passes.gauges.state()).structure,
            "shared": pack({"passes": passes, "losses": losses}).structure,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._steps.go_on_at(state["steps"])
        self._passes.gauges.count_from_here()
        self._passes.gauges.restore(unpack(state["epochs"], {}))
        if "shared" in state:
            shared = unpack(state["shared"], {})
            self._passes.restore(shared["passes"])
            self._averaging.losses.learn(shared["losses"])

    # -- parts of it

    def is_training(self) -> bool:
        return self._averaging.models.is_training()

    def are_lazy(self) -> bool:
        return self._hooks.are_lazy()

    def batch_norms(self) -> Sequence[str]:
        return self._averaging.models.batch_norms()

    def next_turn(self, turn: Turn | None) -> None:
        self._deferred.next_turn(turn)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._averaging.is_inside:
            raise NotPrepared(
                f"{self._world.place}: {type(optimizer).__name__} steps inside of "
                "loss.backward(), before the ranks' gradients are added up. Step after it, or use --strict and prepare."
            )
        if not self._defers(optimizer, kwargs.get("closure", args[1] if len(args) > 1 else None)):
            self._steps.note(optimizer)

    def _defers(self, optimizer: Any, closure: Any = None) -> bool:
        """Return whether a step waits for its batch's last part; without `optimizer`, whether that part is to come."""
        if optimizer is None or not self._is_armed:
            return self._is_armed and self._deferred.is_on
        self._steps.meet(optimizer)
        return self._deferred.withholds_step(closure)

    def _after_step(self, *_: Any) -> None:
        if not self._deferred.is_on:
            self._steps.end_step()

    # -- for changes, see `WatchedLoop`

    def say(self, text: str) -> None:
        self._notices.say(text)

    def place(self) -> Place | None:
        return self._passes.place()

    def is_partial(self) -> bool:
        return self._deferred.is_on

    def is_averaged(self) -> bool:
        return True

    def is_shared_out(self, parameters: list[Tensor]) -> bool:
        return self._averaging.models.are_kept_together(parameters)

    def note_call(self, optimizer: Optimizer) -> None:
        self._defers(optimizer)

    # -- for the averaging, see `AveragedTraining`

    def collectives(self) -> Collectives:
        return process_group.talk or PartialState().collectives

    def note_models(self) -> None:
        self._notices.note_models(self._averaging.models.models)
        self._passes.report_anew()
        emit(TrainingMode(LoopKind.UNMODIFIED, is_split=self.has_split))

    def note_trained(self, loss: float | Tensor | None) -> None:
        """Report a backward that was averaged."""
        self._has_trained_on_parts |= self.has_split
        self._last_batch.note(self._passes.handed)
        if loss is not None:
            emit(Loss(loss, self._steps.count))
        if not self._passes.batches:
            self._passes.note_no_loader()
            self._notices.note_no_loader()

    def note_alone(self, loss: float | Tensor | None) -> None:
        """Report a backward that was not."""
        if loss is not None:
            emit(Loss(loss, self._steps.count))

    def _finish(self, taken: Sequence[float]) -> None:
        """Make all ranks end with the same weights.  taken: the optimizer steps of each."""
        self._averaging.take_in_what_was_made_since()
        if len(set(taken)) > 1:
            self._notices.note_uneven(taken)
            self._averaging.broadcast(taken.index(max(taken)))
            return
        parameters, buffers = self._averaging.what_differs()
        if parameters:
            self._notices.note_differing()
        self._averaging.broadcast(0, [*parameters, *buffers])

    def _begin_anew(self) -> None:
        """Begin another attempt of the program: ranks may have failed at different places."""
        if self._is_armed:
            self._averaging.begin()
            self._passes.begin(self._mode, self._parts)
            self._deferred.begin()
            self._steps.begin_anew()
            self._hooks.begin_anew()

    def step_back(self) -> None:
        """Leave the loop unmodified, since the program prepares by itself."""
        self._passes.step_back()
        self._disarm()

    def _leave(self) -> None:
        self._steps.end_step()
        self._passes.end()
        self._disarm()

    def _disarm(self) -> None:
        self._is_armed = False
        count_steps_by(None)
        hold_loop_state("loop", None)
        self._hooks.remove()
        leave_scalers()
        self._deferred.begin()
        self._averaging.rest()
        forget(self.step_back)


def _is_of_shapes(error: BaseException | None) -> bool:
    """Return whether a number of samples may have caused `error`."""
    is_known = isinstance(error, _OF_SHAPES) and not isinstance(error, _OURS)
    return is_known and (isinstance(error, (IndexError, AssertionError)) or bool(_SHAPES.search(str(error))))


class Notices:
    """Collects facts about a task's loop, and prints them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.begin(None)

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task.  namespace: the cell's names."""
        self._namespace = namespace or {}
        self._said: set[str] = set()
        self._is_told = False  # how the batches are shared
        self._models = ""
        self._has_batch_norm = False
        self._whole = ""
        self._numbers = PartNumbers()

    def note_models(self, models: Sequence[Model]) -> None:
        """Note the models that are averaged from now on."""
        named = Counter(f"{self._name_of(model)} ({short_count(model.parameters)})" for model in models)
        texts = [text if count == 1 else f"{count} x {text}" for text, count in named.items()]
        more = [f"{len(texts) - _MOST_MODELS} more"] if len(texts) > _MOST_MODELS else []
        self._models = f"gradients of {' and '.join([*texts[:_MOST_MODELS], *more])} averaged"
        self._has_batch_norm = any(model.has_batch_norm for model in models)
        if line := idle_gpu(model.device for model in models):
            self.say(line)

    def note_split(self, split: Split) -> None:
        """Print the decision on a loader's batches."""
        self._is_told = True
        ranks = self._world.world_size
        if not split.is_split:
            self._whole = split.why
            self.say(
                f"{split.name}: whole in each of {ranks} ranks, the same work: {split.why}. -n 1 does it once; "
                "--batches each gives each rank batches of its own"
            )
            return
        emit(TrainingMode(LoopKind.UNMODIFIED, is_split=True))
        batches = "its batches" if split.batches is None else f"{split.batches:,} batches"
        text = f"{split.name}: {split.why or f'each of {batches} split over {ranks} ranks'}"
        for more in (split.remark, self._models):
            text += f"; {more}" if more else ""
        self.say(text)
        for line in self._numbers.lines(ranks, split.is_own):
            self.say(line)
        if self._has_batch_norm:
            self.say(
                "batch norm sees a part of each batch; torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) sees all"
            )

    def decision(self, batch_size: int | None) -> str:
        return self._numbers.decision(self._world.world_size, batch_size)

    def note_uneven(self, taken: Sequence[float]) -> None:
        said = ", ".join(f"rank {rank} {count:g}" for rank, count in enumerate(taken))
        self.say(f"the ranks have taken different numbers of steps ({said}); all have the weights of the longest now")

    def note_differing(self) -> None:
        self.say(
            "the ranks' weights differed at the end: something changes them that is drawn or decided in each rank; "
            "all have rank 0's now"
        )

    def note_parts_shown(self) -> None:
        """Print that a loss whose terms count differently keeps the value that it has here."""
        self.say("the loss has terms that count differently in parts of a batch: what is shown of it is rank 0's part")

    def note_buffers(self, names: str) -> None:
        """Print that a forward has left other values in a buffer than in other ranks."""
        self.say(
            f"{names}: a forward changes it by what its batch is, and it is the ranks' average now: right for a mean "
            "over samples, not for a count or a sum. --batches each or -n 1 where that matters"
        )

    def note_drawn(self) -> None:
        """Print that the loop draws from NumPy or Python's random while it has a part of a batch."""
        self.say(
            "what the loop draws from NumPy or random is the same in all ranks: right for decisions; noise for its "
            "samples is that of each other rank's samples, too. torch's numbers differ between ranks"
        )

    def note_other_leaves(self) -> None:
        """Print that the parts of a batch have trained different parameters."""
        self.say(
            "the parts of a batch have trained different parameters: right where their samples choose them, and wrong "
            "where the loop does by counting its rounds, of which each batch has several now"
        )

    def note_lengths(self) -> None:
        """Print that sizes below the loss differ between ranks, beside those of the batch."""
        self.say(
            "sizes below the loss differ between ranks, by what their samples are, as where a model pads to the "
            "longest of its part (pad_packed_sequence without total_length): right where padding is masked or ignored. "
            "--batches each or -n 1 where that matters"
        )

    def note_compiled(self) -> None:
        """Print that parts of a batch went through a compiled model."""
        self.say(
            "a compiled model cannot be looked into: where it computes with its batch as a whole (a mean over it, "
            "samples beside each other), it has a part of it. --batches each gives ranks whole batches"
        )

    def note_no_loader(self) -> None:
        """Print that the loop trained without a loader."""
        self._is_told = True
        self.say(
            f"no loader hands out batches: each of {self._world.world_size} ranks does all steps, the same work unless "
            "it draws its data at random. -n 1 does it once"
        )

    def note_same_work(self, is_stepped: bool) -> None:
        """Print, at the end of a task, that no batch was split.  is_stepped: an optimizer has stepped."""
        if not self._is_told:
            why = "" if is_stepped else ": it computes gradients, and trains nothing"
            self.say(f"each of {self._world.world_size} ranks has done all of this loop's work{why}. -n 1 does it once")

    def explain(self) -> str:
        return self._whole

    def say(self, text: str) -> None:
        """Print a line, once in a task and by rank 0."""
        if text not in self._said:
            self._said.add(text)
            if self._world.is_main_process:
                sys.stdout.write(f"nbaccel: {text}\n")
                sys.stdout.flush()

    def _name_of(self, model: Model) -> str:
        root = None if model.root_of is None else model.root_of()
        if root is None:
            return model.name
        names = (name for name, value in self._namespace.items() if value is root and not name.startswith("_"))
        return next(names, model.name)
