"""The GPU driver: facts that are known without asking it, for code that cannot wait the milliseconds of a survey.

Runs in the kernel. It asks no NVML and touches no device; `hardware` finds the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CUDA_VARIABLES", "cuda_environ", "has_gpu_driver", "has_nvidia_driver"]

CUDA_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""The only variables whose values a survey stores; none of them is ever a secret."""


def cuda_environ(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Return those of `CUDA_VARIABLES` that are set."""
    env = os.environ if environ is None else environ
    return tuple((name, env[name]) for name in CUDA_VARIABLES if name in env)


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Return whether there may be GPUs; takes microseconds, where a survey takes tens of milliseconds.

    It looks for the driver's own device, or that of Windows in its subsystem for Linux.
    """
    return any(os.path.exists(f"{root}/dev/{name}") for name in ("nvidiactl", "dxg"))


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Return whether the GPU driver is one of NVIDIA; in Windows's subsystem, its library exists."""
    is_windows = has_gpu_driver(root) and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return (root / "dev/nvidiactl").exists() or is_windows
