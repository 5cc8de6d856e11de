"""Choose the devices of a run and the start method of its ranks, before anything starts. Runs in the kernel.

Pure functions of a survey, a request and the `ProcessState`, which tells whether this process can fork and its forks
would work: they read no environment, touch no device and start nothing. An impossible request is refused here, in one
sentence that says what is possible.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from nbaccel.base.forkable import why_forks_fail
from nbaccel.base.hardware import Gpu, Survey, threads_asked_for
from nbaccel.base.quantities import in_gb, plural
from nbaccel.base.settings import START_METHODS
from nbaccel.errors import CannotFork, LaunchRefused, NoSuchDevice
from nbaccel.launching.ipc.spec import Devices, Start

__all__ = [
    "ProcessState",
    "choose_devices",
    "choose_start",
    "threads_per_rank",
]

COPY_LIMIT_BYTES = 1_000_000_000
"""Bytes that one process may hold on a device and still be copied to a rank; more may not fit beside them."""


def choose_devices(requested_processes: int | None, devices: str | None, cpu: bool, survey: Survey) -> Devices:
    """Return the number of ranks, and their devices.

    Args:
        requested_processes: None for as many as there are devices.
        devices: Numbers in CUDA's order or UUIDs, "2,3"; None for as many of the visible ones as there are ranks. If
            more are named than there are ranks, each rank has an equal share of them.

    Raises:
        NoSuchDevice: More processes than GPUs, a GPU that does not exist, or named ones that have no equal shares.
        LaunchRefused: Fewer than one process, or a request that contradicts itself.
    """
    if requested_processes is not None and requested_processes < 1:
        raise LaunchRefused(f"num_processes (-n) must be 1 or more, or auto; got {requested_processes}.")
    if cpu and devices is not None:
        raise LaunchRefused(f"--cpu and --devices {devices} contradict each other: leave one of them out.")
    if cpu:
        return Devices(requested_processes or 1, hides_gpus=True)
    gpus = survey.gpus if devices is None else _pick(devices, survey.gpus, survey.why_no_gpu)
    if not gpus and survey.tpu:
        raise NoSuchDevice(
            f"a TPU is here ({survey.tpu}), which nbaccel does not drive: train on it with Accelerate and torch_xla, "
            "or choose --cpu, cpu=True in a call, for ranks on the CPU."
        )
    if not gpus:
        return Devices(requested_processes or 1, why_no_gpu=survey.why_no_gpu)
    wanted = requested_processes or len(gpus)
    if wanted > len(gpus):
        raise NoSuchDevice(
            f"{wanted} processes were asked for (-n {wanted}), but there {_are(len(gpus), 'GPU')}: {_listed(gpus)}. "
            f"Each rank needs its own: use -n {len(gpus)}, or --cpu to run {wanted} ranks on the CPU."
        )
    if devices is not None and len(gpus) % wanted:
        fewer = len(gpus) - len(gpus) % wanted
        raise NoSuchDevice(
            f"--devices {devices} names {len(gpus)} GPUs for {wanted} ranks (-n {wanted}), and each has as many as the "
            f"others: name {fewer}{f' or {fewer + wanted}' if fewer + wanted <= len(survey.gpus) else ''} of them."
        )
    return Devices(wanted, gpus[:wanted] if devices is None else gpus)


# What a library does to CUDA is not seen by torch's flag: https://github.com/huggingface/accelerate/issues/3925.
def choose_start(
    requested: str,
    *,
    world_size: int,
    platform_can_fork: bool,
    why_forks_fail: str | None,
    since: str | None = None,
    lacks: str | None = None,
    bytes_on_device: int = 0,
    stays_here: str = "",
) -> Start:
    """Return the start method of the ranks.

    Args:
        requested: "auto", or the method that the user insists on.
        platform_can_fork: False on macOS, and where MPS or XLA holds the device.
        why_forks_fail: The reason why ranks forked from this process would fail; None if they would not.
        since: The origin of that reason, "cell [7]", if known.
        lacks: What a fork would lack of a library that the cell leads to, as half a sentence; None if nothing.
        bytes_on_device: Bytes on a device of the names that the cell reads.
        stays_here: A model that it reads and that cannot be sent, in words; empty if there is none.

    Raises:
        CannotFork: Forked ranks were insisted on and could not work.
        LaunchRefused: Several ranks where only one process is possible.
    """
    if requested not in START_METHODS:
        raise LaunchRefused(f"start must be one of {', '.join(START_METHODS)}; got {requested!r}.")
    if requested == "inline" and world_size > 1:
        raise LaunchRefused(
            f"--start inline runs in the notebook's own process, so it cannot be {world_size} ranks: "
            "use -n 1, or leave --start out."
        )
    if requested == "inline":
        return Start("inline", "asked for", is_explicit=True)
    if not platform_can_fork:
        return _start_without_fork(requested, world_size)
    if requested == "fork" and why_forks_fail is not None:
        raise CannotFork(
            f"{why_forks_fail[0].upper()}{why_forks_fail[1:]}, so forked ranks could not train.\n"
            f'  First seen: {since or "before nbaccel was loaded"}. start_method="fork" was asked for; '
            "leave it out and the ranks start from a clean\n  process instead, or restart the kernel."
        )
    if requested == "fork" and lacks is not None:
        raise CannotFork(
            f"{lacks}: forked ranks would wait for them for ever, or be ended. Leave --start fork out, and the ranks "
            "start from a clean process instead, or make what needs them in this cell after a restart of the kernel."
        )
    if requested != "auto":
        return Start(requested, "asked for", is_explicit=True)
    if why_forks_fail is None and lacks is not None:
        return Start("zygote", lacks)
    if why_forks_fail is None:
        return Start("fork", "the notebook has not used CUDA")
    if world_size == 1 and bytes_on_device > COPY_LIMIT_BYTES:
        return Start("inline", f"the names it reads hold {in_gb(bytes_on_device)} on the device, too much to copy")
    if world_size == 1 and stays_here:
        return Start("inline", f"{stays_here}, and cannot be sent")
    return Start("zygote", f"{why_forks_fail}{f' since {since}' if since else ''}")


def threads_per_rank(cores: int, ranks: int, own: int | None = None) -> int:
    """Return the CPU threads of each rank: an equal share, at least one, and no more than the launching process has.

    Args:
        own: `ProcessState.threads`.

    Example:
        >>> threads_per_rank(cores=4, ranks=2), threads_per_rank(cores=2, ranks=3), threads_per_rank(4, 1, own=2)
        (2, 1, 2)
    """
    return max(1, min(cores // ranks, own or cores))


def _start_without_fork(requested: str, world_size: int) -> Start:
    if requested != "auto":
        raise CannotFork(
            f"--start {requested} needs a system that can fork, and this one cannot do so safely: "
            "leave --start out, and one rank runs in the notebook's own process."
        )
    if world_size > 1:
        raise CannotFork(
            f"{world_size} ranks need a system that can fork, and this one cannot do so safely (macOS, MPS or XLA): "
            "use -n 1, which runs in the notebook's own process."
        )
    return Start("inline", "this system cannot fork safely")


def _pick(devices: str, gpus: tuple[Gpu, ...], why_none: str) -> tuple[Gpu, ...]:
    picked: list[Gpu] = []
    for entry in (part.strip() for part in devices.split(",")):
        fitting = [gpu for gpu in gpus if _fits(entry, gpu)]
        if len(fitting) != 1:
            what = f"there {_are(len(gpus), 'GPU')}: {_listed(gpus)}" if gpus else why_none or "NVML sees no GPU here"
            remedy = "Name some of these, or leave --devices out" if gpus else "Leave --devices out to run on the CPU"
            problem = f"{entry!r} fits {len(fitting)} GPUs" if fitting else f"there is no GPU {entry!r}"
            raise NoSuchDevice(f"--devices {devices}: {problem}; {what}. {remedy}.")
        if fitting[0] in picked:
            raise NoSuchDevice(f"--devices {devices}: GPU {entry!r} is named twice, and each rank needs its own.")
        picked += fitting
    return tuple(picked)


def _fits(entry: str, gpu: Gpu) -> bool:
    return entry == str(gpu.index) or (entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry))


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {plural(number, noun)}"


def _listed(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(f"{gpu.index} {gpu.name}" for gpu in gpus)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Facts of this process that preflight needs.

    Args:
        can_fork: Ranks can be separate processes here.
        why_forks_fail: The reason why forks would fail; None if they would not.
        threads: Number of CPU threads that the user, the environment or torch has set; None if nothing has set it.
    """

    can_fork: bool
    why_forks_fail: str | None
    threads: int | None = None

    @classmethod
    def now(cls) -> ProcessState:
        return cls(can_fork=_can_fork(), why_forks_fail=why_forks_fail(), threads=_threads())


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return threads_asked_for() if torch is None else int(torch.get_num_threads())


def _can_fork() -> bool:
    """Return whether this Linux has pidfds (5.3, 2019), which end a rank when its kernel dies; ranks need them."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
