"""CutWatch: ends a wait of a rank in its device, when the kernel says that it would never end. Runs in ranks.

A rank that waits in its device for one that has failed does not react to an interrupt, and the end of that rank would
not wake it either. So the kernel sets a flag on the control page, and a thread here aborts the rank's groups. All
persistent ranks do so at about the same time, as NCCL requires, and form the groups anew. A rank that ends with its
task does so only if its device does not finish by itself: its peers end too, and its results are to come back. At a
stop, when no rank has failed, another flag is used, and no rank aborts if its device is just slow. After an abort a
rank may hold parts of a sum; it reports whether that is possible.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from nbaccel.aborting import Settling, abort_device_groups, can_renew, is_aborted, tore_step, uses_device
from nbaccel.gpu_driver import has_gpu_driver
from nbaccel.launch.wire.control import ControlPage

__all__ = ["SPOILT", "CutWatch"]

_POLL_S = 0.1
_HUNG_S = 4.0
"""Seconds that a device may take for its work before the rank counts it as hung, if a peer has failed."""

_HUNG_AT_STOP_S = 8.0
"""The same if no peer has failed."""

_FREE_S = 10.0

_FAILED_S = 10.0
"""Seconds that a failed rank 0 waits for its device before it reports.

Its values are whole if the peers still come. Nothing ends this wait earlier if all ranks wait for each other.
"""

_FAILED_PEER_S = 2.0
"""The same for the other ranks, whose values are less important."""

_ALONE_S = 60.0
"""Seconds that a finished rank waits for its device after all its peers have finished: no rank joins a sum any more."""

SPOILT = "this rank was woken in an exchange to which a peer did not come, and may hold parts of a sum"


class CutWatch:
    """The flags on the page, and the state of this rank's device since."""

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._page = page
        self._rank = rank
        self._is_whole = False
        self._is_torn = False
        self._stays = False
        self.is_readable = True  # false while the rank's device still waits
        self._thread: threading.Thread | None = None

    def begin(self, stays: bool) -> None:
        """Begin a task. If there is no device to wait for, no thread is started."""
        self._stays = stays
        if self._thread is None and (uses_device() or has_gpu_driver()):
            self._thread = threading.Thread(target=self._run, name="nbaccel-cut", daemon=True)
            self._thread.start()

    def look(self, has_failed: bool) -> dict[str, Any] | None:
        """Return the report to the kernel after a task; None without a group on a device.

        It is called before anything is read, because a read would wait in the device, without reacting. This wait ends
        when the device is done or was aborted. The kernel asks for an abort when the run is being ended; it does not
        know yet of a rank that has just failed, so such a rank ends its wait itself.
        """
        if not uses_device():
            return None
        was_aborted = is_aborted()
        settling = Settling()
        is_done = self._is_done(settling, has_failed)
        if not was_aborted:
            # The work of the device is whole if it finishes: an exchange that is cut later had not begun.
            self._is_whole = is_done
            if not is_done and not settling.ends_within(0):
                abort_device_groups(0)
        self.is_readable = settling.ends_within(_FREE_S)
        return {"is_cut": is_aborted(), "is_sound": self._is_whole and not self._is_torn, "obstacle": _obstacle()}

    @property
    def is_spoilt(self) -> bool:
        """Return whether the values of this rank may hold parts of a sum."""
        return is_aborted() and not self._is_whole

    def enter(self) -> None:
        """Begin a task that an abort may cut short; an abort that is due already finds no exchange to cut."""
        self._say_that_it_hears()
        is_cut = self._page.is_cut or is_aborted()
        self._is_whole = self._is_whole and is_cut
        self._is_torn = self._is_torn and is_cut

    def note(self, error: BaseException) -> None:
        """Record that the task ends by `error`; if it left an optimizer's step, this rank's values cannot be shared."""
        self._is_torn = self._is_torn or tore_step(error)

    def _run(self) -> None:
        me = os.getpid()
        while os.getpid() == me:
            time.sleep(_POLL_S)
            self._say_that_it_hears()  # a group may be formed in the middle of a task
            if not is_aborted() and self._is_due():
                abort_device_groups()

    def _is_due(self) -> bool:
        if self._page.is_cut:
            return self._stays or _is_hung(_HUNG_S)
        return self._page.frees_hung and _is_hung(_HUNG_AT_STOP_S)

    def _is_done(self, settling: Settling, has_failed: bool) -> bool:
        """Return whether this rank's device finishes its work, waiting as long as that is possible."""
        if has_failed:
            return settling.wait(_FAILED_S if self._rank == 0 else _FAILED_PEER_S)
        alone_s = 0
        while alone_s < _ALONE_S:
            if settling.wait(1):
                return True
            if settling.ends_within(0) or is_aborted():
                return False
            alone_s = alone_s + 1 if self._are_peers_through() else 0
        return False

    def _are_peers_through(self) -> bool:
        peers = [rank for rank in range(self._page.world_size) if rank != self._rank]
        return bool(peers) and all(map(self._page.has_finished, peers))

    def _say_that_it_hears(self) -> None:
        """Mark on the page that the rank reacts to an abort, so that the kernel gives it time for one."""
        if not self._page.hears_cuts(self._rank) and uses_device():
            self._page.hear_cuts(self._rank)


def _is_hung(limit_s: float) -> bool:
    """Return whether this rank's device has not finished its work after `limit_s`."""
    if not uses_device():
        return False
    settling = Settling()
    return not settling.wait(limit_s) and not settling.ends_within(0)


def _obstacle() -> str:
    """Return why the groups of this rank cannot be formed anew; empty if they can."""
    if not can_renew():
        return "nothing of ours formed their groups"
    own = len(sys.modules["torch.distributed"].distributed_c10d._world.pg_map) - 1
    return f"{own} process group(s) of the program's own (new_group, a device mesh) are lost" if own > 0 else ""
