"""What the launching process is like: can it fork, would its forks work. Asked in the kernel; touches no device."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from nbaccel.forkable import why_forks_fail
from nbaccel.hardware import threads_asked_for

__all__ = ["ProcessState"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What preflight needs to know of this process.

    can_fork: ranks can be separate processes here at all.  why_forks_fail: what would break forks; None if nothing.
    threads: that it computes with, as its user, the environment or torch has it; None where nobody has said.
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
    """Linux with pidfds (5.3, 2019): they end a rank when its kernel dies, and no rank may go without that."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
