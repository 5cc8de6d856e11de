"""The worker of a map: claims items, calls the function, writes the answers. Runs in ranks and scripts.

It waits for no other rank, except at the end for those that still work on something. What goes wrong stays with the
items: a call that runs out of memory is repeated in halves, one that fails is repeated with fewer items until the one
that fails is alone, and that one is recorded as failed after some tries. The run fails only where nothing would be
right: when `setup` fails, when the first items of all ranks fail alike, when the disk is full, when a stream fails.

A run that is stopped, by a person or at a time limit, ends between two calls: what a call returns is written. The ranks
of a call leave the map together, as stopped or as done, so that none of them waits for the others afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from nbaccel.base.events import CallEntered, CallsEnded, ItemsDone, emit
from nbaccel.base.failures import Recovery, recovery_of
from nbaccel.base.quantities import plural
from nbaccel.base.world import run_folder
from nbaccel.errors import CannotSave, CollectiveMismatch, RunStopped
from nbaccel.features.map import Answers, MapJob
from nbaccel.features.map.call_watch import watch_of_calls
from nbaccel.features.map.chunk_size import ChunkSize
from nbaccel.features.map.claim_log import Claim
from nbaccel.features.map.item_call import CallAnswers, ItemCall
from nbaccel.features.map.item_list import ItemMark, as_items
from nbaccel.features.map.item_source import UsersError, source_of_items
from nbaccel.features.map.map_job import IN_MEMORY
from nbaccel.features.map.records import AnswerRecord
from nbaccel.features.map.same_items import (
    StreamReader,
    first_items_of,
    reader_of,
    refuse_different_items,
    refuse_parts,
)
from nbaccel.features.micro_batches.engine import forbid_collectives
from nbaccel.features.retry.attempt import Attempt
from nbaccel.features.source.fingerprint import length_of
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.train.oom.memory.release import release_unused

__all__ = ["MapWorker", "map_in_ranks", "work"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5
_REPORT_S = 0.2
_LONGEST_ERROR = 2000
_MOST_DEATHS = 3
"""Number of processes that may die with one item alone, whatever `tries` is: the launcher starts no more in a row."""


def map_in_ranks(
    accelerator: Any,
    function: Callable[..., Any],
    items: Any,
    setup: Callable[..., Any] | None,
    out: str | os.PathLike[str] | None,
    apart: Callable[[], AbstractContextManager[Any]],
    **options: Any,
) -> Answers:
    """Map in the ranks that call this together, and return the answers in each of them.

    One collective at the beginning tells the ranks that this is one call; afterwards none waits for another's share.

    Args:
        apart: A block in which prepared models wait for no other rank; see `Strategy.apart`.
        **options: As `MapJob.open` takes them.
    """
    world = accelerator.world
    refuse_parts(items, world)
    items = as_items(items)
    token, folder, marks = "", None, None
    if not world.is_distributed:
        return _mapped(accelerator, function, items, setup, out, **options)
    if not hasattr(items, "__len__"):
        items = reader_of(items)
    try:
        token, marks, mark = _agreed(accelerator, function, items, setup, is_kept=out is not None)
        folder = Path(run_folder() or tempfile.gettempdir()) / f"{IN_MEMORY}{token}"
        if out is None and world.local_world_size != world.world_size:
            raise ValueError(
                f"{world.place} is on another machine than rank 0 or others: name a file in "
                'a folder that all machines share, out="shared/answers.jsonl"'
            )
        found = {"token": token, "folder": folder, "marks": marks, "mark_of_items": mark}
        with apart():
            return _mapped(accelerator, function, items, setup, out, **found, **options)
    finally:
        if isinstance(items, StreamReader):
            items.close()


def _agreed(
    accelerator: Any, function: Callable[..., Any], items: Any, setup: Callable[..., Any] | None, is_kept: bool
) -> tuple[str, tuple[SourceMark, SourceMark] | None, ItemMark]:
    """Return what the ranks of one call share: a token, the sources of function and setup, the mark of the items.

    Collective.

    A rank may read another value of its own, as its number: the sources are those of rank 0.

    Raises:
        ValueError, PeerFailed, or the error of a stream: The items are not the same in all ranks.
    """
    world = accelerator.world
    first, error = first_items_of(items, **({} if world.is_distributed else {"count": 1}))
    is_asked = is_kept and world.is_main_process
    marks = (SourceMark.of(function), SourceMark.of(setup)) if is_asked else None
    by_rank = accelerator.collectives.gather_objects([(uuid.uuid4().hex, marks, first)], "map")
    refuse_different_items([one for _, _, one in by_rank], error)
    token, marks, _ = by_rank[0]
    return token, marks, first.mark


def _mapped(
    accelerator: Any, function: Callable[..., Any], items: Any, setup: Callable[..., Any] | None,
    out: str | os.PathLike[str] | None, **options: Any,
) -> Answers:  # fmt: skip
    world = accelerator.world
    with torch.no_grad():  # where it compares a loader: one that is iterated so trains nothing
        job = MapJob.open(items, function, setup, out=out, **options)
    try:
        work(accelerator, job, items, _WithoutPeers(function) if world.is_distributed else function, setup)
        return job.answers()
    finally:
        job.close(world.rank, world.world_size)


class _WithoutPeers:
    """The function of a map in several ranks, whose collectives are refused: no other rank need come to them.

    They are looked for until a call has succeeded.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_watched = True

    def __call__(self, *args: Any) -> Any:
        if not self._is_watched:
            return self._function(*args)
        returned = forbid_collectives(self._function, _waits)(*args)
        self._is_watched = False
        return returned


