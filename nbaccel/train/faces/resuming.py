"""Resuming: the user's methods for a program that goes on after its session ended. Runs in ranks.

With ``resume`` the state is restored by itself, once as much is prepared as the checkpoint holds; `epochs` and
`remember` bring the program to where it was.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbaccel.errors import CannotResume
from nbaccel.events import SavesItself, emit
from nbaccel.settings import RunSettings
from nbaccel.train.accumulation import Accumulation, Saver
from nbaccel.train.checkpoint.autosave import Autosave
from nbaccel.train.checkpoint.content import Holdings
from nbaccel.train.checkpoint.generators import State, read
from nbaccel.train.checkpoint.policy import CheckpointPolicy
from nbaccel.train.checkpoint.shelf import Choice
from nbaccel.train.deadline import Deadline
from nbaccel.train.faces.checkpointing import Checkpointing
from nbaccel.train.prepared import Prepared
from nbaccel.train.resuming import Epochs, Remembered
from nbaccel.train.weakly import Weakly

__all__ = ["Resuming"]

_TWO_LINES = """    for epoch in accelerator.epochs(n):              # instead of: for epoch in range(n):
    memory = accelerator.remember(best=..., history=[])   # for values that are kept from epoch to epoch"""


class Resuming(Checkpointing):
    """`epochs`, `remember`, and what `checkpoint_every` and `resume` do."""

    _accumulation: Accumulation
    _epochs: Epochs
    _remembered: Remembered
    _prepared: Prepared
    _settings: RunSettings
    _limit_s: float | None
    """The time limit of the program's own, in seconds."""
    _autosave: Autosave
    _pending: Path | None
    """What is to be continued from, while it is not."""
    _choice: Choice | None
    """The checkpoint there, on which all ranks agreed at the first `prepare`."""
    _resumed: Choice | None

    @abstractmethod
    def _bind(self) -> None:
        """Belong to the world of this process, if not yet."""

    def epochs(self, count: int) -> Iterator[int]:
        """``range(count)`` for epochs, which after a resume begins at the epoch that was under way. On every rank.

        Its training loader goes on where it was, so the loop is written as if nothing had happened. An epoch is done
        when its training loader went through and no loader is being iterated: a checkpoint that is written then
        resumes at the next one. What follows the training in an epoch (an evaluation) comes again if it was not over.

        >>> from nbaccel import Accelerator
        >>> list(Accelerator().epochs(3))
        [0, 1, 2]
        """
        self._bind()
        return self._epochs.run(count, self._accumulation)

    def remember(self, **defaults: Any) -> Remembered:
        """Values of the program's own that checkpoints hold too; returns them as attributes. On every rank.

        A value that a loaded checkpoint has, or an earlier call gave, stays; the checkpoint is that of rank 0. Plain
        data and tensors: anything else becomes a pickle, as with `register_for_checkpointing`.

        >>> from nbaccel import Accelerator
        >>> memory = Accelerator().remember(best=0.0, history=[])
        >>> memory.best = max(memory.best, 0.9)
        >>> memory.history.append(0.9)
        """
        self._remembered.keep(**defaults)
        return self._remembered

    # -- by itself

    def _plan_saves(self) -> None:
        """Save and resume as was chosen for this process's world."""
        policy = CheckpointPolicy.of(self._settings)
        self._autosave = Autosave(policy, self.world, Weakly(self._save_by_itself), Weakly(self._random_states))
        self._autosave.timeline.begin(self._shelf.lineage)
        saver: Saver | None = self._autosave if policy.every is not None else None
        if self._limit_s is not None:
            saver = Deadline(self._limit_s, self.world, saver or Saver())
        self._accumulation.clock.saver = saver
        self._pending, self._choice, self._resumed = policy.resume, None, None
        if policy.every is not None:
            emit(SavesItself())

    def _save_by_itself(self, target: Path, blocking: bool) -> None:
        blocking = blocking or bool(self._registered.save_hooks)  # hooks look at the models as they are now
        timeline = self._autosave.timeline
        self._tell(timeline, target)
        self._save(target, self._training().stamp("by itself"), blocking, timeline)

    @property
    def _saves_itself(self) -> bool:
        return CheckpointPolicy.of(self._settings).every is not None

    def _random_states(self) -> State:
        return read(self.device)

    def _resume_if_complete(self) -> None:
        """After each `prepare`: continue, once everything that the checkpoint holds is there. Collective."""
        if self._pending is None:
            return
        place = self._pending
        choice = self._choice = self._choice or self._from_main(lambda: self._find(place))
        if choice is None:
            self._pending = None
            self.print(f"nothing to resume in {place} yet: the training starts at its beginning")
            return
        if Holdings.in_checkpoint(choice.folder, choice.manifest) != self._holdings():
            return
        self._pending = self._choice = None
        self._load(choice, trust=False, was_chosen=True)
        self._resumed = choice
        self._autosave.resumed(self._training().step)

    def _find(self, place: Path) -> Choice | None:
        try:
            return self._autosave.timeline.choose_from(place)
        except FileNotFoundError:
            if place != self._autosave.timeline.folder:
                raise
            return None  # the first session of a program that is always started with --resume

    def _holdings(self) -> Holdings:
        prepared = self._prepared
        return Holdings(
            len(prepared.models),
            len(prepared.optimizers),
            len(prepared.schedulers),
            len(self._registered.objects),
            len(prepared.loaders),
        )

    def _refuse_half_a_resume(self) -> None:
        """Before the first step. No collective: what the checkpoint is, every rank knows since its first `prepare`.

        Raises:
            CannotResume: other things are prepared than the checkpoint holds, or the epochs begin anew.
        """
        if (choice := self._choice) is not None:
            held = Holdings.in_checkpoint(choice.folder, choice.manifest)
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
