"""ResumePolicy: the part of an Accelerator by which a program continues after its session ended. Runs in ranks.

With ``resume`` the state is restored automatically, once everything that the checkpoint holds is prepared.

Weakly: a method reference that does not keep its object alive. Runs in ranks and scripts.

A part that calls back into the Accelerator which owns it would make a reference cycle: a dropped Accelerator would
keep its models, and the worker processes of its loaders, until the next garbage collection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakMethod

from nbaccel.base.events import Resumed, SavesItself, emit
from nbaccel.base.quantities import Period
from nbaccel.base.values import frozen
from nbaccel.errors import CannotResume
from nbaccel.train.checkpoint.autosave import Autosave, CheckpointPolicy, Deadline, may_announce
from nbaccel.train.checkpoint.directory import FoundCheckpoint
from nbaccel.train.checkpoint.generators import State, read
from nbaccel.train.checkpoint.manager import Checkpoints
from nbaccel.train.checkpoint.manifest import OF_A_CELL, Manifest
from nbaccel.train.prepare.training_context import TrainingContext
from nbaccel.train.step.accumulation import Saver

__all__ = [
    "ResumePolicy",
    "Weakly",
]

_TWO_LINES = """    for epoch in accelerator.epochs(n):              # instead of: for epoch in range(n):
    memory = accelerator.remember(best=..., history=[])   # for values that are kept from epoch to epoch"""


