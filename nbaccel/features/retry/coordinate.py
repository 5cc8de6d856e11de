"""DistributedRetry: lets all ranks give up an attempt and begin the next one. Runs in ranks, by every rank.

Every wait in here is in the store, never in a collective: some peer has left those. The order makes it sound:

1. A rank whose attempt failed sets the flag in the store, then cuts its connections; its peers' watchers see the
   flag and cut theirs. A peer that wakes from a broken collective therefore finds the flag, and knows that its own
   error is only a consequence. A peer that computes finds the flag at its next collective; one that is done, while it
   waits for the others to be done.
2. Each rank forgets its attempt and posts what it would do next.
3. Once all have posted, all know the same, form the process group again and continue.

On a device the host runs ahead: when a rank is woken, steps may be queued there behind an aborted sum, and
run on its partial result. So the rank that failed first lets its device finish before it sets the flag. It then has
the state after its last complete step, and in the next attempt the others copy that, whatever they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, field, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base.aborting import abort_device_groups, settle, uses_device
from nbaccel.base.events import Event, ExchangeLeft, Sink, Waiting, outlet
from nbaccel.base.quantities import numbers_in_order
from nbaccel.base.values import frozen
from nbaccel.errors import CollectiveMismatch, PeerFailed
from nbaccel.features.retry.attempt import Attempt, AttemptShortage, ShortagePlace
from nbaccel.features.retry.disconnect import (
    SETTLE_S,
    AttemptStore,
    PeerError,
    Watcher,
    collectives_entered,
    may_result_from_waking,
)
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.process_group import process_group

__all__ = [
    "AttemptReport",
    "DistributedRetry",
    "LocalRetry",
]

_DEVICE_PATIENCE_S = 10.0
"""Time that an aborted NCCL communicator may take to release a rank."""

_PATIENCE_S = 1800.0
"""Time that a peer may compute before its next collective: torch's own time limit for gloo."""

_EXIT_S = 10.0
"""Time that rank 0 waits for peers that know already that all are done; one that was killed does not answer."""


@frozen
class AttemptReport:
    """Report of one rank between two attempts; combined from all ranks, the agreement.

    Args:
        size: The batch size that it would try next; 0 to give up.
        steps: How many training steps each of its Accelerators has done; agreed is the most that any rank has.
        shortage: Its error, in words; empty for a rank that was only interrupted.
        obstacle: Why it cannot try again; empty if it can.
        keeps: There are replicas that were made outside of the function.
        is_sound: These are as after its last complete step.
        source: The first rank for which that holds.
        scalings: How its Accelerators scale losses; in the agreement, those of `source`, since ranks may not differ.
    """

    size: int
    steps: list[int] = field(default_factory=list)
    shortage: str = ""
    obstacle: str = ""
    keeps: bool = False
    is_sound: bool = True
    source: int = 0
    scalings: list[dict[str, Any]] = field(default_factory=list)


class LocalRetry:
    """One process, whose attempts concern no other rank."""

    def agreed(self, batch_size: int) -> int:
        """Return the size to begin with. Collective."""
        return batch_size

    def watching(self, batch_size: int) -> AbstractContextManager[None]:
        """Return the context for an attempt."""
        return nullcontext()

    def is_done(self, attempt: Attempt) -> bool:
        """Return whether the attempt succeeded on all ranks; False if memory ran out on one of them.

        Raises the attempt's own error, if it is another one.
        """
        if attempt.error is None or attempt.shortage is not None:
            return attempt.error is None
        raise attempt.error

    def regroup(self, report: Callable[[], AttemptReport]) -> AttemptReport:
        """Prepare the next attempt, as all ranks' reports require, and return the agreement. Collective.

        Args:
            report: Makes this rank's report; an error in it is raised here.
        """
        return report()

    def close(self) -> None:
        """End the call, for whatever reason."""


