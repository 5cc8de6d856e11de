"""Import DeepSpeed, and say what it is about to build. Runs in ranks.

DeepSpeed compiles kernels of its own when they are first needed, some minutes each, into a folder from which later runs
load them. A build that was killed leaves a file named "lock", for whose end torch waits without a limit. Here a build
is announced, a compiler that is missing is named, and a lock that nobody holds is moved away, with its age said. Locks
that are made here say who has them: so that of a dead process of this machine is moved away at once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from nbaccel.base.world import World
from nbaccel.train.distributed.callers import warn_user

__all__ = ["before_builds", "import_deepspeed", "kernels_of", "move_stale_lock", "named_locks"]

_ACCELERATOR = "DS_ACCELERATOR"
"""DeepSpeed's variable for the kind of device, which it reads once in a process."""

_LONGEST_STEP_S = 300.0
"""A build that has written nothing for so long is taken to be killed, where its lock does not say whose it is."""

_LOOK_S = 2.0

_RENAMED = r".torch.distributed.(all_gather_into|reduce_scatter)_tensor. is deprecated"
"""torch's warning of functions that DeepSpeed calls, and the user does not."""

_OFFLOADED = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
_ON_DEVICE = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion"}
"""Kernels of a configuration's optimizers, by their names in DeepSpeed: those with states on the host, and others. On a
CPU, too, "fused_adam" is that of states that are not offloaded."""


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


def kernels_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the kernels that an engine of this configuration loads."""
    zero, optimizer = config.get("zero_optimization", {}), config.get("optimizer")
    if any(zero.get(name, {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        yield "async_io"
    if optimizer is None or optimizer.get("params", {}).get("torch_adam"):
        return
    kind = str(optimizer.get("type", "")).lower()
    is_offloaded = zero.get("offload_optimizer", {}).get("device") in ("cpu", "nvme")
    if kind == "lamb":  # which has one for both
        yield "fused_lamb"
    elif name := (_OFFLOADED if is_offloaded else _ON_DEVICE).get(kind):
        yield name


def before_builds(config: Mapping[str, Any], world: World) -> None:
    """Say which kernels this rank's engine is about to compile, in rank 0, and clear the way for it.

    Raises:
        ModuleNotFoundError: A compiler, or ninja, is missing; the message says which package has it.
    """
    scripts = sysconfig.get_path("scripts")  # pip's ninja lies there, and a notebook's PATH lacks it
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PATH", "")]))
    names = [name for name in kernels_of(config) if not _is_installed(name)]
    missing = [name for name in names if not any(_folder(name).glob("*.so"))]
    if missing:
        _refuse_without_tools(missing)
    if world.is_local_main_process:
        if missing:
            folders = ", ".join(str(_folder(name)) for name in missing)
            warn_user(f"DeepSpeed builds {' and '.join(missing)} once, 2 to 5 minutes: {folders}")
        for name in names:  # torch takes the lock of one that is built, too
            _clear_the_way(_folder(name))


def _refuse_without_tools(missing: list[str]) -> None:
    compiler = os.environ.get("CXX", "c++")  # as torch chooses it
    for tool, package in (("ninja", "pip install ninja"), (compiler, "apt-get install g++, or conda install gxx")):
        if shutil.which(tool) is None:
            raise ModuleNotFoundError(
                f"DeepSpeed compiles {' and '.join(missing)} for this configuration, and {tool} is not here: "
                f"{package}; or leave the optimizer out of the configuration and prepare one of torch.optim, which "
                "needs no build"
            )


def _clear_the_way(folder: Path) -> None:
    """Wait until nobody builds in a folder, and move the lock of a build that was killed away."""
    told = ""
    while said := move_stale_lock(folder):
        if said != told:
            warn_user(said)
            told = said
        if (folder / "lock").exists():
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
    builder = _builder(lock)
    if builder:
        return f"{lock} is there: this run waits for the build of process {builder}"
    if builder is None and _quiet_s(folder) < _LONGEST_STEP_S:
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
        with suppress(FileNotFoundError):  # gone by now
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes)


def _is_installed(name: str) -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(name))


def _folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


# -- who has a lock


@contextmanager
def named_locks() -> Iterator[None]:
    """Let the locks of builds within say whose they are."""
    from torch.utils import cpp_extension

    module: Any = cpp_extension
    plain = module.FileBaton

    class NamedLock(plain):  # type: ignore[misc, valid-type]
        def try_acquire(self) -> bool | None:
            acquired: bool | None = super().try_acquire()
            if acquired:
                own = psutil.Process()
                holder = {"machine": _machine(), "process": own.pid, "began": own.create_time()}
                Path(self.lock_file_path).write_text(json.dumps(holder), encoding="utf-8")
            return acquired

    module.FileBaton = NamedLock
    try:
        yield
    finally:
        module.FileBaton = plain


def _machine() -> str:
    """Return what processes that see each other have in common; an empty text where the system does not say it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _holder(lock: Path) -> int | None:
    """Return the number of the process of this machine that a lock names, 0 if that has ended; None if unknown."""
    try:
        said = json.loads(lock.read_text(encoding="utf-8"))
        if not _machine() or said["machine"] != _machine():
            return None
        number = int(said["process"])
        return number if psutil.Process(number).create_time() == said["began"] else 0
    except psutil.NoSuchProcess:
        return 0
    except (OSError, ValueError, LookupError, TypeError):  # torch's own is empty
        return None


def _builder(lock: Path) -> int | None:
    """Return the number of a process of this machine that builds, 0 if it has ended; None if nobody knows.

    Whoever has the lock, or a ninja that has outlived it.
    """
    holder = _holder(lock)
    for number in () if holder else psutil.pids():
        try:
            process = psutil.Process(number)
            if process.name() == "ninja" and process.cwd() == str(lock.parent):
                return int(number)
            if holder is None and any(opened.path == str(lock) for opened in process.open_files()):
                return int(number)
        except (psutil.Error, OSError):  # another user's, or gone by now
            continue
    return holder
