"""Save a training automatically at step boundaries, and end it at a time limit. Runs in ranks; no collective.

A `CheckpointPolicy` holds the user's choices, a `Schedule` decides before which steps to save, and `Autosave` under
which name. The Accelerator writes and reads checkpoints, and passes in the two functions for that. All ranks must save
at the same steps without waiting for each other, because each adds its own random states to a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nbaccel.base.events import SaveAsked, SaveDue, SavingAtStop, TimeLimit, emit
from nbaccel.base.quantities import Period, Steps, duration, parse_interval
from nbaccel.base.settings import CHECKPOINT_DIR, RunSettings
from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.errors import RunStopped
from nbaccel.train.checkpoint.directory import Timeline
from nbaccel.train.checkpoint.generators import State
from nbaccel.train.step.accumulation import Saver

__all__ = [
    "Autosave",
    "CheckpointPolicy",
    "Deadline",
    "Schedule",
    "chosen_saves",
    "may_announce",
    "schedule",
]

Save = Callable[[Path, bool], None]


class Autosave(Saver):
    """Saves at a step boundary, when a checkpoint is due.

    Args:
        save: Writes the training to a folder, waiting for the disk or not.
        keep: Returns this process's random states.
    """

    def __init__(self, policy: CheckpointPolicy, world: World, save: Save, keep: Callable[[], State]) -> None:
        self.autosave_directory = Timeline(policy.folder, policy.keep)
        self._schedule: Schedule | None = None if policy.every is None else schedule(policy.every, world)
        self._save = save
        self._keep = keep
        self._saved_step = 0

    def enter(self, step: int, may_save: bool) -> None:
        if may_save and self._schedule is not None and self._schedule.is_due(step):
            self._saved_step = step
            self._save(self.autosave_directory.folder_for(step), False)

    def keep(self) -> State:
        return self._keep()

    def stop(self, step: int) -> Path | None:
        """Save what was trained since the last checkpoint, since the session ends or the user ends the run."""
        if self._schedule is None:
            return None
        if step > self._saved_step:
            self._saved_step = step
            emit(SavingAtStop())
            try:
                self._save(self.autosave_directory.folder_for(step), True)
            finally:
                emit(SavingAtStop(is_over=True))
        return self.autosave_directory.folder

    def resumed(self, step: int) -> None:
        """Note that the training continues from a checkpoint of `step`."""
        self._saved_step = step


class Schedule(Protocol):
    """Decides when to save.

    All ranks must give the same answer without waiting for each other. For step counts they do. For times rank 0
    decides and tells the others one step ahead: none of them can be further than inside the step that rank 0 is about
    to enter, since its gradients need rank 0's.
    """

    def is_due(self, step: int) -> bool:
        """Return whether to save before an optimizer step. Called once per step, with rising numbers.

        Args:
            step: The number of the step.
        """


def schedule(every: Steps | Period, world: World) -> Schedule:
    """Return the schedule of one rank."""
    if isinstance(every, Steps):
        return _EverySteps(every.count)
    if not world.is_distributed:
        return _Alone(every.seconds)
    return _Leading(every.seconds) if world.is_main_process else _Following()


def may_announce() -> bool:
    """Return whether somebody passes on what rank 0 announces: a launcher of ours. Called in rank 0, before a step."""
    answers: list[bool] = []
    emit(SaveDue(0))  # no step has that number
    emit(SaveAsked(0, lambda: answers.append(True)))
    return bool(answers)


class _EverySteps:
    """Saves at each multiple of `steps` optimizer steps, or at the next allowed boundary: not between epochs."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._asked: int | None = None

    def is_due(self, step: int) -> bool:
        before = step - 1 if self._asked is None else self._asked
        self._asked = step
        return step // self._steps > before // self._steps


class _Alone:
    """Saves as soon as the time is over, in one process."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def is_due(self, step: int) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class _Leading(_Alone):
    """Schedule of rank 0: announces the next step when the time is over, and saves before it.

    It is not asked about every step: where an epoch has two steps, about every second one. So it saves before the first
    step that it is asked about from the announced one on, as the other ranks do. A launcher may choose a later one.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._announced: int | None = None
        self._following = _Following()
        self._is_chosen = False

    def is_due(self, step: int) -> bool:
        if self._announced is None:
            if super().is_due(step):
                self._announced = step + 1
                emit(SaveDue(self._announced, self._choose))
            return False
        if not (self._following.is_due(step) if self._is_chosen else step >= self._announced):
            return False
        self._announced = None
        return True

    def _choose(self) -> None:
        self._is_chosen = True