class DistributedRetry(LocalRetry):
    """One of several ranks that attempt together.

    Args:
        name: The name of the function.
        collectives: The collectives of the default group, which exists.
    """

    def __init__(self, name: str, collectives: Collectives) -> None:
        self._name = name
        self._collectives = collectives
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._outer: DistributedRetry | None = process_group.recoveries[-1] if process_group.recoveries else None
        self._place = process_group.meeting_place() if self._outer is None else self._outer.place_within()
        self._call = name
        self._attempts = self._inner_calls = 0
        self._watcher: Watcher | None = None
        self._is_sound = True
        self._is_whole = False  # an error has ended the call on all ranks, and the process group works
        process_group.recoveries.append(self)

    def agreed(self, batch_size: int) -> int:
        everyones = self._collectives.announce(f"find_executable_batch_size of {self._name}", str(batch_size))
        return min(map(int, everyones))

    @contextmanager
    def watching(self, batch_size: int) -> Iterator[None]:
        self._attempts += 1
        self._inner_calls = 0
        self._call = f"{self._name}(batch_size={batch_size})"
        place = self._place.within(f"attempt{self._attempts}")
        self._messages = AttemptStore(place.store, self._rank, self._world_size)
        self._watcher = Watcher(AttemptStore(place.store_for_thread, self._rank, self._world_size), place.port)
        ear = _Ear(self._messages, self._call)
        with outlet(ear) as ear.next:
            yield

    def is_done(self, attempt: Attempt) -> bool:
        error = attempt.error
        self._is_sound = not uses_device()
        if error is None:
            self._messages.post("done", _calls())
            if self._messages.wait("done", f"the end of {self._call}", lambda _: self._is_given_up or self._is_failed):
                self._see_everybody_off()
                return True
            if not self._is_given_up:
                self._leave_together()
        elif attempt.shortage is not None:
            self._is_sound = self._is_sound or self._is_settled(attempt.shortage)
            self._messages.raise_flag()
        elif not self._is_consequence(error):
            if not isinstance(error, KeyboardInterrupt):  # each rank gets its own interrupt
                self._messages.record(_text(error))
                self._leave_together()
                self._wake()
            raise error
        self._wake()
        self._heed_errors(error)
        return False

    def regroup(self, report: Callable[[], AttemptReport]) -> AttemptReport:
        is_free = abort_device_groups(_DEVICE_PATIENCE_S)  # first: reading a report may wait for the device
        mine = replace(self._made(report), is_sound=self._is_sound)
        if not is_free:
            stuck = f"its device did not let go of the process group within {_DEVICE_PATIENCE_S:g} s"
            mine = replace(mine, obstacle=mine.obstacle or stuck)
        self._messages.post("report", asdict(mine))
        call = f"memory that ran out in {self._call}: waiting for the other ranks to be ready for the next attempt"
        is_complete = self._messages.wait("report", call, self._has_waited_enough)
        self._heed_errors(None)
        if not is_complete:
            held = self._messages.stuck("report")
            late = held or sorted({*range(self._world_size)} - {*self._messages.posted("report")})
            patience_s = 2 * _DEVICE_PATIENCE_S if held else _PATIENCE_S
            error = self._cannot_go_on(mine, f"rank {numbers_in_order(late)} did not come back within {patience_s:g} s")
            self._messages.fail(_text(error))  # for the time when it does
            raise error
        reports = [AttemptReport(**self._messages.read("report", rank)) for rank in range(self._world_size)]
        for rank, each in enumerate(reports):
            if each.obstacle:
                raise self._cannot_go_on(mine, f"{each.obstacle} (rank {rank})")
        sound = [rank for rank, each in enumerate(reports) if each.is_sound]
        if not sound and any(each.keeps for each in reports):
            raise self._cannot_go_on(mine, _NOBODY_IS_SOUND)
        process_group.drop()
        process_group.renew(self._place.within(f"attempt{self._attempts}/group").store)
        self._collectives = process_group.talk or self._collectives
        shortages = [each.shortage for each in reports if each.shortage]
        size = min(each.size for each in reports)
        steps = [max(counts) for counts in zip_longest(*(each.steps for each in reports), fillvalue=0)]
        source = min(sound, default=0)
        return AttemptReport(size, steps, shortages[0], source=source, scalings=reports[source].scalings)

    def _has_waited_enough(self, waited_s: float) -> bool:
        """Return whether to stop waiting: a rank stuck in its device never comes, one that computes may take long."""
        if self._is_failed or waited_s > _PATIENCE_S:
            return True
        return waited_s > 2 * _DEVICE_PATIENCE_S and bool(self._messages.stuck("report"))

    def close(self) -> None:
        process_group.recoveries.remove(self)
        if self._watcher is not None:
            self._watcher.stop()

    def _see_everybody_off(self) -> None:
        """Wait until no peer polls the store for the end any more: the store may be in this process, which ends next.

        Ranks that our launcher or torchrun started have a store that outlives them; those of mpirun, srun or a fork of
        the program's own have it on rank 0.
        """
        if self._watcher is not None:
            self._watcher.stop()
        self._messages.post("gone", True)
        if self._rank == 0:
            self._messages.wait("gone", f"the end of {self._call}", lambda waited_s: waited_s > _EXIT_S)

    def _leave_together(self) -> None:
        """Wait until all ranks are at their end of an attempt that an error of the program ends.

        Where all have entered the same collectives, the process group is whole, and the program may go on with it. A
        peer that waits in a collective for a rank that has left is woken, which ends the group: its watcher sees that.
        """
        if collectives_entered() is None:
            self._messages.raise_flag()
            return
        self._messages.leave()
        together = f"the end of {self._call}, which an error has ended"
        if self._messages.wait("left", together, lambda waited_s: self._is_given_up or waited_s > _PATIENCE_S):
            counts = [self._messages.read("left", rank) for rank in range(self._world_size)]
            if all(each == counts[0] for each in counts):
                self._is_whole = True
                self._see_everybody_off()
                return
        self._messages.raise_flag()

    def _is_settled(self, shortage: AttemptShortage) -> bool:
        """Return whether this rank's tensors are as after its last complete step, now that its device is idle.

        For a step that itself ran out of memory it is unknown how far it came.
        """
        return settle(SETTLE_S) and shortage.place is not ShortagePlace.OPTIMIZER

    def _wake(self) -> None:
        """Wake the peers, if this attempt is over, and not only the one around it."""
        if self._watcher is not None and self._messages.is_flagged:
            self._watcher.wake_everybody()

    def place_within(self) -> Any:
        """Return the meeting place of a search inside this attempt."""
        self._inner_calls += 1
        return self._place.within(f"attempt{self._attempts}/call{self._inner_calls}")

    @property
    def _is_given_up(self) -> bool:
        """True if this attempt, or one around it, is over."""
        return self._messages.is_flagged or (self._outer is not None and self._outer._is_given_up)

    @property
    def _is_failed(self) -> bool:
        """True if this call, or an attempt around it, is over."""
        return self._messages.failed is not None or (self._outer is not None and self._outer._is_given_up)

    def _is_consequence(self, error: BaseException) -> bool:
        """Return whether `error` only results from waking this rank: it comes after the flag."""
        if not self._is_given_up:
            return False
        failed = self._messages.failed  # read after the flag, which a peer that fails sets after its error
        if failed is not None and failed.text == _text(error):
            return False  # all ranks may fail alike: then each has its own error
        return may_result_from_waking(error)

    def _heed_errors(self, error: BaseException | None) -> None:
        """Raise if another rank's error has ended this call, or the attempt around it is over."""
        failed = self._messages.failed
        if failed is not None:
            raise PeerFailed(self._told(failed)) from error
        if self._outer is not None and self._outer._is_given_up:
            raise PeerFailed(f"{self._call} was given up with {self._outer._call} around it") from error

    def _made(self, report: Callable[[], AttemptReport]) -> AttemptReport:
        try:
            return report()
        except BaseException as error:
            self._messages.fail(_text(error))
            raise

    def _told(self, failed: PeerError) -> str:
        state = "works on" if self._is_whole else "is over"
        return (
            f"rank {failed.rank} of {self._world_size} failed in {self._call} with {failed.text}; rank {self._rank} "
            f"was stopped with it. The traceback of rank {failed.rank} says where; the process group {state}."
        )

    def _cannot_go_on(self, mine: AttemptReport, reason: str) -> Exception:
        text = (
            f"{self._call} cannot be tried again with a smaller batch in these processes: {reason}. Start it again "
            f"with starting_batch_size={mine.size} or less."
        )
        if mine.shortage:
            return torch.OutOfMemoryError(f"{mine.shortage}\n  {text}")
        return PeerFailed(f"another rank ran out of memory, and {text}")


