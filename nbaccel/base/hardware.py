"""Hardware of this machine: GPUs, cores, memory, platform, and the precision that suits it. In kernels and scripts.

GPUs are read through NVML (`nvml`), which makes no CUDA context: a process that took a survey can still be forked.
Without an NVIDIA driver there are no GPUs, which is no error. Facts that are known without asking the driver are in
`gpu_driver`. Not covered: AMD and Intel GPUs, TPUs, MPS.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.gpu import ComputeMode, Driver, Gpu, hides_all
from nbaccel.base.gpu_driver import cuda_environ, has_nvidia_driver
from nbaccel.base.values import frozen
from nbaccel.base.world import is_notebook_kernel

if TYPE_CHECKING:
    from nbaccel.base.asking_cuda import CudaAnswer

__all__ = [
    "ComputeMode",
    "Driver",
    "Gpu",
    "MemoryInfo",
    "Platform",
    "Survey",
    "best_precision",
    "out_of_memory_kills",
    "threads_asked_for",
]


def threads_asked_for() -> int | None:
    """Return the CPU threads that the environment sets, by the variable that torch reads; None if it sets none."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None


class Platform(StrEnum):
    """Platform of the program; the value is the name people know."""

    COLAB = "Colab"
    KAGGLE = "Kaggle, interactive"
    KAGGLE_BATCH = "Kaggle, batch"
    JUPYTER = "Jupyter"
    SCRIPT = "script"

    @classmethod
    def detect(cls, environ: Mapping[str, str], modules: Iterable[str], is_kernel: bool) -> Platform:
        """Return the platform that these variables and loaded modules show.

        Kaggle is checked first: its image is built on Colab's. Not every KAGGLE_* variable counts: people export
        KAGGLE_KEY anywhere.
        """
        if run_type := environ.get("KAGGLE_KERNEL_RUN_TYPE"):
            is_batch = run_type == "Batch" or bool(environ.get("KAGGLE_IS_COMPETITION_RERUN"))
            return cls.KAGGLE_BATCH if is_batch else cls.KAGGLE
        if "google.colab" in modules or environ.get("COLAB_RELEASE_TAG") or "COLAB_GPU" in environ:
            return cls.COLAB
        return cls.JUPYTER if is_kernel else cls.SCRIPT


@frozen
class MemoryInfo:
    """Host memory: that of the machine, or the limit of the container if that is less."""

    total_bytes: int
    available_bytes: int


_VARIABLES_OF_TPUS = ("COLAB_TPU_ADDR", "TPU_NAME", "TPU_ACCELERATOR_TYPE")
"""Variables that Colab, Kaggle and Cloud's machines with TPUs set."""


@frozen
class Survey:
    """The resources of this machine for a run, at one moment.

    Args:
        gpus: In CUDA's order, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        cpu_count: Cores this process may keep busy (affinity and container quota).
        shm_bytes: Size of /dev/shm, through which data loader workers pass batches; None if there is none.
        system, kernel_release: "Linux", "6.1.85".
        cuda_environ: The CUDA variables that are set.
        driver: Further reports on them.
        tpu: By what a TPU is known to be here, "/dev/accel0"; empty if there is none.
        apple_gpu: The machine is an Apple one with a GPU of its own, which torch calls MPS.
    """

    gpus: tuple[Gpu, ...] = ()
    cpu_count: int = 1
    ram: MemoryInfo = MemoryInfo(0, 0)
    shm_bytes: int | None = None
    platform: Platform = Platform.SCRIPT
    system: str = "Linux"
    kernel_release: str = ""
    cuda_environ: tuple[tuple[str, str], ...] = ()
    driver: Driver = field(default_factory=Driver)
    tpu: str = ""
    apple_gpu: bool = False

    @classmethod
    def take(
        cls,
        nvml: Any = None,
        environ: Mapping[str, str] | None = None,
        root: Path = Path("/"),
        *,
        looks_for_gpus: bool = True,
        measures_memory: bool = True,
        ask: Callable[[], CudaAnswer] | None = None,
    ) -> Survey:
        """Examine the machine; takes less than a millisecond, and tens of them if it looks for GPUs and finds some.

        Args:
            nvml: Replaces the module `pynvml`, in tests.
            root: Replaces the root of the file system.
            looks_for_gpus: False for ranks on the CPU, of which nobody asks for GPUs or TPUs.
            measures_memory: False leaves `ram` and `shm_bytes` as if there were none, where nobody reads them.
            ask: Replaces what asks CUDA if NVML does not answer, in tests.
        """
        env = os.environ if environ is None else environ
        gpus, driver = _look_for_gpus(nvml, env, root, ask) if looks_for_gpus else ((), Driver())
        return cls(
            gpus=gpus,
            driver=driver,
            cpu_count=usable_cores(root),
            ram=usable_memory(root) if measures_memory else MemoryInfo(0, 0),
            shm_bytes=_size(f"{root}/dev/shm") if measures_memory else None,
            platform=Platform.detect(env, sys.modules, is_notebook_kernel()),
            system=platform.system(),
            kernel_release=platform.release(),
            cuda_environ=cuda_environ(env),
            tpu=_tpu(env, root) if looks_for_gpus else "",
            apple_gpu=(platform.system(), platform.machine()) == ("Darwin", "arm64"),
        )

    @property
    def kernel_version(self) -> tuple[int, ...]:
        """Return (6, 1) for "6.1.85-generic"; comparable with other versions."""
        return tuple(int(part) for part in self.kernel_release.split(".")[:2] if part.isdigit())

    @property
    def why_no_gpu(self) -> str:
        """Return why no existing GPU can be used, as half a sentence; empty if there is none, or one can be used."""
        driver, visible = self.driver, dict(self.cuda_environ).get("CUDA_VISIBLE_DEVICES")
        if self.gpus or (driver.silence and hides_all(visible)):
            return ""
        if driver.silence:
            asked = f"; CUDA: {driver.refusal}" if driver.refusal else ""
            return f"the driver does not answer (NVML: {driver.silence}{asked})"
        if driver.names and driver.uncut == driver.names:
            return f"{driver.uncut[0]} is in MIG mode and has no instance to compute on (nvidia-smi mig -cgi … -C)"
        if driver.names and visible is not None:
            hidden = "the GPU" if len(driver.names) == 1 else f"all {len(driver.names)} GPUs"
            return f"CUDA_VISIBLE_DEVICES={visible!r} hides {hidden}{f' ({driver.misread})' if driver.misread else ''}"
        return ""


