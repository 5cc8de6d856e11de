"""The GPU driver: what is known without talking to it, for those who may not take the milliseconds of a survey.

Runs in the kernel. It asks no NVML and touches no device; which GPUs there are is said by `hardware`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CUDA_VARIABLES", "cuda_environ", "has_gpu_driver", "has_nvidia_driver", "is_holder"]

CUDA_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""The only variables whose values a survey keeps; none of them is ever a secret."""

_PROCESSES_OF_THE_HOST = "pid:[4026531836]"
"""Linux's first namespace of process ids, PROC_PID_INIT_INO of proc_ns.h."""


def cuda_environ(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Those of `CUDA_VARIABLES` that are set."""
    env = os.environ if environ is None else environ
    return tuple((name, env[name]) for name in CUDA_VARIABLES if name in env)


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Whether there may be GPUs: looked up in microseconds, where a survey takes tens of milliseconds.

    The driver's own device, or that of Windows in its subsystem for Linux.
    """
    return any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether the driver that should know the GPUs is one of NVIDIA; in Windows's subsystem, its library is there."""
    is_windows = has_gpu_driver(root) and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return (root / "dev/nvidiactl").exists() or is_windows


def is_holder(pid: int, root: Path = Path("/")) -> bool:
    """Whether the process to which the driver gives this number is the one that has it here.

    The driver counts as the host does, so in a container another process may have the number. There only one that has
    the device open on which CUDA maps memory (NVML opens it too) is taken for it.
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
