"""ZygoteStart: ranks that another process starts: the zygote, or what connects other machines. Runs in the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from nbaccel.errors import LaunchRefused
from nbaccel.launching.ipc.spec import ForkServer, Task, WorkerBoot
from nbaccel.launching.processes.handle import WorkerProcess
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.start import quiet_tokenizers
from nbaccel.namespace.payload import Payload

__all__ = ["ZygoteStart"]


class ZygoteStart:
    """Starts ranks as copies of a clean process with torch loaded; the names that they read are sent by pickle.

    Args:
        zygote: Returns that process, which it starts anew if it is gone; or what starts ranks on other machines.
        starts_again: Ranks may be started again later, so the packed values are kept until `close`.
    """

    def __init__(self, zygote: Callable[[], ForkServer], *, starts_again: bool = False) -> None:
        self._zygote = zygote
        self._starts_again = starts_again
        self._payload: Payload | None = None

    def get_ready(self) -> None:
        self._zygote().get_ready()

    def pack(self, task: Task, world_size: int, timeout_s: float | None, beside: Sequence[Pollable]) -> None:
        from nbaccel.launching.processes.alarm import endable  # a forked run sends nothing

        with endable(timeout_s, beside):
            self._payload = task.pack()

    def start(self, boots: Sequence[WorkerBoot], task: Task, kernel_fds: Collection[int]) -> list[WorkerProcess]:
        assert self._payload is not None, "`pack` comes first"
        try:
            with quiet_tokenizers():
                try:
                    return self._zygote().fork(boots, task.reference, self._payload)
                except (BrokenPipeError, LaunchRefused):  # it has just died
                    if not self._starts_again:
                        raise
                    return self._zygote().fork(boots, task.reference, self._payload)
        finally:
            if not self._starts_again:
                self.close()

    def close(self) -> None:
        payload, self._payload = self._payload, None
        if payload is not None:
            os.close(payload.fd)
