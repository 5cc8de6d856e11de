"""GroupRecovery: wakes ranks that wait for one that failed inside of a step, and forms their group again. In ranks.

The same messages and the same watcher as for an attempt of `find_executable_batch_size`, for a step that all ranks
repeat. What is repeated, and with which sizes, is decided by the engine.

On a device the host runs ahead: when a rank runs out of memory in a step, its peers' devices may still sum gradients of
the step before, and an abort would leave half of a sum there, on which their optimizers then step. So no rank aborts
before the devices of all ranks are done with what they were given before this attempt (`begin`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base.aborting import abort_device_groups
from nbaccel.base.quantities import numbers_in_order
from nbaccel.errors import PeerFailed
from nbaccel.features.retry.disconnect import SETTLE_S, AttemptStore, Watcher, may_result_from_waking
from nbaccel.train.distributed.process_group import process_group

__all__ = ["GroupRecovery"]

_DEVICE_PATIENCE_S = 10.0
"""Time that an aborted NCCL communicator may take to release a rank."""

_POLL_S = 0.005

_PATIENCE_S = 1800.0
"""Time that a peer may compute before its next collective: torch's own time limit for gloo."""


class GroupRecovery:
    """The connection of this rank to its peers outside of their process group. Made by all ranks in the same order.

    Args:
        call: What the ranks do together, for messages.
        device: The device of this rank.
    """

    def __init__(self, call: str, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._before: Any = None  # event of the device behind what was queued before this attempt
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
        self._watcher = Watcher(self._heard, self._here.port, self._settle)

    def begin(self) -> None:
        """Begin an attempt: whatever this rank's device was given so far belongs to steps that count."""
        if self._device.type != "cpu":
            self._before = torch.get_device_module(self._device).Event()
            self._before.record()

    def _settle(self) -> bool:
        """Return whether the device is done, within `SETTLE_S`, with what it was given before this attempt."""
        before, deadline = self._before, time.monotonic() + SETTLE_S
        try:
            while before is not None and not before.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:  # an error of the device: what it was computing is lost
            return False
        return True

    def is_consequence(self, error: BaseException) -> bool:
        """Return whether `error` only results from waking this rank: it comes after a peer's failure.

        Raises:
            PeerFailed: A peer has failed with an error that ends the training.
        """
        if not self._messages.is_flagged or not may_result_from_waking(error):
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

    def wake(self) -> None:
        """End the waits of all ranks in this attempt. Called before anything waits for the device: a gather may be
        queued there that no peer enters any more.
        """
        self._messages.raise_flag()
        self._wake()

    def regroup(self) -> None:
        """Form the process group again, after `wake`. Collective, of the rank that failed and those it wakes.

        Raises:
            PeerFailed: A peer's error has ended the step, it does not come, or its weights are not whole.
        """
        is_free = abort_device_groups(_DEVICE_PATIENCE_S)
        is_whole = self._watcher is None or self._watcher.is_whole
        self._messages.post("here", is_free and is_whole)
        call = f"the other ranks, to repeat {self._call} in smaller parts"
        is_complete = self._messages.wait("here", call, self._has_waited_enough)
        self._heed_errors(None)
        if not is_complete:
            late = self._messages.stuck("here") or {*range(self._world_size)} - {*self._messages.posted("here")}
            patience_s = 2 * _DEVICE_PATIENCE_S if self._messages.stuck("here") else _PATIENCE_S
            raise PeerFailed(
                f"rank {self._rank} of {self._world_size} waited {patience_s:g} s to repeat {self._call}, and rank "
                f"{numbers_in_order(late)} did not come"
            )
        if torn := [rank for rank in range(self._world_size) if not self._messages.read("here", rank)]:
            raise PeerFailed(
                f"{self._call} cannot be repeated in smaller parts: the device of rank {numbers_in_order(torn)} was "
                f"not done with the step before after {SETTLE_S:g} s, so weights may hold half of a sum. Start again "
                "from a checkpoint, with a smaller batch."
            )
        process_group.drop()
        process_group.renew(self._here.within("group").store)
        self._renewals += 1
        self._meet()
        self._watch()

    def _has_waited_enough(self, waited_s: float) -> bool:
        if self._messages.failed is not None or waited_s > _PATIENCE_S:
            return True
        return waited_s > 2 * _DEVICE_PATIENCE_S and bool(self._messages.stuck("here"))

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