_NOBODY_IS_SOUND = (
    "a model that was made outside of the function may hold half a sum on every rank, for the device of no rank that "
    f"ran out of memory was done with its work within {SETTLE_S:g} s; make the model inside"
)


class _Ear:
    """Event sink that ends a wait of this rank for its peers if one is done with the attempt, or has given it up.

    Waits in the store end so; those in a collective when the connections are cut.

    An exchange that an attempt leaves is its own affair: the peers are woken, and form their group anew.

    Attributes:
        next: The sink to which all other events are passed on.
    """

    next: Sink

    def __init__(self, messages: AttemptStore, attempt: str) -> None:
        self._messages = messages
        self._attempt = attempt

    def __call__(self, event: Event) -> None:
        if type(event) is Waiting:
            self._look(event)
        if type(event) is not ExchangeLeft:
            self.next(event)

    def _look(self, event: Waiting) -> None:
        if self._messages.is_flagged:
            raise PeerFailed(f"{self._attempt} was given up, while rank {self._messages.rank} was {event.call}")
        gone = [rank for rank in self._messages.posted("done") if self._messages.read("done", rank) < _calls()]
        if gone:
            sides = "\n".join(f"  rank {rank}: is done with {self._attempt}" for rank in gone)
            raise CollectiveMismatch(
                f"rank {self._messages.rank} of {self._messages.world_size} waits in a collective that can never be "
                f"complete.\n  rank {self._messages.rank}: {event.call}\n{sides}\n"
                "  Every rank must make the same calls: look for a `return`, a `break` or an `if is_main_process` that "
                "only some ranks take."
            )


def _calls() -> int:
    """Return how many collectives of ours this rank has entered in the present group."""
    return 0 if process_group.talk is None else process_group.talk.calls


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