def _tpu(env: Mapping[str, str], root: Path) -> str:
    try:
        names = os.listdir(f"{root}/dev")
    except OSError:
        names = []
    devices = sorted(name for name in names if name.startswith("accel") and name[5:6].isdigit())
    told = [name for name in _VARIABLES_OF_TPUS if env.get(name)]
    return f"/dev/{devices[0]}" if devices else told[0] if told else ""


def best_precision(gpu: Gpu | None) -> tuple[str, str]:
    """Return the mixed precision that suits a device (None: the CPU), and the reason, as half a sentence.

    The hardware decides, not `torch.cuda.is_bf16_supported()`: that is true on a T4, whose bf16 is emulated and
    slow, and asking it initialises CUDA.

    Example:
        >>> best_precision(Gpu(0, "GPU-1", "Tesla T4", 16 * 10**9, compute_capability=(7, 5)))
        ('fp16', 'Tesla T4 has no bf16 units')
        >>> best_precision(None)
        ('no', 'a CPU gains nothing from half precision')
    """
    if gpu is None:
        return "no", "a CPU gains nothing from half precision"
    if gpu.compute_capability >= (8, 0):
        return "bf16", f"{gpu.name} has bf16 units"
    if gpu.compute_capability >= (7, 0):
        return "fp16", f"{gpu.name} has no bf16 units"
    if gpu.compute_capability > (0, 0):
        return "no", f"{gpu.name} has no tensor cores"
    return "no", f"the driver does not tell what {gpu.name} can do"


def _look_for_gpus(
    nvml: Any, env: Mapping[str, str], root: Path, ask: Callable[[], CudaAnswer] | None
) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the devices that a new CUDA process would see, and what the driver says besides."""
    if not has_nvidia_driver(root) and not _answers(nvml):
        return (), Driver()
    from nbaccel.base.nvml import look_for_gpus  # many machines have no driver

    return look_for_gpus(nvml, env, root, ask)


def _answers(nvml: Any) -> bool:
    """Return whether there is a driver that NVML can talk to, though none was found at its usual places."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    nvml.nvmlShutdown()
    return True


# --- cores and memory ---------------------------------------------------------------------------------------------


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may keep busy: its affinity mask, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, version in _control_groups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(f"{group}/cpu.max").partition(" ")  # "150000 100000" or "max 100000"
        else:
            quota = _read(f"{group}/cpu.cfs_quota_us")  # -1 for no limit
            period = _read(f"{group}/cpu.cfs_period_us") if quota.isdecimal() else ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory(root: Path = Path("/")) -> MemoryInfo:
    """Return the machine's memory, or the container's if that is less."""
    import psutil  # takes 10 ms, once

    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for group, version in _control_groups(root, "memory"):
        limit = _read(f"{group}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}")
        if not limit.isdecimal() or int(limit) >= host.total:
            continue
        used = _read(f"{group}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}")
        if used.isdecimal():
            # File cache counts as used, yet the kernel gives it up before it refuses memory.
            free = int(limit) - int(used) + _inactive_file_bytes(group)
            total, available = min(total, int(limit)), min(available, max(0, free))
    return MemoryInfo(total, available)


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes killed for memory in this control group; None if that is not reported."""
    for group, version in _control_groups(root, "memory"):
        for line in _read(f"{group}/{'memory.events' if version == 2 else 'memory.oom_control'}").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


_LARGEST = 1 << 16


def _control_groups(root: Path, controller: str) -> Iterator[tuple[str, int]]:
    """Yield the directories whose limits apply to this process, innermost first, each with its cgroup version, 1 or 2.

    They are strings, as `_read` takes them: every launch reads some ten of these files, and a `Path` costs more than a
    file.
    """
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", *([controller] if controllers else []))
        names = [name for name in path.split("/") if name]
        version = 1 if controllers else 2
        yield from (("/".join([top, *names[:depth]]), version) for depth in range(len(names), -1, -1))


def _inactive_file_bytes(group: str) -> int:
    counters = dict(line.split(" ", 1) for line in _read(f"{group}/memory.stat").splitlines() if " " in line)
    return int(counters.get("total_inactive_file") or counters.get("inactive_file") or 0)


def _read(path: str) -> str:
    """Return a file of the system, which fits into one call; a file object would ask six things more of each."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(number, _LARGEST).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(number)


def _size(directory: str) -> int | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks
