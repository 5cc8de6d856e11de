"""Continuation: a checkpoint of a cell, from which a run goes on. Runs in every rank of that run.

It answers what the marked cell asks on its way to the position (`GoingOn`), and compares the first loss afterwards with
that of the run before: the one check of all together, of the forward, the order of samples and the random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from nbaccel.base.events import Resumed, emit
from nbaccel.errors import CannotResume
from nbaccel.features.cell_checkpoints import random_states
from nbaccel.features.cell_checkpoints.checkpoint_folder import next_loss, read_place
from nbaccel.features.cell_checkpoints.difference import Restored, StoredDifference
from nbaccel.features.cell_checkpoints.head_state import HeadState
from nbaccel.features.cell_checkpoints.loader_draws import remade
from nbaccel.features.cell_checkpoints.loss_tap import LossTap
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.directory import FoundCheckpoint

__all__ = ["Continuation", "ContinuedRun"]

_NEAR = 1e-3
"""Relative difference of two losses that other ranks, or another processor, may explain."""


class ContinuedRun(Protocol):
    """The run that goes on, in this rank."""

    head: HeadState | None

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Facts under which the numbers are the same bit by bit."""

    def at_head(self, roots: dict[str, Any]) -> None:
        """Take the state at the head of the loop."""

    def resumed(self, found: FoundCheckpoint) -> None:
        """Count the run as one that goes on."""

    def say(self, line: str) -> None:
        """Print a line for all ranks."""

    def say_here(self, line: str) -> None:
        """Print a line of this rank."""


class Continuation:
    """Restores one checkpoint in a run that goes on.

    All that can be compared at the head of the loop is compared before the first write. What comes later is the place
    in the loop, and the first loss; a run that is refused then leaves nothing in the notebook (`SavingCellTask`).

    Attributes:
        folder: The checkpoint.
        has_written: Objects have the checkpoint's values, or some of them.
        has_arrived: The loop goes on.

    Raises:
        CannotResume: The cells are others than then.
        CheckpointCorrupt, UntrustedPickle: A file is damaged, or would run code.
    """

    def __init__(self, found: FoundCheckpoint, run: ContinuedRun, marks: Mapping[str, str]) -> None:
        assert found.manifest is not None
        self._found, self._run, self._manifest = found, run, found.manifest
        self._place = place = read_place(found.folder)
        if changed := SourceMark(dict(marks)).difference(place.source):
            raise CannotResume(
                f"{found.folder} cannot be continued, since the cells are others than when it was written: {changed}. "
                "Take the change back, or leave --resume out to start anew."
            )
        self._stored = StoredDifference.read(found.folder)
        self._restored: Restored | None = None
        self.has_written = self.has_arrived = self._has_told = False
        self.folder = found.folder
        self.position: Mapping[str, Any] = place.position
        self.unsaved: Collection[str] = self._stored.unsaved
        self.made: Collection[str] = self._stored.made

    def at_head(self, roots: dict[str, Any]) -> Mapping[str, Any]:
        """Write the difference into the objects that are there; return the names to bind."""
        self._run.at_head(roots)
        random_states.learn(self._random_states())
        assert self._run.head is not None
        self._restored = restored = self._stored.apply(self._run.head, remade, self._note_writing)
        for note in restored.notes:
            self._run.say(note)
        names: Mapping[str, Any] = restored.names
        return names

    def _note_writing(self) -> None:
        self.has_written = True

    def fill(self, roots: dict[str, Any]) -> Mapping[str, Any]:
        """Fill objects that their own statements have made again; return further names to bind."""
        return {} if self._restored is None else self._restored.fill(roots)

    def write_again(self, roots: dict[str, Any], is_last: bool) -> Mapping[str, Any]:
        """Write all contents once more: what was evaluated on the way may have changed them; return as `fill`."""
        assert self._restored is not None
        return self._restored.write_again(roots, is_last)

    def arrived(self) -> None:
        """Continue with this rank's random numbers, and with the count of steps."""
        folder, manifest, run = self.folder, self._manifest, self._run
        random_states.restore(self._random_states())
        self.has_arrived = True
        run.resumed(self._found)
        emit(Resumed(str(folder), manifest.step))
        run.say(f"continuing from {folder}: step {manifest.step}")
        world_size = run.conditions["ranks"]
        if manifest.world_size != world_size:
            run.say(
                f"the checkpoint was written by {manifest.world_size} rank(s) and continues in {world_size}: the same "
                "samples in the same order; random numbers within a step, as of dropout, are others"
            )
        if run.rank == 0 and (then := next_loss(folder, manifest)) is not None:  # that of rank 0's part, maybe
            LossTap(lambda now: self._compare(then, now))

    def _random_states(self) -> dict[str, Any]:
        """Return those of this rank; ranks that there were not make streams of their own out of those of rank 0."""
        folder, manifest, run = self._found.folder, self._manifest, self._run
        state, lost = rng_files.find(folder, run.rank, manifest)
        reason = lost
        if state is None:
            state, reason = rng_files.find(folder, 0, manifest)
            if run.rank < manifest.world_size and not self._has_told:
                self._has_told = True
                run.say_here(f"the random states of this rank were not saved ({lost}): its random numbers are others")
        if state is None:
            raise CannotResume(f"{folder} cannot be continued: it has no random states ({reason}).")
        return state

    def _compare(self, then: float, now: float) -> None:
        """Compare the first loss with that of the run before, at the same step.

        Raises:
            CannotResume: It is another one, and nothing explains that.
        """
        if now == then or (math.isnan(now) and math.isnan(then)):
            return
        changed = [name for name, value in self._place.conditions.items() if self._run.conditions.get(name) != value]
        folder = self._found.folder
        what = f"the first loss is {now:.9g}, and it was {then:.9g} in the run that is continued from {folder}"
        if math.isclose(now, then, rel_tol=_NEAR) or changed:
            why = f"{', '.join(changed)} differ" if changed else "equal to rounding"
            self._run.say(f"{what} ({why})")
            return
        raise CannotResume(
            f"{what}, by as many ranks on the same processor: something that the cells use is not as it was, such as a "
            "file, a setting of a library, or hash(), which is another in each kernel unless the environment variable "
            "PYTHONHASHSEED is a number. Nothing was trained; leave --resume out to start anew."
        )
