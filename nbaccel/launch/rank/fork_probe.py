"""Finds out why a forked rank cannot train: the kernel's CUDA or autograd has broken it. Runs in forked ranks.

It runs before any code of the user. The kernel has checked before it forked (`forkable.py`), by indirect signs; a cause
that these do not show, or that another thread of the kernel created in between, is found here by trying.
"""

from __future__ import annotations

import sys

from nbaccel.forkable import (
    AUTOGRAD_HAS_THREADS,
    CUDA_ERROR_NOT_INITIALIZED,
    DRIVER_IS_IN_USE,
    has_other_devices,
    loaded_driver,
)
from nbaccel.gpu_driver import has_gpu_driver

__all__ = ["why_this_fork_fails"]

_REFUSAL = "fork-based multiprocessing"
"""Part of autograd's error in a fork of a process in which it had threads for devices (torch's engine.cpp)."""


def why_this_fork_fails() -> str | None:
    """Return what breaks this rank, as half a sentence; None if nothing does.

    A CUDA driver that the kernel has not loaded is not loaded here either, and no backward is tried for it, which would
    count its devices: so variables that the user's code sets for it (CUDA_LAUNCH_BLOCKING) keep their effect.
    """
    if _torch_says_so():
        return "CUDA was already used in the notebook, as a forked rank found out"
    driver = loaded_driver()
    if driver is not None and driver.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED:
        return DRIVER_IS_IN_USE
    return AUTOGRAD_HAS_THREADS if has_other_devices() and _autograd_refuses() else None


def _torch_says_so() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._is_in_bad_fork():
        return False
    # On a machine without a GPU, a build for CUDA says so too once it was asked for devices, by is_available() or, from
    # torch 2.15 on, by the step of an optimizer; there it breaks nothing.
    return has_gpu_driver() or torch.version.hip is not None


def _autograd_refuses() -> bool:
    """Return whether a backward is refused in this process, by trying one of a single number on the CPU."""
    import torch

    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()
    except RuntimeError as error:
        return _REFUSAL in str(error)
    return False
