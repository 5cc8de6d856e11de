"""SaveGrace: the time that a rank gets for a last checkpoint when its session ends. In ranks that save themselves.

Sessions end by SIGTERM to the kernel, to the ranks or to all of them, or by the kernel's death. In each case the run is
stopped as the user would stop it: all ranks leave before the same step, where they save. Without a kernel rank 0
answers the handshake of the control page. Ranks that save nothing die at once, as always.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from nbaccel.events import Event
from nbaccel.launch.rank.watch import DeathWatch
from nbaccel.launch.wire.control import SAVE_GRACE_S, ControlPage

__all__ = ["SaveGrace"]


class SaveGrace:
    """Learns that this rank saves itself (`SavesItself`), and ensures its last checkpoint from then on."""

    def __init__(self, page: ControlPage, rank: int, watch: DeathWatch) -> None:
        self._page = page
        self._rank = rank
        self._watch = watch

    def __call__(self, event: Event) -> None:
        self._page.saves_itself = True
        self._watch.when_kernel_died = self._outlive_kernel
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Ask the kernel, at its next tick, to stop the run.

        A kernel that wants more than a stop sends SIGKILL next.
        """
        self._page.stop_wanted = True

    def _outlive_kernel(self) -> None:
        """Let the rank save after the kernel has died.

        Nothing reads the rank's output any more, so it goes to /dev/null, or printing would be an error. The rank ends
        itself, or is ended after the grace time.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        os.close(nowhere)
        if self._rank == 0:
            self._page.stop()
        time.sleep(SAVE_GRACE_S)
