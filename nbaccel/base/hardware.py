"""Hardware of this machine: GPUs, cores, memory, platform, and the precision that suits it. In kernels and scripts.

GPUs are read through NVML, which makes no CUDA context: a process that took a survey can still be forked. Without an
NVIDIA driver there are no GPUs, which is no error; if there is a driver that NVML cannot reach, CUDA is asked by
`asking_cuda`. Facts that are known without asking the driver are in `gpu_driver`. Not covered: AMD and Intel GPUs,
TPUs, MPS.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from enum import StrEnum
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from nbaccel.base.asking_cuda import CudaAnswer, Device, ask_cuda
from nbaccel.base.gpu_driver import cuda_environ, has_nvidia_driver
from nbaccel.base.values import frozen
from nbaccel.base.world import is_notebook_kernel

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

_SILENT_AFTER_S = 20.0
"""Seconds to wait for NVML: it needs a second or so, even to wake the driver; a driver may hang for ever."""

_NVML_THREAD = "nbaccel-nvml"


def threads_asked_for() -> int | None:
    """Return the CPU threads that the environment sets, by the variable that torch reads; None if it sets none."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None


class ComputeMode(StrEnum):
    """Processes that a GPU accepts; set by an administrator."""

    SHARED = "any number of processes"
    EXCLUSIVE = "one process at a time"
    PROHIBITED = "no process"


@frozen
class Gpu:
    """One device as CUDA will show it to a new process.

    Args:
        index: Its number there, `cuda:<index>`.
        uuid: Accepted by CUDA_VISIBLE_DEVICES at any place of the device.
        used_bytes: Taken by all processes together.
        compute_capability: (7, 5) is a T4.
        processes: Process id and bytes of each holder; bytes are None if the driver does not report them, and process
            ids are those of the host, so in a container they may name nothing.
        number: Its number in CUDA_VISIBLE_DEVICES, in an environment like this one; None if that is a guess.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    processes: tuple[tuple[int, int | None], ...] = ()
    is_mig: bool = False
    number: int | None = None
    compute_mode: ComputeMode = ComputeMode.SHARED

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


@frozen
class Driver:
    """Reports of NVIDIA's driver, besides the GPUs that CUDA shows.

    Args:
        silence: Why NVML gave no answer although there is a driver; empty if it did.
        refusal: Why CUDA, which was asked instead, gave none either.
        names: The names of all the GPUs of the driver.
        uncut: Names of those in MIG mode that have no instance, on which nothing can compute.
        misread: Where CUDA stops reading CUDA_VISIBLE_DEVICES, and why; empty if it reads all of it.
    """

    silence: str = ""
    refusal: str = ""
    names: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    misread: str = ""


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
        ask: Callable[[], CudaAnswer] = ask_cuda,
    ) -> Survey:
        """Examine the machine; takes less than a millisecond, and tens of them if it looks for GPUs and finds some.

        Args:
            nvml: Replaces the module `pynvml`, in tests.
            root: Replaces the root of the file system.
            ask: Function that asks CUDA if NVML does not answer.
        """
        env = os.environ if environ is None else environ
        gpus, driver = _look_for_gpus(nvml, env, root, ask) if looks_for_gpus else ((), Driver())
        return cls(
            gpus=gpus,
            driver=driver,
            cpu_count=usable_cores(root),
            ram=usable_memory(root),
            shm_bytes=_size(root / "dev/shm"),
            platform=Platform.detect(env, sys.modules, is_notebook_kernel()),
            system=platform.system(),
            kernel_release=platform.release(),
            cuda_environ=cuda_environ(env),
            tpu=_tpu(env, root),
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
        if self.gpus or (driver.silence and _hides_all(visible)):
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


# --- GPUs ---------------------------------------------------------------------------------------------------------


def _look_for_gpus(
    nvml: Any, env: Mapping[str, str], root: Path, ask: Callable[[], CudaAnswer]
) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the devices that a new CUDA process would see; CUDA is asked if a driver is there but NVML is silent."""
    visible, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if not has_nvidia_driver(root):
        gpus, driver = _ask_nvml(nvml, visible, order)
        return gpus, replace(driver, silence="")
    gpus, driver = _ask_nvml_within(_SILENT_AFTER_S, nvml, visible, order)
    if not driver.silence or _hides_all(visible):
        return gpus, driver
    answer = ask()
    if not answer.devices:
        return (), replace(driver, refusal=answer.error)
    numbers = _numbers(visible, len(answer.devices))
    return tuple(_as_cuda_has_it(index, device, numbers) for index, device in enumerate(answer.devices)), driver