class _Following:
    """Schedule of the other ranks: saves at the step that rank 0 has announced.

    Without a launcher nothing transmits the announcement: rank 0 then saves alone, and the random states of the others
    are derived at load.
    """

    def __init__(self) -> None:
        self._is_due = False

    def is_due(self, step: int) -> bool:
        self._is_due = False
        emit(SaveAsked(step, self._learn))
        return self._is_due

    def _learn(self) -> None:
        self._is_due = True


_KEPT = 3


@frozen
class CheckpointPolicy:
    """The user's choices; by default nothing is saved automatically.

    Args:
        every: When to save.
        folder: Where checkpoints go.
        keep: How many of them.
        resume: The checkpoint, or the folder of checkpoints, to continue from; None to start from the beginning.

    Example:
        >>> CheckpointPolicy.of(RunSettings(checkpoint_every="10min")).keep
        3
    """

    every: Steps | Period | None
    folder: Path
    keep: int
    resume: Path | None

    @classmethod
    def of(cls, settings: RunSettings) -> CheckpointPolicy:
        """Return the policy that `settings` describe.

        Raises:
            ValueError: A value is not valid.
        """
        folder = Path(settings.checkpoint_dir or CHECKPOINT_DIR).expanduser()
        keep = _KEPT if settings.keep is None else settings.keep
        if keep < 1:
            raise ValueError(f"keep must be at least 1 (checkpoints to keep), got {keep}")
        every = None if settings.checkpoint_every is None else parse_interval(settings.checkpoint_every)
        resume = None if settings.resume is None else Path(settings.resume or folder).expanduser()
        return cls(every, folder, keep, resume)


def chosen_saves(
    checkpoint_every: str | int | None,
    checkpoint_dir: str | os.PathLike[str] | None,
    keep: int | None,
    resume: bool | str | os.PathLike[str] | None,
) -> RunSettings:
    """Return these arguments of `Accelerator` as settings."""
    return RunSettings(
        checkpoint_every=None if checkpoint_every is None else str(checkpoint_every),
        checkpoint_dir=None if checkpoint_dir is None else os.fspath(checkpoint_dir),
        keep=keep,
        resume=None if resume is None or resume is False else "" if resume is True else os.fspath(resume),
    )


class Deadline(Saver):
    """A `Saver` that ends the run once the time is over, and delegates everything else to the `saver` before it.

    A program sets the limit itself, ``Accelerator(time_limit="11h30m")``. A launcher that receives it ends the run in
    time, as by a limit of its own: all ranks leave before the same step. Without a launcher a process that is alone
    leaves by itself, at its first step boundary after the limit. Several processes that nothing could stop at the same
    step are refused before they begin.

    Args:
        seconds: From now.
        saver: Saves the training, also when the run is stopped; the base does nothing.

    Raises:
        ValueError: Several processes, and no launcher that could stop them.
    """

    def __init__(self, seconds: float, world: World, saver: Saver) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds
        self._saver = saver
        if not self._is_seen_to() and world.is_distributed:
            raise ValueError(
                f"time_limit: nobody could stop these {world.world_size} ranks before the same step, since torchrun "
                "(or whoever started them) does not listen. Leave time_limit out and end the loop after so many "
                "steps, or start them from a notebook's cell or by the function nbaccel.launch."
            )

    def enter(self, step: int, may_save: bool) -> None:
        if time.monotonic() > self._at and not self._is_seen_to():
            raise RunStopped(
                f"stopped before step {step}: the time limit of {duration(self._seconds)} is over. "
                f"{self._left_by(step)}"
            )
        self._saver.enter(step, may_save)

    def keep(self) -> Any:
        return self._saver.keep()

    def stop(self, step: int) -> Path | None:
        return self._saver.stop(step)

    def _is_seen_to(self) -> bool:
        """Emit the limit and return whether a launcher takes it.

        A launcher of persistent ranks forgets earlier runs.
        """
        takers: list[bool] = []
        emit(TimeLimit(self._at, self._seconds, lambda: takers.append(True)))
        return bool(takers)

    def _left_by(self, step: int) -> str:
        folder = self._saver.stop(step)
        if folder is None:
            return "Nothing was saved: with checkpoint_every a training is, also when it is stopped."
        return f"The training is saved in {folder}: resume=True goes on from there."
