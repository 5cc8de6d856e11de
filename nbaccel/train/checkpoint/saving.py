"""Saving: one rank's part in the save of a checkpoint, from its content to the files. Runs in ranks.

Rank 0 writes a `Save`, and the other ranks add their random states, or, of sharded models, write a `ShareSave` each.
The content does not change any more once it is made with staged tensors, so a thread may write it while the training
continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from nbaccel.base.aborting import refuse_if_aborted
from nbaccel.base.events import Checkpoint, emit
from nbaccel.base.values import frozen
from nbaccel.errors import CannotSave
from nbaccel.train.checkpoint import hook_files, rng_files
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save, replacing, sweep
from nbaccel.train.checkpoint.checkpoint_parts import CheckpointParts
from nbaccel.train.checkpoint.content import ObjectState, Staging
from nbaccel.train.checkpoint.directory import CheckpointDirectory, is_of
from nbaccel.train.checkpoint.generators import State
from nbaccel.train.checkpoint.manifest import FileRecord, Manifest, Stamp, sync
from nbaccel.train.checkpoint.save_agreement import Alone, SaveAgreement, Share, delete_dead_agreements
from nbaccel.train.checkpoint.serialization import shareable_bytes
from nbaccel.train.distributed.callers import warn_user

__all__ = ["RankSave", "Save", "ShareSave"]


class RankSave:
    """This rank's part in one save of a checkpoint.

    Args:
        target: The folder of the checkpoint.
        blocking: Wait for the disk; otherwise a thread writes.
        directory: Cleans up, in rank 0, once the checkpoint is complete.
    """

    def __init__(
        self,
        checkpoints: CheckpointParts,
        target: Path,
        stamp: Stamp,
        blocking: bool,
        directory: CheckpointDirectory | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._training = checkpoints.training()
        self._target = target
        self._stamp = stamp
        self._blocking = blocking
        self._directory = directory

    def write(self) -> Path:
        """Write it, and return the checkpoint, as far as its name is known."""
        training, target = self._training, self._target
        if training.is_sharded and training.world.is_distributed:
            return self._write_together()
        if self._checkpoints.writes:
            self._write_all(Alone())
            return target
        rank = self._checkpoints.context.state.process_index
        try:
            with as_cannot_save(target):
                committed = {} if self._directory is None else {"committed": self._directory.committed}
                if self._checkpoints.registered.save_hooks:
                    with hook_files.collected(target, rank, self._stamp) as folder:
                        self._run_save_hooks(training.weights(), folder)
                names = hook_files.move_in(target, rank, self._stamp, **committed)
                rng_files.add(target, rank, self._stamp, training.generators(), names, **committed)
        except CannotSave as error:
            self._checkpoints.go_on_without(error)
        return target

    def _write_together(self) -> Path:
        """Save a sharded training, of which every rank writes its own rows. Runs in every rank; no collective."""
        target, world = self._target, self._training.world
        # the save before, with its error: the same on all ranks, before any of them begins this one
        self._checkpoints.writer.join()
        if self._checkpoints.directory.project.save_on_each_node and world.local_world_size < world.world_size:
            raise CannotSave(
                f"cannot write the checkpoint {target}: save_on_each_node is for nodes without a common file system, "
                "and a sharded model has rows on every node, which belong into one folder. Leave save_on_each_node out "
                "and give a folder that all nodes see.",
                str(target),
            )

        def committed() -> Path | None:
            if is_of(target, str(self._stamp)):
                return target
            return None if self._directory is None else self._directory.committed(str(self._stamp))

        agreement = SaveAgreement(
            target, str(self._stamp), world.rank, world.world_size, committed, self._checkpoints.say
        )
        try:
            agreement.begin()
            if world.is_main_process:
                self._write_all(agreement)
                return target
            return self._write_share(agreement)
        except CannotSave as error:  # before anything was written
            agreement.fail(error)
            self._checkpoints.go_on_without(error)
            return target
        except BaseException as error:
            agreement.fail(error)
            raise

    def _write_share(self, agreement: SaveAgreement) -> Path:
        """Write this rank's rows and random states, now or in the background. Runs in every rank but rank 0."""
        training, target = self._training, self._target
        staging = self._staging()
        state = training.generators()
        weights = training.weights()
        content = training.content(weights, self._checkpoints.registered.objects)
        if self._checkpoints.registered.save_hooks:
            with hook_files.collected(target, training.world.rank, self._stamp) as folder:
                self._run_save_hooks(weights, folder)
        parts = _whole(content.ready(staging, rows_only=True), target)
        world = training.world
        save = ShareSave(
            target,
            parts if staging is None else list(parts),
            world.rank,
            world.world_size,
            self._stamp,
            state,
            agreement,
            self._checkpoints.directory.latest,
        )

        def write() -> Path:
            try:
                self._checkpoints.directory.latest = save.write()
            except CannotSave as error:
                self._checkpoints.go_on_without(error)
                return target
            except BaseException as error:
                agreement.fail(error)
                raise
            return self._checkpoints.directory.latest

        if self._blocking:
            return write()
        self._checkpoints.writer.start(write, is_lone=False)
        return target

    def _write_all(self, agreement: Alone) -> None:
        """Write the whole folder, now or in the background; then `directory` cleans up. Runs in rank 0."""
        training, target, directory = self._training, self._target, self._directory
        then = None if directory is None else directory.tidy
        if unseen := training.accumulation.window.unfinished:
            warn_user(
                f"save_state inside an accumulation window: the gradients of its {unseen} batch(es) are not saved, "
                "and load_state sees these batches again. Where accelerator.sync_gradients is true nothing is lost.",
            )
        self._checkpoints.writer.join()  # the save before, whose buffers are used again
        staging = self._staging()
        state = training.generators()
        weights = training.weights()
        content = training.content(weights, self._checkpoints.registered.objects)
        if directory is not None and (news := directory.shortage(target, content.nbytes)):
            self._checkpoints.say(news)
        parts = _whole(content.ready(staging), target)
        save = Save(
            target,
            parts if staging is None else list(parts),
            content.nbytes,
            self._checkpoints.context.state.process_index,
            self._stamp,
            state,
            training.manifest(content, self._stamp),
            self._checkpoints.directory.latest,
            agreement,
        )
        if self._blocking:
            # Hooks may remove weights, before the parts are made of the others.
            self._complete(save, then, lambda folder: self._run_save_hooks(weights, folder))
        else:
            is_lone = not isinstance(agreement, SaveAgreement)
            self._checkpoints.writer.start(lambda: self._complete(save, then), is_lone)

    def _staging(self) -> Staging | None:
        """Return the buffers of saves in the background; None for one that is waited for."""
        if self._blocking:
            return None
        self._checkpoints.staging = self._checkpoints.staging or Staging()
        return self._checkpoints.staging

    def _complete(
        self,
        save: Save,
        then: Callable[[], None] | None,
        into_folder: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        try:
            reasons = save.write(into_folder)
            self._checkpoints.directory.latest = save.target
            if then is not None:
                then()
        except CannotSave as error:
            self._checkpoints.go_on_without(error)
            return
        for reason in reasons:
            warn_user(
                f"{reason}. It is saved as a pickle, from which load_state takes tensors and plain data; anything "
                "else needs load_state(..., trust=True).",
            )

    def _run_save_hooks(self, weights: list[dict[str, Any]], folder: Path) -> None:
        models = [self._checkpoints.handed_in(model) for model in self._training.prepared.models]
        for hook in self._checkpoints.registered.save_hooks.values():
            hook(models, weights, os.fspath(folder))


def _whole(parts: Iterable[ObjectState], target: Path) -> Iterator[ObjectState]:
    """Yield `parts`, which come from the device one by one; raise at the end if they waited there for an abort."""
    yield from parts
    refuse_if_aborted(f"the checkpoint {target}")


@frozen
class Save:
    """The content and the place of one checkpoint.

    Args:
        target: Its folder.
        parts: Copied to the host before (staged), or made one by one while they are written.
        nbytes: The size in bytes of all tensors.
        generators: Random states of this rank, whose number is `rank`.
        manifest: The position of the training; the names of the parts are added to it.
        earlier: The checkpoint before, which may hold the frozen weights already.
        agreement: How the ranks agree, where each of them has rows of sharded tensors.
    """

    target: Path
    parts: Iterable[ObjectState]
    nbytes: int
    rank: int
    stamp: Stamp
    generators: State
    manifest: Manifest
    earlier: Path | None = None
    agreement: Alone = field(default_factory=Alone)

    def write(self, into_folder: Callable[[Path], None] = lambda folder: None) -> list[str]:
        """Write the checkpoint to the disk; return, for each part that only a pickle can hold, the reason.

        Args:
            into_folder: Adds files of its own to the unfinished folder.

        Raises:
            CannotSave: No space, or no right to write there. The older checkpoint does not change.
        """
        began = time.monotonic()
        names: list[str] = []
        reasons: list[str] = []
        records: dict[str, FileRecord] = {}
        own = Share({}, {})
        delete_dead_agreements(self.target.parent)
        needed = max(0, self.nbytes - shareable_bytes(self.earlier, self.target.parent))
        with self.agreement.decided(self.target), replacing(self.target, needed) as folder:
            into_folder(folder)
            for part in self.parts:
                records |= part.write(folder, self.earlier)
                own = own.and_also(part.write_rows(folder, self.rank, self.manifest.world_size, self.earlier))
                names.append(part.name)
                if part.reason:
                    reasons.append(part.reason)
            rng_files.write(folder, self.rank, str(self.stamp), self.generators)
            sweep(folder)
            rng_files.carry(self.target, folder, str(self.stamp))
            shards = self.agreement.collect(folder, own)
            hook_files.adopt(self.target, self.stamp, folder)
            replace(self.manifest, parts=names, shards=shards.places).seal(folder, {**records, **shards.records})
        rng_files.adopt(self.target, self.stamp)
        hook_files.adopt(self.target, self.stamp)
        emit(Checkpoint(str(self.target), self.manifest.step, time.monotonic() - began))
        return reasons


@frozen
class ShareSave:
    """One rank's share of a checkpoint of a sharded training. Not of rank 0, which has a `Save`.

    Args:
        target: The checkpoint, as this rank expects its name.
        parts, stamp, generators, earlier: As in `Save`.
    """

    target: Path
    parts: Iterable[ObjectState]
    rank: int
    world_size: int
    stamp: Stamp
    generators: State
    agreement: SaveAgreement
    earlier: Path | None = None

    def write(self) -> Path:
        """Write this rank's rows and random states, and wait for rank 0's decision; return the checkpoint.

        Raises:
            CannotSave: The checkpoint was not committed; the same error on all ranks.
        """
        agreement, share = self.agreement, Share({}, {})
        try:
            with as_cannot_save(self.target):
                for part in self.parts:
                    share = share.and_also(part.write_rows(agreement.folder, self.rank, self.world_size, self.earlier))
                for name in share.records:
                    sync(agreement.folder / name)
                own = rng_files.write(agreement.folder, self.rank, str(self.stamp), self.generators)
                agreement.report(share, [own])
        except CannotSave as error:
            agreement.tell(error)
        return agreement.outcome()