def _hides_all(visible: str | None) -> bool:
    return visible is not None and visible.strip() in _NO_MORE


def _as_cuda_has_it(index: int, device: Device, numbers: Sequence[int]) -> Gpu:
    name, uuid, total_bytes, capability = device
    is_mig = " MIG " in name
    is_known = bool(uuid) and not is_mig
    return Gpu(
        index,
        f"GPU-{uuid}" if is_known else "",
        name,
        total_bytes,
        compute_capability=capability,
        is_mig=is_mig,
        number=numbers[index] if numbers and not is_mig else None,
    )


def _ask_nvml_within(seconds: float, nvml: Any, visible: str | None, order: str) -> tuple[tuple[Gpu, ...], Driver]:
    """Do the same as `_ask_nvml`, but give up after `seconds`: a driver that hangs would block the notebook.

    If the thread of an earlier survey still waits, no other one is started.
    """
    silent = (), Driver(silence=f"no answer within {seconds:g} s")
    if any(thread.name == _NVML_THREAD for thread in threading.enumerate()):
        return silent
    answers: list[tuple[tuple[Gpu, ...], Driver]] = []
    failures: list[BaseException] = []

    def look() -> None:
        try:
            answers.append(_ask_nvml(nvml, visible, order))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look, name=_NVML_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    return answers[0] if answers else silent


def _ask_nvml(nvml: Any, visible: str | None, order: str) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the devices that a new CUDA process would see, in its order, and what else the driver says.

    CUDA shows a process either whole GPUs or a single MIG device, and this one if there is any ("CUDA Device
    Enumeration" in NVIDIA's guide to MIG); a list that starts with one has no second entry.

    Args:
        visible: The value of CUDA_VISIBLE_DEVICES, None when unset.
        order: That of CUDA_DEVICE_ORDER.
    """
    with _connected(nvml) as (connected, silence):
        boards, is_complete = ([], True) if connected is None else _boards(connected, order)
    uncut = tuple(board.gpu.name for board in boards if board.is_cut and not board.slices)
    misread = ""
    if visible is None:
        slices = [part for board in boards for part in board.slices]
        chosen = slices or [board.gpu for board in boards if not board.is_cut]
    else:
        chosen, misread = _select(visible, boards)
    chosen = [gpu for gpu in chosen if gpu.is_mig][:1] or chosen
    are_alike = len({board.gpu.name for board in boards}) == 1
    are_cut = any(board.is_cut for board in boards)
    is_certain = is_complete and not are_cut and (are_alike or order == "PCI_BUS_ID")
    numbers = _numbers(visible, len(chosen)) if is_certain else ()
    gpus = tuple(
        replace(gpu, index=index, number=numbers[index] if numbers else None) for index, gpu in enumerate(chosen)
    )
    names = tuple(board.gpu.name for board in boards)
    return gpus, Driver(silence=silence, names=names, uncut=uncut, misread=misread)


def _numbers(visible: str | None, count: int) -> Sequence[int]:
    """Return the numbers by which CUDA_VISIBLE_DEVICES means the first `count` devices; empty if it does not use them.

    Example:
        >>> _numbers(None, 2), _numbers("2, 3,-1", 2), _numbers("GPU-aaaa1111", 1)
        (range(0, 2), [2, 3], [])
    """
    if visible is None:
        return range(count)
    numbers = [int(entry) for entry in takewhile(str.isdecimal, map(str.strip, visible.split(",")))]
    return numbers if len(numbers) >= count else []


@frozen
class _Board:
    """A physical GPU.

    Args:
        is_cut: It is in MIG mode.
        slices: Its MIG devices, if there are some.
    """

    gpu: Gpu
    bus_id: str
    speed: float
    is_cut: bool = False
    slices: tuple[Gpu, ...] = ()

    @property
    def shown(self) -> Gpu | None:
        """Return the device that CUDA shows: the GPU, or its first MIG device; None in MIG mode without an instance."""
        return next(iter(self.slices), None) if self.is_cut else self.gpu


@contextmanager
def _connected(nvml: Any) -> Iterator[tuple[Any, str]]:
    """Yield NVML, open while the block runs; without a driver to talk to yield None, with the reason."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:  # no driver, or one that does not fit its kernel module
        yield None, str(error)
        return
    try:
        yield nvml, ""
    finally:
        nvml.nvmlShutdown()


def _boards(nvml: Any, order: str) -> tuple[list[_Board], bool]:
    """Return all GPUs in the order in which CUDA numbers them, and whether these are all that the driver counts.

    CUDA documents FASTEST_FIRST only as a heuristic. Cores times clock, then the bus, reproduces it for equal GPUs; for
    different ones only CUDA_DEVICE_ORDER=PCI_BUS_ID is certain, as the doctor reports.
    """
    count = _ask(nvml, 0, nvml.nvmlDeviceGetCount)
    boards = [
        _board(nvml, handle)
        for number in range(count)
        if (handle := _ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, number)) is not None  # fell off the bus
    ]
    boards.sort(key=lambda board: board.bus_id)
    if order != "PCI_BUS_ID":
        boards.sort(key=lambda board: -board.speed)
    return boards, len(boards) == count


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
        is_cut=bool(is_cut),
        slices=tuple(_mig_devices(nvml, handle, gpu)) if is_cut else (),
    )


