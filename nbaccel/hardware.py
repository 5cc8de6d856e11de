"""What this machine is: GPUs, cores, memory, platform, and which precision suits it. Runs in kernels and scripts.

GPUs are read through NVML, which makes no CUDA context: a process that looked here can still be forked. Without
an NVIDIA driver there are no GPUs and that is no error. What may be known without asking the driver is in
`gpu_driver`. Not covered: AMD and Intel GPUs, TPUs, MPS.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from nbaccel.gpu_driver import cuda_environ
from nbaccel.world import is_notebook_kernel

__all__ = ["Gpu", "Memory", "Platform", "Survey", "best_precision", "out_of_memory_kills", "threads_asked_for"]


def threads_asked_for() -> int | None:
    """CPU threads that the environment asks for, by the variable that torch reads; None where it does not."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as CUDA will show it to a new process.

    index: its number there, `cuda:<index>`.  uuid: what CUDA_VISIBLE_DEVICES accepts wherever it is moved.
    used_bytes: taken by all processes together.  compute_capability: (7, 5) is a T4.
    processes: process id and bytes of each holder; bytes are None where the driver does not tell, and process
    ids are those of the host, so in a container they may name nothing.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    processes: tuple[tuple[int, int | None], ...] = ()
    is_mig: bool = False


class Platform(StrEnum):
    """Where the program runs; the value is the name people know."""

    COLAB = "Colab"
    KAGGLE = "Kaggle, interactive"
    KAGGLE_BATCH = "Kaggle, batch"
    JUPYTER = "Jupyter"
    SCRIPT = "script"

    @classmethod
    def detect(cls, environ: Mapping[str, str], modules: Iterable[str], is_kernel: bool) -> Platform:
        """The platform that these variables and loaded modules show.

        Kaggle first: its image is built on Colab's. Not any KAGGLE_* variable: people export KAGGLE_KEY anywhere.
        """
        if run_type := environ.get("KAGGLE_KERNEL_RUN_TYPE"):
            is_batch = run_type == "Batch" or bool(environ.get("KAGGLE_IS_COMPETITION_RERUN"))
            return cls.KAGGLE_BATCH if is_batch else cls.KAGGLE
        if "google.colab" in modules or environ.get("COLAB_RELEASE_TAG") or "COLAB_GPU" in environ:
            return cls.COLAB
        return cls.JUPYTER if is_kernel else cls.SCRIPT


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory: what the machine has, or what the container may use when that is less."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What this machine offers to a run, at one moment.

    gpus: in CUDA's order, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    cpu_count: cores this process may keep busy (affinity and container quota).
    shm_bytes: size of /dev/shm, where data loader workers pass batches; None where there is none.
    system, kernel_release: "Linux", "6.1.85".  cuda_environ: the CUDA variables that are set.
    """

    gpus: tuple[Gpu, ...] = ()
    cpu_count: int = 1
    ram: Memory = Memory(0, 0)
    shm_bytes: int | None = None
    platform: Platform = Platform.SCRIPT
    system: str = "Linux"
    kernel_release: str = ""
    cuda_environ: tuple[tuple[str, str], ...] = ()

    @classmethod
    def take(
        cls,
        nvml: Any = None,
        environ: Mapping[str, str] | None = None,
        root: Path = Path("/"),
        *,
        looks_for_gpus: bool = True,
    ) -> Survey:
        """Look at the machine; takes less than a millisecond, and tens of them where it looks for GPUs and finds some.

        nvml: stands in for the module `pynvml`, in tests.  root: stands in for the file system's.
        """
        env = os.environ if environ is None else environ
        visible, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        return cls(
            gpus=visible_gpus(nvml, visible, order) if looks_for_gpus else (),
            cpu_count=usable_cores(root),
            ram=usable_memory(root),
            shm_bytes=_size(root / "dev/shm"),
            platform=Platform.detect(env, sys.modules, is_notebook_kernel()),
            system=platform.system(),
            kernel_release=platform.release(),
            cuda_environ=cuda_environ(env),
        )

    @property
    def kernel_version(self) -> tuple[int, ...]:
        """(6, 1) for "6.1.85-generic"; compares with other versions."""
        return tuple(int(part) for part in self.kernel_release.split(".")[:2] if part.isdigit())


def best_precision(gpu: Gpu | None) -> tuple[str, str]:
    """The mixed precision that suits a device (None: the CPU), and why, as half a sentence.

    The hardware decides, not `torch.cuda.is_bf16_supported()`: that is true on a T4, whose bf16 is emulated and
    slow, and asking it initialises CUDA.

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


# --- GPUs ---------------------------------------------------------------------------------------------------------


def visible_gpus(nvml: Any, visible: str | None, order: str) -> tuple[Gpu, ...]:
    """The devices a new CUDA process would see, in its order.

    visible: the value of CUDA_VISIBLE_DEVICES, None when unset.  order: that of CUDA_DEVICE_ORDER.
    CUDA shows a process at most one MIG device, so a list that starts with one has no second entry.
    """
    with _connected(nvml) as connected:
        boards = [] if connected is None else _boards(connected, order)
    if visible is None:
        whole = [board.gpu for board in boards if not board.slices]
        chosen = whole or [part for board in boards for part in board.slices]
    else:
        chosen = _select(visible, boards)
    if chosen and chosen[0].is_mig:
        chosen = chosen[:1]
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(chosen))


