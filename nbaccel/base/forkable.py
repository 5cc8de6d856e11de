"""Find out why forks of this process would fail: CUDA or autograd has left state in it. Runs in the kernel.

It touches no device. `torch.cuda.is_initialized()` knows only torch's own contexts. Pinned memory, cupy, numba or
triton may have called the driver before; so may a backward on the CPU, which counts the existing devices and starts a
thread of autograd for each. None of this works in a fork: there CUDA cannot be initialised again, and the first
backward is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from nbaccel.base.gpu_driver import has_gpu_driver

__all__ = [
    "AUTOGRAD_HAS_THREADS",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_IS_INITIALISED",
    "DRIVER_IS_IN_USE",
    "has_other_devices",
    "loaded_driver",
    "may_have_cuda",
    "why_forks_fail",
]

CUDA_IS_INITIALISED = "CUDA is initialised in the notebook"
DRIVER_IS_IN_USE = "the CUDA driver is in use in the notebook"
AUTOGRAD_HAS_THREADS = "autograd has device threads in the notebook"

CUDA_ERROR_NOT_INITIALIZED = 3
"""Answer of the driver before cuInit, and to cuInit in a fork of a process that had called it."""

_CUDA_SUCCESS = 0
_DRIVER = b"/libcuda.so"
# Pinned memory calls cuInit while is_initialized() stays false: https://github.com/pytorch/pytorch/issues/50829.
_OPENED_BY_CUINIT = "/dev/nvidia-uvm"
# Forks of a process with autograd's threads are refused: https://github.com/pytorch/pytorch/pull/33885.
_AUTOGRADS_THREADS = b"pt_autograd_"
_UNNAMED_BACKEND = "privateuseone"
_PROC = Path("/proc")


def why_forks_fail() -> str | None:
    """Return why ranks that are forked from this process would fail, as half a sentence; None if they would not.

    Of several reasons, the one that implies the others is named. It takes microseconds if torch was built for the CPU
    and there is no driver, else some tenths of a millisecond.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return CUDA_IS_INITIALISED
    has_cuda = may_have_cuda()
    if has_cuda and _driver_is_in_use():
        return DRIVER_IS_IN_USE
    return AUTOGRAD_HAS_THREADS if (has_cuda or has_other_devices()) and _autograd_has_threads() else None


def may_have_cuda() -> bool:
    """Return whether this process can have CUDA's driver: there is a GPU's device, or torch was built for CUDA."""
    return has_gpu_driver() or _torch_is_built_for("cuda")


def loaded_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver if it is loaded in this process; it is not loaded by this function."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def has_other_devices() -> bool:
    """Return whether torch may have devices other than CUDA's: AMD's, Intel's, or an added back-end."""
    if _torch_is_built_for("hip", "xpu"):
        return True
    torch = sys.modules.get("torch")
    backend_name = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    return backend_name is not None and backend_name() != _UNNAMED_BACKEND


def _torch_is_built_for(*kinds: str) -> bool:
    version = getattr(sys.modules.get("torch"), "version", None)  # None while another thread imports it
    return any(getattr(version, kind, None) for kind in kinds)


def _driver_is_in_use() -> bool:
    """Return whether any code in this process has called cuInit: by the driver, or by a file that it opens then.

    NVML opens the same files, and keeps them open if torch has counted devices by it. So a loaded driver is asked, and
    if no file of the driver is mapped, it cannot be in use.
    """
    if (driver := loaded_driver()) is not None:
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_SUCCESS)
    if not _is_mapped(_DRIVER):
        return False
    descriptors = f"{_PROC}/self/fd"
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(descriptors):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(f"{descriptors}/{descriptor}") == _OPENED_BY_CUINIT:
                    return True
    return False


def _is_mapped(library: bytes) -> bool:
    """Return whether a file of this name is in the memory of this process, however it was loaded."""
    try:
        return library in Path(_PROC, "self/maps").read_bytes()
    except OSError:
        return False


def _autograd_has_threads() -> bool:
    """Return whether autograd has threads for devices here, by their names (torch's engine.cpp, `thread_init`).

    The threads get their names some moments after the backward that starts them.
    """
    tasks = f"{_PROC}/self/task"
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with contextlib.suppress(OSError), open(f"{tasks}/{task}/comm", "rb", buffering=0) as name:
                if name.read().startswith(_AUTOGRADS_THREADS):
                    return True
    return False
