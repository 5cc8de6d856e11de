"""CutWatch: ends what a rank waits for in its device, when the kernel says that it never comes. In ranks.

A rank that waits in its device for one that has failed hears no interrupt, and the end of that rank would not wake it
either. So the kernel sets a word on the control page, and a thread here aborts the rank's groups. Ranks that stay all
do so at about the same time, as NCCL needs it, and form them anew. One that ends with its task does so only if its
device is not done by itself: its peers end too, and what it has computed is to come back. At a stop, where nobody has
failed, the word is another one, and no rank aborts whose device is just slow. What a rank has after an abort may be the
rest of a sum; it says whether that can be.
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
"""How long a device may take for what it was given before the rank takes it for hung, where a peer has failed."""

_HUNG_AT_STOP_S = 8.0
"""The same where nobody has."""

_FREE_S = 10.0

_FAILED_S = 10.0
"""How long rank 0 waits for its device, when it has failed, before it says so: what it has is whole if the peers still
come. Nobody ends this wait sooner where all ranks wait for each other."""

_FAILED_PEER_S = 2.0
"""The same for the other ranks, from which little is asked."""

_ALONE_S = 60.0
"""How long a rank that is through waits for its device after all its peers are: nobody joins a sum any more."""

SPOILT = "this rank was woken in an exchange to which a peer did not come, and may hold parts of a sum"


class CutWatch:
    """The word on the page, and what has become of this rank's device since."""

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._page = page
        self._rank = rank
        self._is_whole = False
        self._is_torn = False
        self._stays = False
        self.is_readable = True  # what a rank has is not, while its device still waits
        self._thread: threading.Thread | None = None

    def begin(self, stays: bool) -> None:
        """The rank begins with a task. Where there is no device to wait for, no thread is started."""
        self._stays = stays
        if self._thread is None and (uses_device() or has_gpu_driver()):
            self._thread = threading.Thread(target=self._run, name="nbaccel-cut", daemon=True)
            self._thread.start()

    def look(self, has_failed: bool) -> dict[str, Any] | None:
        """What the kernel is told after a task; None without a group on a device.

        Before anything is read, for a read would wait in the device, deaf. This wait ends when the device is done or
        was aborted. The kernel has that done where the run is being ended; it does not know yet of a rank that has
        failed, which therefore ends its wait itself.
        """
        if not uses_device():
            return None
        was_aborted = is_aborted()
        settling = Settling()
        is_done = self._is_done(settling, has_failed)
        if not was_aborted:
            # What it was given is whole, if it comes to an end: whatever is cut later was not begun.
            self._is_whole = is_done
            if not is_done and not settling.ends_within(0):
                abort_device_groups(0)
        self.is_readable = settling.ends_within(_FREE_S)
        return {"is_cut": is_aborted(), "is_sound": self._is_whole and not self._is_torn, "obstacle": _obstacle()}

    @property
    def is_spoilt(self) -> bool:
        """Whether what this rank has may hold parts of a sum."""
        return is_aborted() and not self._is_whole

    def enter(self) -> None:
        """A task begins, which an abort may cut short; one that is due already finds nothing under way."""
        self._say_that_it_hears()
        is_cut = self._page.is_cut or is_aborted()
        self._is_whole = self._is_whole and is_cut
        self._is_torn = self._is_torn and is_cut

    def note(self, error: BaseException) -> None:
        """The task ends by `error`; if it left an optimizer's step, the others cannot be given what this rank has."""
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
        """Whether this rank's device comes to an end with what it was given, as long as there is hope."""
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
        """So that the kernel gives this rank the time that an abort takes."""
        if not self._page.hears_cuts(self._rank) and uses_device():
            self._page.hear_cuts(self._rank)


def _is_hung(limit_s: float) -> bool:
    """Whether this rank's device is still not done after `limit_s` with what it was given."""
    if not uses_device():
        return False
    settling = Settling()
    return not settling.wait(limit_s) and not settling.ends_within(0)


def _obstacle() -> str:
    """Why the groups of this rank cannot be formed anew; empty if they can."""
    if not can_renew():
        return "nothing of ours formed their groups"
    own = len(sys.modules["torch.distributed"].distributed_c10d._world.pg_map) - 1
    return f"{own} process group(s) of the program's own (new_group, a device mesh) are lost" if own > 0 else ""
