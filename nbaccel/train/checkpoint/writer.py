"""Save: writes one checkpoint to its folder on the disk. Runs in rank 0; in other ranks `ShareSave`, of sharded models.

Its content does not change any more once it is made with staged tensors, so a thread may write it while the
training continues.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from pathlib import Path

from nbaccel.base.events import Checkpoint, emit
from nbaccel.base.task_end import before_results_leave
from nbaccel.base.values import frozen
from nbaccel.errors import CannotSave
from nbaccel.train.checkpoint import rng_files as generators
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save, replacing, sweep
from nbaccel.train.checkpoint.content import ObjectState
from nbaccel.train.checkpoint.manifest import FileRecord, Manifest, sync
from nbaccel.train.checkpoint.rng_files import Stamp, State
from nbaccel.train.checkpoint.save_agreement import Alone, SaveAgreement, Share, delete_dead_agreements
from nbaccel.train.checkpoint.serialization import shareable_bytes

__all__ = [
    "Save",
    "ShareSave",
    "Writer",
]


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
            generators.write(folder, self.rank, str(self.stamp), self.generators)
            sweep(folder)
            generators.carry(self.target, folder, str(self.stamp))
            shards = self.agreement.collect(folder, own)
            replace(self.manifest, parts=names, shards=shards.places).seal(folder, {**records, **shards.records})
        generators.adopt(self.target, self.stamp)
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
                own = generators.write(agreement.folder, self.rank, str(self.stamp), self.generators)
                agreement.report(share, [own])
        except CannotSave as error:
            agreement.tell(error)
        return agreement.outcome()


class Writer:
    """Runs one piece of work at a time in the background; a new one waits until the one before has ended.

    A task's results wait for it, so that the record of a run has its last checkpoint, and so does a process that ends
    regularly; both warn of its error. A pickled copy is idle.

    Attributes:
        is_awaited: The results of this task wait for it.
    """

    def __init__(self) -> None:
        self.is_awaited = False  # at the end of this task
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pid = 0  # of the process that waits at its end

    def start(self, work: Callable[[], object]) -> None:
        """Start `work` in the background, after waiting for the work before.

        Raises:
            The error of the work before; `work` is not started then.
        """
        self.join()

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error

        self._wait_at_the_end()
        self._thread = threading.Thread(target=run, name="nbaccel-checkpoint")
        self._thread.start()

    def _wait_at_the_end(self) -> None:
        """Make the process wait before it shuts down the thread pools with which a checkpoint is written.

        Python joins threads that are no daemons only after that, and ``atexit`` comes later still.
        """
        if not self.is_awaited:
            self.is_awaited = True
            this = weakref.ref(self)
            before_results_leave(lambda: _finish(this), lambda: _forget_task(this))
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading._register_atexit(_finish, weakref.ref(self))  # type: ignore[attr-defined]

    def join(self) -> None:
        """Wait until nothing is being written.

        Raises:
            The error of the work, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __reduce__(self) -> tuple[type[Writer], tuple[()]]:
        return Writer, ()


def _finish(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is None:
        return
    writer.is_awaited = False
    try:
        writer.join()
    except Exception as error:
        warnings.warn(f"the last checkpoint of this process was not written: {error}", stacklevel=1)


def _forget_task(reference: weakref.ref[Writer]) -> None:
    if (writer := reference()) is not None:  # the ranks of a task that failed end without waiting for each other
        writer.is_awaited = False
