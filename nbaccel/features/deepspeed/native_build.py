"""Import DeepSpeed, and say what it is about to build. Runs in ranks.

DeepSpeed compiles kernels of its own when they are first needed, some minutes each, into a folder from which later runs
load them. A build that was killed leaves a file named "lock", for whose end torch waits without a limit. Here a build
is announced, a compiler that is missing is named, and a lock that nobody holds is moved away, with its age said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from nbaccel.base.world import World
from nbaccel.train.distributed.callers import warn_user

__all__ = ["before_builds", "import_deepspeed", "move_stale_lock"]

_ACCELERATOR = "DS_ACCELERATOR"
"""DeepSpeed's variable for the kind of device, which it reads once in a process."""

_LONGEST_STEP_S = 300.0
"""A build that has written nothing for so long is taken to be killed."""

_LOOK_S = 2.0

_RENAMED = r".torch.distributed.(all_gather_into|reduce_scatter)_tensor. is deprecated"
"""torch's warning of functions that DeepSpeed calls, and the user does not."""

_OPTIMIZERS_ON_HOST = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
_OPTIMIZERS_ON_CUDA = {"adam": "fused_adam", "adamw": "fused_adam", "lamb": "fused_lamb", "lion": "fused_lion"}
"""Kernels of a configuration's optimizers, by their names in DeepSpeed."""


def import_deepspeed(device: torch.device) -> Any:
    """Return the package; from now on it prints warnings and errors alone.

    Raises:
        ModuleNotFoundError: It is not installed; the message is the command that installs it.
        RuntimeError: It works on another kind of device in this process.
    """
    chosen = os.environ.get(_ACCELERATOR)
    try:
        os.environ.setdefault(_ACCELERATOR, device.type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that it imports, to their authors
            import deepspeed

            kind = deepspeed.accelerator.get_accelerator().device_name()
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ModuleNotFoundError(
            "strategy='deepspeed' needs the package deepspeed: pip install 'deepspeed>=0.19'", name="deepspeed"
        ) from None
    finally:
        if chosen is None:  # processes that this one starts choose for themselves
            del os.environ[_ACCELERATOR]
    if kind != device.type:
        raise RuntimeError(
            f"DeepSpeed works on {kind} in this process and in those forked from it, which was chosen when it was "
            f"first imported{f' ({_ACCELERATOR}={chosen})' if chosen else ''}, and this training is on {device}: "
            "restart the kernel, and train there with one kind of device alone"
        )
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", _RENAMED, FutureWarning)
    return deepspeed


def kernels_of(config: Mapping[str, Any], device: torch.device) -> Iterator[str]:
    """Yield the names of the kernels that an engine of this configuration loads."""
    zero, optimizer = config.get("zero_optimization", {}), config.get("optimizer")
    if any(zero.get(name, {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        yield "async_io"
    if optimizer is None or optimizer.get("params", {}).get("torch_adam"):
        return
    kind = str(optimizer.get("type", "")).lower()
    on_host = device.type == "cpu" or "offload_optimizer" in zero
    if name := (_OPTIMIZERS_ON_HOST if on_host else _OPTIMIZERS_ON_CUDA).get(kind):
        yield name


def before_builds(config: Mapping[str, Any], device: torch.device, world: World) -> None:
    """Say which kernels this rank's engine is about to compile, in rank 0, and clear the way for it.

    Raises:
        ModuleNotFoundError: A compiler, or ninja, is missing; the message says which package has it.
    """
    scripts = sysconfig.get_path("scripts")  # pip's ninja lies there, and a notebook's PATH lacks it
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PATH", "")]))
    missing = [name for name in kernels_of(config, device) if not _is_built(name)]
    if not missing:
        return
    for tool, package in (("ninja", "pip install ninja"), ("g++", "apt-get install g++, or conda install gxx")):
        if shutil.which(os.environ.get("CXX", tool) if tool == "g++" else tool) is None:
            raise ModuleNotFoundError(
                f"DeepSpeed compiles {' and '.join(missing)} for this configuration, and {tool} is not here: "
                f"{package}; or leave the optimizer out of the configuration and prepare one of torch.optim, which "
                "needs no build"
            )
    if world.is_local_main_process:
        folders = ", ".join(str(_folder(name)) for name in missing)
        warn_user(f"DeepSpeed builds {' and '.join(missing)} once, 2 to 5 minutes: {folders}")
        for name in missing:
            _clear_the_way(_folder(name))


def _clear_the_way(folder: Path) -> None:
    """Wait while a build that this machine does not see may go on, and move its lock away if it does not."""
    told = ""
    while said := move_stale_lock(folder):
        if said != told:
            warn_user(said)
        if not (folder / "lock").exists() or _holder(folder / "lock"):
            return
        told = said
        time.sleep(_LOOK_S)


def move_stale_lock(folder: Path) -> str:
    """Move away the lock of a build that was killed; return a sentence on it, or an empty text if there is none.

    Args:
        folder: Where the build writes.
    """
    lock = folder / "lock"
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return ""
    if builder := _holder(lock):
        return f"{lock} is there: this run waits for the build of process {builder}"
    if _quiet_s(folder) < _LONGEST_STEP_S:
        return (
            f"{lock} is of a build that may go on, on another machine or as another user: this run waits until nothing "
            f"there has changed for {_LONGEST_STEP_S / 60:.0f} minutes. Delete the file if that build was killed"
        )
    away = lock.with_name(f"lock.left-{int(time.time())}")
    lock.rename(away)
    return (
        f"{lock} was left by a build that was killed, {age_s:.0f} s ago, and torch would wait for it for ever: it is "
        f"{away.name} now, and the build begins again"
    )


def _quiet_s(folder: Path) -> float:
    """Return the seconds since the last change of a file in a folder."""
    changes = [0.0]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone by now
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes)


def _is_built(name: str) -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(name)) or any(_folder(name).glob("*.so"))


def _folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(f"deepspeed_{name}" if name.endswith("comm") else name, verbose=False))


def _holder(lock: Path) -> int:
    """Return the number of the process that builds, which has the lock open; 0 if there is none on this machine."""
    for number in psutil.pids():
        try:
            if any(opened.path == str(lock) for opened in psutil.Process(number).open_files()):
                return int(number)
        except (psutil.Error, OSError):  # another user's, or gone by now
            continue
    return 0
