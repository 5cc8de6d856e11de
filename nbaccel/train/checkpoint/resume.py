"""Resuming: the user's methods for a program that continues after its session ended. Runs in ranks.

With ``resume`` the state is restored automatically, once everything that the checkpoint holds is prepared; `epochs`
and `remember` restore the position and the values of the program.

Weakly: a method reference that does not keep its object alive. Runs in ranks and scripts.

A part that calls back into the Accelerator which owns it would make a reference cycle: a dropped Accelerator would
keep its models, and the worker processes of its loaders, until the next garbage collection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakMethod

from nbaccel.errors import CannotResume
from nbaccel.events import SavesItself, emit
from nbaccel.train.checkpoint.autosave import Autosave, CheckpointPolicy, Deadline
from nbaccel.train.checkpoint.content import HeldContent
from nbaccel.train.checkpoint.directory import FoundCheckpoint
from nbaccel.train.checkpoint.manager import Checkpointing
from nbaccel.train.checkpoint.rng_files import State, read
from nbaccel.train.checkpoint.training_state import Epochs, Remembered
from nbaccel.train.prepare.equipment import Equipment
from nbaccel.train.step.accumulation import Saver

__all__ = [
    "Resuming",
    "Weakly",
]

_TWO_LINES = """    for epoch in accelerator.epochs(n):              # instead of: for epoch in range(n):
    memory = accelerator.remember(best=..., history=[])   # for values that are kept from epoch to epoch"""


class Resuming(Checkpointing):
    """`epochs`, `remember`, and the effects of `checkpoint_every` and `resume`."""

    _equipment: Equipment
    _epochs: Epochs
    _remembered: Remembered
    _limit_s: float | None
    """The program's own time limit, in seconds."""
    _autosave: Autosave
    _pending: Path | None
    """The path to resume from, until that is done."""
    _choice: FoundCheckpoint | None
    """The checkpoint at that path, on which all ranks agreed at the first `prepare`."""
    _resumed: FoundCheckpoint | None

    @abstractmethod
    def _bind(self) -> None:
        """Bind to the world of this process, if not done yet."""

    def epochs(self, count: int) -> Iterator[int]:
        """Yield ``range(count)`` for epochs; after a resume begin at the epoch that was in progress. On every rank.

        Its training loader continues where it was, so the loop is written as if nothing had happened. An epoch is done
        when its training loader is exhausted and no loader is being iterated: a checkpoint that is written then
        resumes at the next one. What follows the training in an epoch (an evaluation) is repeated if it was not over.

        >>> from nbaccel import Accelerator
        >>> list(Accelerator().epochs(3))
        [0, 1, 2]
        """
        self._bind()
        return self._epochs.run(count, self._equipment.accumulation)

    def remember(self, **defaults: Any) -> Remembered:
        """Keep values of the program's own in checkpoints too; return them as attributes. Every rank calls it.

        A value that a loaded checkpoint has, or an earlier call gave, stays; the checkpoint is that of rank 0. Plain
        data and tensors: anything else becomes a pickle, as with `register_for_checkpointing`.

        >>> from nbaccel import Accelerator
        >>> memory = Accelerator().remember(best=0.0, history=[])
        >>> memory.best = max(memory.best, 0.9)
        >>> memory.history.append(0.9)
        """
        self._remembered.keep(**defaults)
        return self._remembered

    # -- automatic saves

    def _plan_saves(self) -> None:
        """Save and resume as chosen for this process's world."""
        policy = CheckpointPolicy.of(self._equipment.settings)
        self._autosave = Autosave(policy, self.world, Weakly(self._save_by_itself), Weakly(self._random_states))
        self._autosave.timeline.begin(self._shelf.lineage)
        saver: Saver | None = self._autosave if policy.every is not None else None
        if self._limit_s is not None:
            saver = Deadline(self._limit_s, self.world, saver or Saver())
        self._equipment.accumulation.clock.saver = saver
        self._pending, self._choice, self._resumed = policy.resume, None, None
        if policy.every is not None:
            emit(SavesItself())

    def _save_by_itself(self, target: Path, blocking: bool) -> None:
        blocking = blocking or bool(self._registered.save_hooks)  # hooks look at the present models
        timeline = self._autosave.timeline
        self._tell(timeline, target)
        self._save(target, self._training().stamp("by itself"), blocking, timeline)

    @property
    def _saves_itself(self) -> bool:
        return CheckpointPolicy.of(self._equipment.settings).every is not None

    def _random_states(self) -> State:
        return read(self.device)

    def _resume_if_complete(self) -> None:
        """Continue, after a `prepare`, once everything that the checkpoint holds is prepared. Collective."""
        if self._pending is None:
            return
        place = self._pending
        choice = self._choice = self._choice or self._from_main(lambda: self._find(place))
        if choice is None:
            self._pending = None
            self.print(f"nothing to resume in {place} yet: the training starts at its beginning")
            return
        if HeldContent.in_checkpoint(choice.folder, choice.manifest) != self._holdings():
            return
        self._pending = self._choice = None
        self._load(choice, trust=False, was_chosen=True)
        self._resumed = choice
        self._autosave.resumed(self._training().step)

    def _find(self, place: Path) -> FoundCheckpoint | None:
        try:
            return self._autosave.timeline.choose_from(place)
        except FileNotFoundError:
            if place != self._autosave.timeline.folder:
                raise
            return None  # the first session of a program that is always started with --resume

    def _holdings(self) -> HeldContent:
        prepared = self._equipment.prepared
        return HeldContent(
            len(prepared.models),
            len(prepared.optimizers),
            len(prepared.schedulers),
            len(self._registered.objects),
            len(prepared.loaders),
        )

    def _refuse_half_a_resume(self) -> None:
        """Refuse an incomplete resume before the first step. No collective: all ranks know the checkpoint.

        Raises:
            CannotResume: the prepared objects differ from the checkpoint's, or the epochs start from the beginning.
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
        if resumed is not None and self._epochs.under_way > 0 and not self._epochs.is_used:
            raise CannotResume(
                f"the training continues in epoch {self._epochs.under_way + 1}, and this loop over epochs begins at "
                f"the first. Two lines make the program resumable:\n{_TWO_LINES}"
            )


_P = ParamSpec("_P")
_T = TypeVar("_T")


class Weakly(Generic[_P, _T]):
    """A callable `method` that works while its object exists. It can be pickled if the method can.

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