def _waits(name: str) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"the function of accelerator.map waits for other ranks, and this rank alone has these items: it calls {name}. "
        "A model in shards (FSDP), a training, prepare and gather do that. Gather what map returns, which all ranks "
        "get; for a model that needs all ranks loop over the data in each of them"
    )


def work(
    accelerator: Any,
    job: MapJob,
    items: Any,
    function: Callable[..., Any],
    setup: Callable[..., Any] | None,
    is_restarted: bool = False,
    hang_timeout_s: float | None = None,
) -> None:
    """Work on a map until each item has an answer or an error, and they are joined. No collective.

    Args:
        is_restarted: The launcher starts this rank again if it dies: it does so when it can no longer use its device.
        hang_timeout_s: This process ends where a call of `function` takes longer; `is_restarted` is True then.

    Raises:
        What `setup` raises; what `function` raises, if the first items of all ranks fail alike; what a stream raises.
        CannotSave: The disk is full, or the folder of the map cannot be written.
        RunStopped: The run is being stopped, and items are left.
    """
    if job.is_finished:
        return
    call = function
    if setup is not None:
        state = setup(accelerator)

        def call(chunk: list[Any]) -> Any:
            return function(state, chunk)

    users: UsersError | None = None
    try:
        while not job.finish():
            rank, ranks = accelerator.process_index, accelerator.num_processes
            MapWorker(job, items, call, rank, ranks, is_restarted, hang_timeout_s).run()
    except UsersError as found:
        users = found
    except OSError as error:  # of our own files
        if job.is_finished:
            return  # another worker has joined the answers meanwhile, and removed the folder
        raise CannotSave(
            f"rank {accelerator.process_index} cannot write to {job.folder}: {error.strerror or error}. What was "
            "answered is there: make room, or mend the folder, and the same call goes on",
            str(job.folder),
        ) from error
    finally:
        emit(CallsEnded())  # after the join, which a stop does not interrupt either
    if users is not None:
        try:
            raise users.error  # here, where it gets no other context than its own
        finally:
            del users  # else this frame and the error would keep each other


