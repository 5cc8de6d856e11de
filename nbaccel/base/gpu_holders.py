"""Processes that use a GPU, by the process ids that its driver knows. Used anywhere; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_holder"]


_PROCESSES_OF_THE_HOST = "pid:[4026531836]"
"""Linux's first namespace of process ids, PROC_PID_INIT_INO of proc_ns.h."""


def is_holder(pid: int, root: Path = Path("/")) -> bool:
    """Return whether the driver's process id `pid` means the process that has this id here.

    The driver uses the process ids of the host, so in a container another process may have the id. There only a process
    that has the device open on which CUDA maps memory (NVML opens it too) counts.
    """
    if _link(root / "proc/self/ns/pid") == _PROCESSES_OF_THE_HOST:
        return True
    try:
        names = os.listdir(root / f"proc/{pid}/fd")
    except OSError:  # there is none, or it is another user's
        return False
    opened = (_link(root / f"proc/{pid}/fd" / name) for name in names)
    return any(path.startswith(("/dev/nvidia-uvm", "/dev/dxg")) for path in opened)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
