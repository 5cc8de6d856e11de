"""Why a rank is a fork that cannot train: the kernel's CUDA or autograd has broken it. Runs in forked ranks.

It is asked before anything of the user's runs. The kernel was asked before it forked (`forkable.py`), by signs; what
these do not show, or another thread of it did in between, shows here, where it can be tried.
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
"""In what autograd says in a fork of a process in which it had threads for devices (torch's engine.cpp)."""


def why_this_fork_fails() -> str | None:
    """What breaks this rank, as half a sentence; None if nothing does.

    A driver of CUDA that the kernel has not loaded is not loaded here either, nor is a backward tried for it, which
    would count its devices: what the user's code puts into the environment for it (CUDA_LAUNCH_BLOCKING) has effect.
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
    """Whether a backward is refused in this process, by one of a single number on the CPU."""
    import torch

    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()
    except RuntimeError as error:
        return _REFUSAL in str(error)
    return False