class MapWorker:
    """One worker: its claims, its records, and what it has learned about the size of a call.

    Args:
        call: The function, which takes a list of items and returns as many answers.
    """

    def __init__(
        self,
        job: MapJob,
        items: Any,
        call: Callable[[list[Any]], Any],
        rank: int,
        ranks: int,
        is_restarted: bool,
        hang_timeout_s: float | None = None,
    ) -> None:
        self._job = job
        self._call = ItemCall(call, job.format)
        self._rank = rank
        self._ranks = ranks
        self._is_restarted = is_restarted
        self._format = job.format
        self._claims = job.claims()
        self._items = source_of_items(job, items, self._claims, ranks)
        self._size = ChunkSize(job.batch_size, ranks)
        self._tries: dict[int, int] = {}
        self._done = self._failed = 0
        self._reported = 0.0
        self._calls = 0
        self._is_tested = False
        self._is_stop_asked = False
        self._watch = watch_of_calls(job.folder, hang_timeout_s, rank, job.has_answers)
        name = self._claims.enter()
        self._records = job.record_file(name)

    def run(self) -> None:
        """Work until there is nothing left to claim.

        Raises:
            RunStopped: The run is being stopped.
        """
        wait_s = _FIRST_WAIT_S
        try:
            while True:
                self._enter_call([])
                size = self._size.next(None if self._job.is_stream else self._claims.remaining())
                self._items.tend(size)
                claim = self._claims.claim(size)
                self._report_if_due()  # here, where it knows what the others have done
                if claim is None:
                    break
                if claim.indices:
                    failed = self._failed
                    self._answer(claim)
                    if self._failed == failed:
                        self._items.drop(claim.indices)
                    wait_s = _FIRST_WAIT_S
                else:
                    if not self._done:
                        self._say_it_fails("")  # nothing is left for this rank: it does not keep others waiting
                    time.sleep(wait_s)  # others work on the rest, or have died: that is looked at again
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        finally:
            self._report()
            self._items.close()
            self._watch.close()
            self._claims.leave()
            self._records.close()
        if self._claims.is_stopped:
            raise _stopped()  # another rank was first

    def _enter_call(self, unanswered: Sequence[Sequence[int]]) -> None:
        """Come to the next call, or to the search for work; a run that is being stopped ends here.

        Args:
            unanswered: The items of the present claim, in parts.

        Raises:
            RunStopped: It is.
        """
        emit(CallEntered(self._calls, self._note_stop))
        if self._is_stop_asked and self._claims.stop([index for part in unanswered for index in part]):
            raise _stopped()

    def _note_stop(self) -> None:
        self._is_stop_asked = True

    # -- one claim

    def _answer(self, claim: Claim) -> None:
        """Write an answer or an error for each item of a claim."""
        if claim.alone >= min(self._job.tries, _MOST_DEATHS):
            index, times = claim.indices[0], plural(claim.alone, "time")
            why = self._watch.explain(index, claim.alone)
            self._write_failed(index, why or f"RankDied: the process ended {times} while it worked on this item")
            return
        self._items.load(claim.indices, lambda: self._enter_call([claim.indices]))
        begun, is_whole = time.monotonic(), True
        pending = self._calls_of(claim.indices)
        while pending:
            self._enter_call(pending)
            part = pending.pop()
            attempt = self._attempt(part)
            if attempt.error is None:
                self._take(attempt.value, claim)
            else:
                is_whole = False
                pending += self._after(attempt, part, claim)
        if is_whole:
            shortest = min(map(length_of, self._items.get([claim.indices[-1]])))
            self._size.took(len(claim.indices), time.monotonic() - begun, shortest)

    def _attempt(self, part: Sequence[int]) -> Attempt:
        attempt = Attempt(self._returned, part, (), {})
        self._calls += 1
        return attempt

    def _returned(self, part: Sequence[int]) -> CallAnswers:
        items = self._items.get(part)
        with self._watch.over(part):
            return self._call(part, items, self._claims.round)

    def _take(self, returned: CallAnswers, claim: Claim) -> None:
        """Write what a call returned. Answers that cannot be written are not asked again: they would be the same."""
        if not (returned.records or self._done or self._is_tested):
            self._test(returned.refused[0][1], claim)
        if returned.records:
            self._write(returned.records)
        for index, error in returned.refused:
            self._write_failed(index, _text_of(error))

    def _calls_of(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Return the items of each call, the first one last."""
        most = self._size.in_one_call
        return [indices[start : start + most] for start in range(0, len(indices), most)][::-1]

    def _after(self, attempt: Attempt, part: Sequence[int], claim: Claim) -> list[Sequence[int]]:
        """Return what is called next after a call that failed, the first one last; record an item that is given up.

        Raises:
            The error, where it is not about these items.
        """
        error = attempt.error
        assert error is not None
        if not isinstance(error, Exception) or isinstance(error, CollectiveMismatch):
            raise error
        self._items.tend(1)  # raises the error of the stream, if it was that
        if recovery_of(error) is Recovery.RESTART:
            self._leave_device(error)
        is_shortage = attempt.shortage is not None
        if is_shortage and len(part) > 1:
            self._size.does_not_fit(len(part), max(map(length_of, self._items.get(part))))
        elif not self._done and not self._is_tested:
            self._test(error, claim)
        text = _text_of(error)
        del error
        attempt.forget()
        if is_shortage:
            release_unused()
        if len(part) > 1:
            half = (len(part) + 1) // 2
            return [part[half:], part[:half]]
        self._tries[part[0]] = self._tries.get(part[0], 0) + 1
        if self._tries[part[0]] < self._job.tries:
            return [part]
        del self._tries[part[0]]
        self._write_failed(part[0], text)
        return []

    def _leave_device(self, error: Exception) -> None:
        """End this process, which can no longer use its device, if it will be started again; else raise the error."""
        if not self._is_restarted:
            raise error
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        sys.stderr.write(f"rank {self._rank} can no longer use its device ({reason}); it starts again\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    # -- a function that fails with everything

    def _test(self, error: Exception, claim: Claim) -> None:
        """Find out whether the function fails with a few other items as well, before anything of it succeeded."""
        self._is_tested = True
        place = _place_of(error)
        for index in self._items.some(claim.indices):
            self._enter_call([claim.indices])
            attempt = self._attempt([index])
            other = attempt.error
            if other is not None and not isinstance(other, Exception):
                raise other
            if other is None and not attempt.value.records:
                other = attempt.value.refused[0][1]
            is_alike = other is not None and _place_of(other) == place
            attempt.forget()
            if not is_alike:
                return
        self._say_it_fails(place)
        while not (self._job.has_answers or self._others_fail_otherwise(place)):
            if len(self._failing()) >= self._ranks:
                raise UsersError(error)
            self._enter_call([claim.indices])
            time.sleep(_LONGEST_WAIT_S / 5)  # the other ranks still begin; what they find decides

    def _say_it_fails(self, place: str) -> None:
        """Tell the other ranks where the function fails with all that this rank has tried; empty: it has nothing."""
        folder = self._job.folder / "failing"
        folder.mkdir(exist_ok=True)
        (folder / str(self._rank)).write_text(place)

    def _failing(self) -> list[str]:
        return [path.read_text() for path in (self._job.folder / "failing").iterdir()]

    def _others_fail_otherwise(self, place: str) -> bool:
        return not set(self._failing()) <= {place, ""}

    # -- what was done

    def _write(self, records: Sequence[AnswerRecord]) -> None:
        self._records.append(records)
        if not self._done:
            self._job.note_answers()
        self._done += len(records)

    def _write_failed(self, index: int, text: str) -> None:
        packed = self._format.pack_error(index, text)
        self._records.append([AnswerRecord(index, packed, is_failed=True, round=self._claims.round)])
        self._failed += 1

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported > _REPORT_S:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        emit(ItemsDone(self._done, self._failed, self._size.in_one_call, self._claims.finished))


def _stopped() -> RunStopped:
    return RunStopped("stopped before the next call of the function of a map")


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _place_of(error: BaseException) -> str:
    """Return the class of an error and the line that raised it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__qualname__} at {frame.f_code.co_filename}:{line}"
