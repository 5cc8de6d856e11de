"""GroupRecovery: wakes ranks that wait for one that failed inside of a step, and forms their group again. In ranks.

The same messages and the same watcher as for an attempt of `find_executable_batch_size`, for a step that all ranks
repeat. What is repeated, and with which sizes, is decided by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from nbaccel.errors import NbaccelError, PeerFailed
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.oom.retry.disconnect import AttemptStore, Watcher, handled

__all__ = ["GroupRecovery"]

_PATIENCE_S = 1800.0
"""Time that a peer may compute before its next collective: torch's own time limit for gloo."""


class GroupRecovery:
    """The connection of this rank to its peers outside of their process group. Made by all ranks in the same order.

    call: what the ranks do together, for messages.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        outer = process_group.recoveries[-1] if process_group.recoveries else None
        self._place = process_group.meeting_place() if outer is None else outer.place_within()
        self._renewals = 0
        self._watcher: Watcher | None = None
        self._meet()

    def _meet(self) -> None:
        self._here = self._place.within(f"renewal{self._renewals}")
        self._messages = AttemptStore(self._here.store, self._rank, self._world_size)
        self._heard = AttemptStore(self._here.store_for_thread, self._rank, self._world_size)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return the context of a step: a failure of another rank ends a wait of this one while entered."""
        self._watch()
        try:
            yield
        finally:
            watcher, self._watcher = self._watcher, None
            if watcher is not None:
                watcher.stop()

    def _watch(self) -> None:
        self._watcher = Watcher(self._heard, self._here.port)

    def is_consequence(self, error: BaseException) -> bool:
        """Return whether `error` only results from waking this rank: it comes after a peer's failure, and from torch.

        Raises:
            PeerFailed: a peer has failed with an error that ends the training.
        """
        is_torchs = any(isinstance(link, RuntimeError | OSError) for link in handled(error))
        if not is_torchs or isinstance(error, NbaccelError) or not self._messages.is_flagged:
            return False
        self._heed_errors(error)
        return True

    def fail(self, error: Exception) -> None:
        """End the step on all ranks: the others raise `PeerFailed`. The process group is over."""
        try:
            self._messages.fail(f"{type(error).__name__}: {error}"[:500])
        except (RuntimeError, OSError):  # the store is lost: its server ended with a peer
            return
        self._wake()

    def regroup(self) -> None:
        """Wake the peers, and form the process group again. Collective, of the rank that failed and those it wakes.

        Raises:
            PeerFailed: a peer's error has ended the step, or it does not come.
        """
        self._messages.raise_flag()
        self._wake()
        self._messages.post("here", True)
        call = f"the other ranks, to repeat {self._call} in smaller parts"
        is_complete = self._messages.wait("here", call, self._has_waited_enough)
        self._heed_errors(None)
        if not is_complete:
            late = sorted({*range(self._world_size)} - {*self._messages.posted("here")})
            raise PeerFailed(
                f"rank {self._rank} of {self._world_size} waited {_PATIENCE_S:g} s to repeat {self._call}, and rank "
                f"{', '.join(map(str, late))} did not come"
            )
        process_group.drop()
        process_group.renew(self._here.within("group").store)
        self._renewals += 1
        self._meet()
        self._watch()

    def _has_waited_enough(self, waited_s: float) -> bool:
        return self._messages.failed is not None or waited_s > _PATIENCE_S

    def _wake(self) -> None:
        if self._watcher is not None:
            self._watcher.wake_everybody()

    def _heed_errors(self, error: BaseException | None) -> None:
        failed = self._messages.failed
        if failed is not None and failed.rank != self._rank:
            raise PeerFailed(
                f"rank {failed.rank} of {self._world_size} failed in {self._call} with {failed.text}; rank "
                f"{self._rank} was stopped with it. The traceback of rank {failed.rank} says where; the process group "
                "is over."
            ) from error