def _mig_devices(nvml: Any, handle: Any, board: Gpu) -> Iterator[Gpu]:
    for number in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        part = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:  # numbers have gaps
            # A slice has the compute capability of its board; NVML reports it only for the board.
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
        compute_mode=_MODES.get(_ask(nvml, 0, nvml.nvmlDeviceGetComputeMode, handle), ComputeMode.SHARED),
    )


_MODES = {1: ComputeMode.EXCLUSIVE, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE}
"""Compute modes of nvml.h: exclusive by thread, which is obsolete, prohibited, exclusive by process."""


def _ask(nvml: Any, default: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, or `default` if this driver or device has none (vGPUs and laptops often have none)."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    """Return text; older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _select(visible: str, boards: list[_Board]) -> tuple[list[Gpu], str]:
    """Return the devices of CUDA_VISIBLE_DEVICES as CUDA reads it: up to an invalid entry; none if one repeats.

    The second value says what ended the list, unless it is one of the words for "no more".
    """
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        gpu = _named(entry, boards)
        if gpu is None:
            return chosen, "" if entry in _NO_MORE else f"{entry!r} names no GPU, and CUDA stops there"
        if gpu in chosen:
            return [], f"{entry!r} names one twice, and CUDA shows none then"
        chosen.append(gpu)
    return chosen, ""


_NO_MORE = ("", "-1", "NoDevFiles")
"""Entries that are meant to hide the later ones; batch systems write the last one."""


def _named(entry: str, boards: list[_Board]) -> Gpu | None:
    """Return the device that an entry means: a number, `GPU-…` or `MIG-…`; an unambiguous prefix is enough."""
    if entry.isdecimal():
        return boards[int(entry)].shown if int(entry) < len(boards) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [(board.gpu.uuid, board.shown) for board in boards]
    everything += [(part.uuid, part) for board in boards for part in board.slices]
    fitting = [gpu for uuid, gpu in everything if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


# --- cores and memory ---------------------------------------------------------------------------------------------


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may keep busy: its affinity mask, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(root, "cpu"):
        quota, _, period = _read(f"{group}/cpu.max").partition(" ")  # version 2: "150000 100000" or "max 100000"
        quota = quota or _read(f"{group}/cpu.cfs_quota_us")  # version 1: -1 for no limit
        period = period or _read(f"{group}/cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory(root: Path = Path("/")) -> MemoryInfo:
    """Return the machine's memory, or the container's if that is less."""
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
    return MemoryInfo(total, available)


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes killed for memory in this control group; None if that is not reported."""
    for group in _control_groups(root, "memory"):
        counters = _read(f"{group}/memory.events") or _read(f"{group}/memory.oom_control")  # version 2, version 1
        for line in counters.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def _control_groups(root: Path, controller: str) -> Iterator[str]:
    """Yield the directories whose limits apply to this process, innermost first; cgroup version 1 or 2.

    They are strings, as `_read` takes them: every launch reads some twenty of these files, and a `Path` costs more than
    a file.
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
