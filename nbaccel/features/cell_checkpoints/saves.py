"""CellSaves: saves the unmodified loop of one cell in one rank, and goes on from a checkpoint. Runs in ranks.

All ranks save before the same step, by the `Schedule` of prepared loops. Rank 0 writes the names and objects, and each
rank adds its own random states; no rank waits for another. The training waits for a copy of its tensors, and a thread
writes it. A run that is stopped leaves at a boundary of its loop, where it is saved. As soon as the program prepares,
or another trainer trains, nothing here acts.

Reasons: docs/design/checkpoints.md
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base.events import LoopKind, SavesItself, SavingAtStop, TrainingMode, emit, reports
from nbaccel.base.settings import RunSettings
from nbaccel.errors import CannotResume, CannotSave, RunStopped
from nbaccel.features.cell_checkpoints import random_states
from nbaccel.features.cell_checkpoints.cell_names import CellNames
from nbaccel.features.cell_checkpoints.checkpoint_folder import CellPosition, CellSave, conditions, is_of_cell
from nbaccel.features.cell_checkpoints.continuation import Continuation
from nbaccel.features.cell_checkpoints.difference import CellDifference
from nbaccel.features.cell_checkpoints.frame_position import NoPosition
from nbaccel.features.cell_checkpoints.head_state import HeadState
from nbaccel.features.cell_checkpoints.loss_tap import LossTap
from nbaccel.features.cell_checkpoints.marked_cell import Boundary, MarkedCell
from nbaccel.features.cell_checkpoints.steps_by_hand import StepsByHand
from nbaccel.features.flag_effects.flag_watch import kind_of_call
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.namespace.names import names_assigned
from nbaccel.options.given_flags import GivenFlag
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save
from nbaccel.train.checkpoint.autosave import CheckpointPolicy, Schedule, schedule
from nbaccel.train.checkpoint.content import Staging
from nbaccel.train.checkpoint.directory import FoundCheckpoint, Timeline
from nbaccel.train.checkpoint.manifest import OF_A_CELL, Lineage, Manifest, Stamp
from nbaccel.train.checkpoint.serialization import ToHost, on_host
from nbaccel.train.checkpoint.writer import Writer
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.step.raw_loop_hooks import forget, step_under_way, when_stepping_back, window_is_open

__all__ = ["CellSaves", "marks_of"]

_EVERY = "checkpoint_every"

_OF_CODE = ("code ", "compiled ", "class ")
"""Beginnings of marks of functions and classes, see `SourceMark`."""

_NOT_HERE = (
    "the loop that trains is neither in the cell nor in a function that the notebook has, so a run could not go on in "
    "it. Write the loop into the cell"
)


class CellSaves:
    """Saves one cell's run in this rank; a context around it.

    Args:
        run_name, marks: See `SavingCellTask`.
        flags: Those of the run.

    Attributes:
        head: The notebook and the cell at the head of the loop; None before it.
        was_over: The run that was continued had nothing left to train.
    """

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        run_name: str,
        marks: Mapping[str, str],
        flags: Sequence[GivenFlag] = (),
    ) -> None:
        settings, self._world = RunSettings.from_env(), current_world()
        self._policy = policy = CheckpointPolicy.of(settings)
        self._parts_of_batch = settings.split or 1
        self._timeline = Timeline(policy.folder, policy.keep)
        self._timeline.begin(Lineage(run=run_name, is_agreed=True))
        self._schedule: Schedule | None = None if policy.every is None else schedule(policy.every, self._world)
        self._flag = next((flag for flag in flags if flag.name == _EVERY), GivenFlag(_EVERY, "--checkpoint-every"))
        self._marks = marks
        self._is_on, self._is_due, self._is_tried, self._has_optimizer = True, False, False, False
        self._asked = self._saved = 0
        self._resumed_at = -1
        self.was_over = False
        self._noted: set[str] = set()
        self._writer, self._staging = Writer(), Staging()
        self.head: HeadState | None = None
        found = None if policy.resume is None else self._found(policy.resume)
        is_of_ours = found is not None and is_of_cell(found.manifest)
        self._foreign = None if is_of_ours else found
        self._continuation = Continuation(found, self, marks) if found is not None and is_of_ours else None
        self._cell = MarkedCell(source, namespace, self, self._continuation)
        self._names = CellNames(source, namespace)

    @property
    def has_written(self) -> bool:
        """Return whether objects have the values of a checkpoint."""
        return self._continuation is not None and self._continuation.has_written

    @property
    def is_on_the_way(self) -> bool:
        """Return whether they have, and the loop does not go on yet: names and random states are not there."""
        return self._continuation is not None and self.has_written and not self._continuation.has_arrived

    @property
    def parts(self) -> list[types.CodeType]:
        """Return what is executed in place of the cell's own code."""
        parts: list[types.CodeType] = self._cell.parts
        return parts

    def __enter__(self) -> Self:
        when_stepping_back(self._step_back)
        self._first_step = register_optimizer_step_pre_hook(self._before_step)
        self._cell.__enter__()
        StepsByHand(
            reached=lambda: () if self.head is None else self.head.tensors(),
            is_needed=lambda: self._is_on and not self._has_optimizer,
            take=self._count_step_by_hand,
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._cell.__exit__(*error)
        self._first_step.remove()
        self._end_writing(is_over=error[0] is None)
        if self._is_on and error[0] is None and self._resumed_at == self._cell.steps:
            self.was_over = True
            emit(TrainingMode(LoopKind.UNMODIFIED))
            self.say(
                f"the run was over at step {self._resumed_at}, its last: nothing was left to train, and its results "
                "are in place"
            )
        elif self._is_on and error[0] is None and self._schedule and not self._is_tried and step_under_way():
            self.say(f"{self._flag}: nothing was saved, since no optimizer has stepped in a loop of the cell.")
        self._step_back()
        forget(self._step_back)

    def _end_writing(self, is_over: bool) -> None:
        """Wait for the last checkpoint.

        Raises:
            CannotSave: There is none of this run, and no other error has ended the cell.
        """
        try:
            self._writer.join()
        except CannotSave as error:
            self._go_on_without(error, is_last=True, is_needed=is_over)

    def _step_back(self) -> None:
        """Leave saves to the Accelerator: the program prepares."""
        self._is_on = False

    def say(self, line: str) -> None:
        """Print a line for all ranks."""
        if self._world.is_main_process:
            sys.stdout.write(f"{line}\n")

    def say_here(self, line: str) -> None:
        """Print a line of this rank."""
        sys.stdout.write(f"rank {self._world.rank}: {line}\n")

    # -- to go on

    def _found(self, place: Path) -> FoundCheckpoint | None:
        """Return the newest whole checkpoint of `place`; every rank finds the same one, before any of them saves."""
        try:
            found = self._timeline.choose_from(place)
        except FileNotFoundError:
            if place != self._timeline.folder:
                raise
            return None  # the first session of a cell that always has --resume
        for reason in found.passed_over:
            self.say(f"{reason}. Loading {found.folder} instead.")
        return found

    def _say_if_it_begins(self) -> None:
        if self._policy.resume is not None and self._continuation is None and self._foreign is None:
            self.say(f"nothing to resume in {self._policy.resume} yet: the training starts at its beginning")

    def resumed(self, found: FoundCheckpoint) -> None:
        """Count this run as one that goes on from a checkpoint."""
        assert found.manifest is not None
        self._timeline.lineage.follow(found.manifest)
        self._timeline.latest = found.folder
        self._cell.steps = self._asked = self._saved = self._resumed_at = found.manifest.step

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def conditions(self) -> dict[str, Any]:
        """Facts under which the numbers are the same bit by bit."""
        return conditions(self._world.world_size, self._parts_of_batch, random_states.device())

    # -- what the cell's version calls

    def at_head(self, roots: dict[str, Any]) -> None:
        """Take the state to which a checkpoint is the difference."""
        if not self._is_on:
            return
        if self._foreign is not None:
            raise CannotResume(
                f"{self._foreign.folder} is a checkpoint of a prepared loop, and this loop prepares nothing. Prepare "
                "as then, name another checkpoint (--resume PATH), or leave --resume out to start anew."
            )
        if self.head is None:
            self._say_if_it_begins()
        self.head = HeadState(roots, compared=self._names.compared(roots))

    def at_boundary(self, boundary: Boundary) -> None:
        """Save if it is time, or leave if the run is to end.

        Raises:
            RunStopped: The run ends here; it is saved if it can be.
            CannotSave: The loop cannot be saved, and nothing of this run is.
        """
        if not self._is_on or window_is_open():
            return
        self._names.let_go()
        under_way = step_under_way()
        step = boundary.steps if under_way is None else under_way + 1
        self._refuse_early(boundary)
        if step > self._asked:
            self._enter(boundary, step)
            self._asked = step
            self._is_due |= self._schedule is not None and self._schedule.is_due(step)
        if self._is_due and self._can_save(boundary):
            self._is_due = False
            try:
                self._save(boundary, step)
            except CannotSave as error:
                self._go_on_without(error)

    def _can_save(self, boundary: Boundary) -> bool:
        """Return whether a run could go on here; what is due waits for an enclosing loop where one can be saved.

        Raises:
            CannotSave: None can, and nothing of this run is saved.
        """
        if not boundary.refusal():
            return True
        try:
            boundary.around()
        except NoPosition as error:
            if self._world.is_main_process and str(error) not in self._noted:
                self._noted.add(str(error))
                self._end_writing(is_over=True)  # is there a checkpoint that stays?
                self._go_on_without(CannotSave(str(error)))
        return False

    def _enter(self, boundary: Boundary, step: int) -> None:
        try:
            reports.enter_step(step, 0)
        except RunStopped:
            if self._schedule is not None:
                emit(SavingAtStop())
                try:
                    self._save_at_stop(boundary, step)
                finally:
                    emit(SavingAtStop(is_over=True))
            raise

    def _save_at_stop(self, boundary: Boundary, step: int) -> None:
        """Save what was trained since the last checkpoint; the run ends here, also without."""
        try:
            if step > self._saved:
                if why := boundary.refusal():
                    raise CannotSave(why)
                self._save(boundary, step, is_last=True)
            self._writer.join()
        except CannotSave as error:
            self._go_on_without(error, is_last=True, is_needed=False)

    # -- saves

    def _refuse_early(self, boundary: Boundary) -> None:
        """Find out after the first step whether the loop can be saved at all, before hours of it are to be lost."""
        if self._is_tried or self._schedule is None:
            return
        self._is_tried = True
        why = boundary.refusal()
        try:
            self._difference(boundary.around() if why else boundary)
        except (CannotSave, NoPosition) as error:
            self._refuse(str(error))
            return
        if why:
            self.say(f"{self._flag}: saved between the rounds of an enclosing loop only: {why}")
        emit(SavesItself())

    def _count_step_by_hand(self) -> None:
        self._cell.steps += 1

    def _before_step(self, *_: Any) -> None:
        """Refuse a loop that is out of sight, before its first step; leave that of a library to the library.

        Later steps ask nothing; torch cannot remove a hook from within it.
        """
        if self._has_optimizer:
            return
        self._has_optimizer = True
        if not self._is_on:
            return
        if kind_of_call(sys._getframe(1)) is not None:
            self._step_back()
        elif self._continuation is not None and self._resumed_at < 0:
            raise CannotResume(
                f"{self._continuation.folder} cannot be continued: the cell trains before it has come to the loop "
                "in which that was saved. Nothing was trained; leave --resume out to start anew."
            )
        elif self.head is None:
            self._say_if_it_begins()
            if self._schedule is not None:
                self._refuse(_NOT_HERE)
        elif self._schedule is not None:
            try:
                self.head.refuse_open_files()
            except CannotSave as error:
                self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        """Raise an error, or only print it if the flag is one of the notebook's settings."""
        sentence = f"{self._flag}: {why.rstrip('.')}."
        if self._flag.is_own:
            raise CannotSave(sentence, str(self._timeline.folder))
        self.say(f"{sentence} Nothing is saved.")
        self._schedule = None

    def _difference(self, boundary: Boundary, to_host: ToHost = on_host) -> CellDifference:
        assert self.head is not None, "a boundary is in a loop, whose head comes before"
        difference = CellDifference.between(
            *(self.head, boundary.roots(), to_host, boundary.can_make, boundary.frames_at_head(), boundary.can_wait),
            is_read=boundary.is_read,
        )
        for note in difference.notes:
            if note not in self._noted:
                self._noted.add(note)
                self.say(f"{self._flag}: {note}")
        return difference

    def _go_on_without(self, error: CannotSave, is_last: bool = False, is_needed: bool = True) -> None:
        """Leave out a save that cannot be made, and say so, if another checkpoint stays.

        No rank asks the others: when they save next does not depend on what became of this save.

        Args:
            is_last: The run ends.
            is_needed: Without any checkpoint the run ends by the error.
        """
        rank = self._world.rank
        if rank:  # of its random states
            self.say_here(f"{error} The others are saved.")
            return
        newest = self._timeline.latest
        if newest is None and is_needed:
            raise error
        left = "Nothing of this run is saved" if newest is None else f"{newest} stays the newest checkpoint"
        goes_on = "" if is_last else ", and the training goes on"
        self.say(f"{self._flag}: not saved: {str(error).rstrip('.')}. {left}{goes_on}.")

    def _save(self, boundary: Boundary, step: int, is_last: bool = False) -> None:
        """Save this rank's share; in rank 0 a thread goes on with it once everything is copied.

        Raises:
            CannotSave: It cannot be saved.
        """
        self._saved = step
        try:
            self._writer.join()  # the save before, whose copies are overwritten
        except CannotSave as error:
            self._go_on_without(error, is_last, is_needed=not is_last)
        generators = random_states.read()
        lineage, rank = self._timeline.lineage, self._world.rank
        stamp = Stamp(step, self._parts_of_batch, f"{lineage.run}.{lineage.turns}")
        target = self._timeline.folder_for(step)
        if rank:
            with as_cannot_save(target):
                rng_files.add(target, rank, stamp, generators, committed=self._timeline.committed)
            return
        if news := self._timeline.news(target):
            self.say(news)
        difference = self._difference(boundary, partial(self._staging.copy, "difference"))
        self._staging.settle()
        if news := self._timeline.shortage(target, difference.nbytes):
            self.say(news)
        of_run = {"run": lineage.run, "ancestors": dict(lineage.ancestors)}
        manifest = Manifest(str(stamp), step, 0, 0, self._world.world_size, parts=[OF_A_CELL], **of_run)  # type: ignore[arg-type]
        place = CellPosition(boundary.position(), self._marks, self.conditions)
        save = CellSave(target, stamp, manifest, place.packed(), difference, generators)
        self._writer.start(partial(save.write, self._timeline))
        LossTap(save.add_next_loss)


def marks_of(source: CellSource, namespace: dict[str, Any]) -> dict[str, str]:
    """Return the marks of a cell's code, and of the functions and classes of the notebook that it names; no values."""
    parts = source.compile()
    bound = names_assigned(parts)
    names = {name: value for name, value in namespace.items() if name not in bound}
    found = SourceMark.of_cell(source.code, parts, names).names
    return {name: mark for name, mark in found.items() if not name or mark.startswith(_OF_CODE)}
