"""State of the launching process: can it fork, and would its forks work. Runs in the kernel; touches no device."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from nbaccel.forkable import why_forks_fail
from nbaccel.hardware import threads_asked_for

__all__ = ["ProcessState"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Facts of this process that preflight needs.

    can_fork: ranks can be separate processes here.  why_forks_fail: the reason why forks would fail; None if they would
    not.
    threads: number of CPU threads that the user, the environment or torch has set; None if nothing has set it.
    """

    can_fork: bool
    why_forks_fail: str | None
    threads: int | None = None

    @classmethod
    def now(cls) -> ProcessState:
        return cls(can_fork=_can_fork(), why_forks_fail=why_forks_fail(), threads=_threads())


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return threads_asked_for() if torch is None else int(torch.get_num_threads())


def _can_fork() -> bool:
    """Return whether this Linux has pidfds (5.3, 2019), which end a rank when its kernel dies; ranks need them."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