class ResumePolicy:
    """The effects of `checkpoint_every`, `time_limit` and `resume`. A part of the Accelerator.

    Args:
        limit_s: The program's own time limit.
        say: Prints on the main process of each node.
    """

    _autosave: Autosave

    def __init__(
        self, context: TrainingContext, checkpoints: Checkpoints, limit_s: float | None, say: Callable[[str], None]
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._limit_s = limit_s
        self._say = say
        self._pending: Path | None = None  # the path to resume from, until that is done
        self._choice: FoundCheckpoint | None = None  # at that path; ranks agreed on it at the first `prepare`
        self._resumed: FoundCheckpoint | None = None
        self._is_schedule_known = False

    # -- automatic saves

    def plan(self, save: Callable[[Path, bool], None]) -> None:
        """Save and resume as chosen for this process's world.

        Args:
            save: Writes the training into a folder, waiting for the disk or not; it must not keep this alive.
        """
        policy = CheckpointPolicy.of(self._context.settings)
        self._autosave = Autosave(policy, self._context.world, save, Weakly(self._random_states))
        self.begin()
        saver: Saver | None = self._autosave if policy.every is not None else None
        if self._limit_s is not None:
            saver = Deadline(self._limit_s, self._context.world, saver or Saver())
        self._context.accumulation.clock.saver = saver
        self._pending, self._choice, self._resumed = policy.resume, None, None
        self._is_schedule_known = False
        if policy.every is not None:
            from nbaccel.train.checkpoint import saving  # noqa: F401  # the last save may come when memory is short

            emit(SavesItself())

    def begin(self) -> None:
        """Save for the run that begins now, as planned."""
        self._autosave.autosave_directory.begin(self._checkpoints.directory.lineage)

    def save(self, target: Path, blocking: bool) -> None:
        """Write an automatic checkpoint into `target`."""
        blocking = blocking or bool(self._checkpoints.registered.save_hooks)  # hooks look at the present models
        autosave_directory = self._autosave.autosave_directory
        self._checkpoints.tell(autosave_directory, target)
        self._checkpoints.save(target, self._checkpoints.training().stamp("by itself"), blocking, autosave_directory)

    def _random_states(self) -> State:
        return read(self._context.device)

    def resume_if_complete(self) -> None:
        """Continue, after a `prepare`, once everything that the checkpoint holds is prepared. Collective.

        From a sharded model on ``torch.save`` writes no part of one in this process.

        Raises:
            ValueError: A sharded training is to be saved at intervals of time, and nobody tells all ranks when.
        """
        if self._checkpoints.training().is_sharded:
            from nbaccel.train.checkpoint.shards import refuse_partial_torch_save

            refuse_partial_torch_save()
            self._refuse_saves_of_one_rank()
        if self._pending is None:
            return
        place = self._pending
        choice = self._choice = self._choice or self._checkpoints.from_main("resume", lambda: self._find(place))
        if choice is None:
            self._pending = None
            self._say(f"nothing to resume in {place} yet: the training starts at its beginning")
            return
        if HeldContent.in_checkpoint(choice.folder, choice.manifest) != self._holdings():
            return
        self._pending = self._choice = None
        self._checkpoints.load(choice, trust=False, was_chosen=True)
        self._resumed = choice
        step = self._checkpoints.training().step
        self._autosave.resumed(step)
        emit(Resumed(str(choice.folder), step))

    def _refuse_saves_of_one_rank(self) -> None:
        """Refuse a schedule by which rank 0 alone would save a sharded training. Collective at its first call."""
        every = CheckpointPolicy.of(self._context.settings).every
        if self._is_schedule_known or not (isinstance(every, Period) and self._context.world.is_distributed):
            return
        self._is_schedule_known = True
        if not self._checkpoints.from_main("the intervals of checkpoints", may_announce):
            raise ValueError(
                f"checkpoint_every: a time ({every.seconds:g} s) is over on rank 0 first, and all ranks save a sharded "
                "model at the same step. Under torchrun, or whoever started these ranks, nobody tells the others: give "
                "a number of steps, checkpoint_every=500, or start them by nbaccel."
            )

    def _find(self, place: Path) -> FoundCheckpoint | None:
        try:
            found = self._autosave.autosave_directory.choose_from(place)
        except FileNotFoundError:
            if place != self._autosave.autosave_directory.folder:
                raise
            return None  # the first session of a program that is always started with --resume
        if found.manifest is not None and found.manifest.parts == [OF_A_CELL]:
            raise CannotResume(
                f"{found.folder} is a checkpoint of a loop that prepared nothing. Run that cell without prepare, name "
                "another checkpoint (--resume PATH), or leave the resume out to start anew."
            )
        return found

    def _holdings(self) -> HeldContent:
        prepared = self._context.prepared
        return HeldContent(
            len(prepared.models),
            len(prepared.optimizers),
            len(prepared.schedulers),
            len(self._checkpoints.registered.objects),
            len(prepared.loaders),
        )

    def refuse_half_a_resume(self) -> None:
        """Refuse an incomplete resume before the first step. No collective: all ranks know the checkpoint.

        Raises:
            CannotResume: The prepared objects differ from the checkpoint's, or the epochs start from the beginning.
        """
        if (choice := self._choice) is not None:
            held = HeldContent.in_checkpoint(choice.folder, choice.manifest)
            if held is None:
                raise CannotResume(
                    f"{choice.folder} was written by Accelerate and does not say what it holds. Load it yourself, once "
                    f"everything is prepared: accelerator.load_state({str(choice.folder)!r})"
                )
            raise CannotResume(
                f"{choice.folder} holds {held}; prepared and registered are {self._holdings()}. Prepare the same "
                "things before the first step, or leave out the resume to start anew."
            )
        if self._pending is not None:
            raise CannotResume(
                f"nothing was prepared that could be restored from {self._pending}: pass model, optimizer and loader "
                "through accelerator.prepare before the first step, or leave out the resume."
            )
        resumed, self._resumed = self._resumed, None
        epochs = self._checkpoints.epochs
        if resumed is not None and epochs.under_way > 0 and not epochs.is_used:
            raise CannotResume(
                f"the training continues in epoch {epochs.under_way + 1}, and this loop over epochs begins at "
                f"the first. Two lines make the program resumable:\n{_TWO_LINES}"
            )


@frozen
class HeldContent:
    """Numbers of objects of each kind in a checkpoint, or prepared and registered in a program."""

    models: int
    optimizers: int
    schedulers: int
    objects: int
    loaders: int

    @classmethod
    def in_checkpoint(cls, folder: Path, manifest: Manifest | None) -> HeldContent | None:
        """Return those of the checkpoint in `folder`, without reading weights; None for a folder of Accelerate's."""
        if manifest is None:
            return None
        from nbaccel.train.checkpoint.content import PROGRESS, read_part

        progress = read_part(folder, PROGRESS, manifest, trust=False)
        count = Counter(part.partition("_")[0] for part in manifest.parts)
        models, loaders = progress.get("models", count["model"]), len(progress.get("loaders", ()))
        return cls(models, count["optimizer"], count["scheduler"], count["custom"], loaders)

    def __str__(self) -> str:
        counts = asdict(self)
        return ", ".join(f"{count} {kind.removesuffix('s') if count == 1 else kind}" for kind, count in counts.items())


_P = ParamSpec("_P")
_T = TypeVar("_T")


class Weakly(Generic[_P, _T]):
    """A callable `method` that works while its object exists. It can be pickled if the method can.

    Example:
        >>> class Owner:
        ...     def greet(self) -> str:
        ...         return "here"
        >>> owner = Owner()
        >>> greet = Weakly(owner.greet)
        >>> greet()
        'here'
    """

    def __init__(self, method: Callable[_P, _T]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._there()(*args, **kwargs)

    def _there(self) -> Callable[_P, _T]:
        method: Callable[_P, _T] | None = self._method()
        if method is None:
            raise ReferenceError("the object that this method belongs to is gone")
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._there(),)
