"""The GPU driver: what is known without talking to it, for those who may not take the milliseconds of a survey.

Runs in the kernel. It asks no NVML and touches no device; which GPUs there are is said by `hardware`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CUDA_VARIABLES", "cuda_environ", "has_gpu_driver"]

CUDA_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""The only variables whose values a survey keeps; none of them is ever a secret."""


def cuda_environ(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Those of `CUDA_VARIABLES` that are set."""
    env = os.environ if environ is None else environ
    return tuple((name, env[name]) for name in CUDA_VARIABLES if name in env)


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Whether there may be GPUs: looked up in microseconds, where a survey takes tens of milliseconds.

    The driver's own device, or that of Windows in its subsystem for Linux.
    """
    return any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))