@dataclass(frozen=True, slots=True)
class _Board:
    """A physical GPU. slices: its MIG devices when it is cut into some."""

    gpu: Gpu
    bus_id: str
    speed: float
    slices: tuple[Gpu, ...] = ()


@contextmanager
def _connected(nvml: Any) -> Iterator[Any]:
    """NVML, open while the block runs; None when there is no driver to talk to."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not fit its kernel module
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _boards(nvml: Any, order: str) -> list[_Board]:
    """All GPUs in the order in which CUDA numbers them.

    CUDA documents FASTEST_FIRST only as a heuristic. Cores times clock, then the bus, reproduces it for alike
    GPUs; for unlike ones CUDA_DEVICE_ORDER=PCI_BUS_ID is the way to be certain, as the doctor says.
    """
    boards = [
        _board(nvml, handle)
        for number in range(_ask(nvml, 0, nvml.nvmlDeviceGetCount))
        if (handle := _ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, number)) is not None  # fell off the bus
    ]
    boards.sort(key=lambda board: board.bus_id)
    if order != "PCI_BUS_ID":
        boards.sort(key=lambda board: -board.speed)
    return boards


def _board(nvml: Any, handle: Any) -> _Board:
    gpu = _gpu(nvml, handle)
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    cores = _ask(nvml, 0, nvml.nvmlDeviceGetNumGpuCores, handle)
    clock_mhz = _ask(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    is_cut, _pending = _ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
    return _Board(
        gpu=gpu,
        bus_id="" if pci is None else _text(pci.busId),
        speed=cores * clock_mhz,
        slices=tuple(_mig_devices(nvml, handle, gpu)) if is_cut else (),
    )


def _mig_devices(nvml: Any, handle: Any, board: Gpu) -> Iterator[Gpu]:
    for number in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        part = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:  # numbers have gaps
            # A slice computes as its board does; NVML tells that only of the board.
            yield replace(_gpu(nvml, part), is_mig=True, compute_capability=board.compute_capability)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    holders = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=0,
        uuid=_text(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_ask(nvml, "unknown GPU", nvml.nvmlDeviceGetName, handle)),
        total_bytes=0 if memory is None else int(memory.total),
        used_bytes=0 if memory is None else int(memory.used),
        compute_capability=tuple(_ask(nvml, (0, 0), nvml.nvmlDeviceGetCudaComputeCapability, handle)),
        processes=tuple((holder.pid, holder.usedGpuMemory) for holder in holders),
    )


def _ask(nvml: Any, default: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, or `default` where this driver or device has none (vGPUs and laptops often have none)."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _select(visible: str, boards: list[_Board]) -> list[Gpu]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: entries up to the first invalid one, and nothing if one repeats."""
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named(entry.strip(), boards)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _named(entry: str, boards: list[_Board]) -> Gpu | None:
    """The device that one entry means: a number, `GPU-…` or `MIG-…`; a beginning will do if only one fits."""
    if entry.isdecimal():
        return boards[int(entry)].gpu if int(entry) < len(boards) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [gpu for board in boards for gpu in (board.gpu, *board.slices)]
    fitting = [gpu for gpu in everything if gpu.uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


# --- cores and memory ---------------------------------------------------------------------------------------------


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: its affinity mask, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(root, "cpu"):
        quota, _, period = _read(f"{group}/cpu.max").partition(" ")  # version 2: "150000 100000" or "max 100000"
        quota = quota or _read(f"{group}/cpu.cfs_quota_us")  # version 1: -1 for no limit
        period = period or _read(f"{group}/cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory(root: Path = Path("/")) -> Memory:
    """The machine's memory, or the container's where it is less."""
    import psutil  # 10 ms that only a survey has to pay

    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for group in _control_groups(root, "memory"):
        limit = _read(f"{group}/memory.max") or _read(f"{group}/memory.limit_in_bytes")
        if not limit.isdecimal() or int(limit) >= host.total:
            continue
        used = _read(f"{group}/memory.current") or _read(f"{group}/memory.usage_in_bytes")
        if used.isdecimal():
            # File cache counts as used, yet the kernel gives it up before it refuses memory.
            free = int(limit) - int(used) + _inactive_file_bytes(group)
            total, available = min(total, int(limit)), min(available, max(0, free))
    return Memory(total, available)


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes the system has killed for memory in this one's control group; None where it does not say."""
    for group in _control_groups(root, "memory"):
        counters = _read(f"{group}/memory.events") or _read(f"{group}/memory.oom_control")  # version 2, version 1
        for line in counters.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def _control_groups(root: Path, controller: str) -> Iterator[str]:
    """The directories whose limits hold for this process, innermost first; cgroup version 1 or 2.

    Strings, and `_read` takes them: every launch reads some twenty of these files, and a `Path` costs more than a file.
    """
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", *([controller] if controllers else []))
        names = [name for name in path.split("/") if name]
        yield from ("/".join([top, *names[:depth]]) for depth in range(len(names), -1, -1))


def _inactive_file_bytes(group: str) -> int:
    counters = dict(line.split(" ", 1) for line in _read(f"{group}/memory.stat").splitlines() if " " in line)
    return int(counters.get("total_inactive_file") or counters.get("inactive_file") or 0)


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode().strip()
    except OSError:
        return ""


def _size(directory: Path) -> int | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks
