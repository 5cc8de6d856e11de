"""Preflight: chooses the devices of a run, and the start method of its ranks, in the kernel before anything starts.

Pure functions of a survey and a request: they read no environment, touch no device and start nothing. An impossible
request is refused here, in one sentence that says what is possible.

State of the launching process: can it fork, and would its forks work. Runs in the kernel; touches no device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

from nbaccel.errors import CannotFork, LaunchRefused, NoSuchDevice
from nbaccel.forkable import why_forks_fail
from nbaccel.hardware import Gpu, Survey, threads_asked_for
from nbaccel.launch.ipc.spec import VISIBLE_DEVICES, Start
from nbaccel.settings import START_METHODS

__all__ = [
    "Devices",
    "ProcessState",
    "choose_devices",
    "choose_start",
    "threads_per_rank",
]

COPY_LIMIT_BYTES = 1_000_000_000
"""Bytes that one process may hold on a device and still be copied to a rank; more may not fit beside them."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of the ranks of a run: local rank r on `gpus[r]`, or all of them on the CPU.

    gpus: as many as there are ranks, or none.  hides_gpus: ranks must not see the existing GPUs.
    why_no_gpu: see `Survey.why_no_gpu`; empty if the CPU was asked for.  is_here: it is a run in this process.
    """

    num_processes: int
    gpus: tuple[Gpu, ...] = ()
    hides_gpus: bool = False
    why_no_gpu: str = ""
    is_here: bool = False

    @property
    def device_type(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def weakest_gpu(self) -> Gpu | None:
        """Return the GPU that limits the precision of all ranks; None on the CPU."""
        return min(self.gpus, key=lambda gpu: gpu.compute_capability, default=None)

    def names(self) -> tuple[str, ...]:
        """Return the device of each rank, as a person calls it; empty on the CPU."""
        return tuple(f"GPU {gpu.index}" for gpu in self.gpus)

    def environ(self) -> dict[str, str]:
        """Return the variables that show every rank these devices, numbered by local rank.

        They are numbers where these are certain to mean these devices, since some libraries read them; else UUIDs,
        because numbers mean something else once CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER changes. Nothing is set if a
        GPU has no certain name, nor for a run in this process: CUDA reads the variable once, and would hide the other
        GPUs, or all of them, from the notebook for good.
        """
        if self.is_here:
            return {}
        if self.gpus:
            numbers = [str(gpu.number) for gpu in self.gpus if gpu.number is not None]
            names = numbers if len(numbers) == len(self.gpus) else [gpu.uuid for gpu in self.gpus]
            return {VISIBLE_DEVICES: ",".join(names)} if all(names) else {}
        return {VISIBLE_DEVICES: ""} if self.hides_gpus else {}

    def started_by(self, start: Start) -> Devices:
        """Return the same devices for ranks that start by `start`.

        Raises:
            LaunchRefused: the run is to be in this process, which computes on its first device, and another is asked
            for.
        """
        if start.method != "inline":
            return self
        if self.gpus and self.gpus[0].index != 0:
            gpu = self.gpus[0]
            raise LaunchRefused(
                f"the run would be in the notebook's own process (inline: {start.reason}), where CUDA cannot be given "
                f"other devices: leave --devices out and say torch.device('cuda', {gpu.index}) in the code for "
                f"{gpu.name}, or use --start zygote, whose rank sees that GPU alone."
            )
        return replace(self, is_here=True)

    @property
    def can_be_told_apart(self) -> bool:
        """Return whether `environ` names the devices, so that each rank can be shown its own alone."""
        return bool(self.environ().get(VISIBLE_DEVICES))

    def __str__(self) -> str:
        ranks = _count(self.num_processes, "rank")
        if self.gpus:
            return f"{ranks} on {', '.join(f'GPU {gpu.index} {gpu.name}' for gpu in self.gpus)}"
        return f"{ranks} on the CPU{self.why_no_gpu and f', NOT on a GPU: {self.why_no_gpu}'}"

    def in_short(self, width: int) -> str:
        """Return the text in at most `width` characters if possible: the names of the GPUs are left out first.

        >>> Devices(2).in_short(20)
        '2 ranks on CPU'
        >>> t4s = tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 16 * 10**9) for index in range(4))
        >>> Devices(4, t4s).in_short(40), Devices(4, t4s).in_short(20)
        ('4 ranks on GPU 0-3 (Tesla T4)', '4 ranks on GPU 0-3')
        """
        ranks = _count(self.num_processes, "rank")
        if not self.gpus:
            return f"{ranks} on CPU"
        plain = f"{ranks} on GPU {_numbers([gpu.index for gpu in self.gpus])}"
        named = f"{plain} ({', '.join(dict.fromkeys(gpu.name for gpu in self.gpus))})"
        return named if len(named) <= width else plain


def choose_devices(requested_processes: int | None, devices: str | None, cpu: bool, survey: Survey) -> Devices:
    """Return the number of ranks, and their devices.

    requested_processes: None for as many as there are devices.
    devices: numbers in CUDA's order or UUIDs, "2,3"; None for all that are visible.

    Raises:
        NoSuchDevice: more processes than GPUs, or a GPU that does not exist.
        LaunchRefused: fewer than one process, or a request that contradicts itself.
    """
    if requested_processes is not None and requested_processes < 1:
        raise LaunchRefused(f"num_processes (-n) must be 1 or more, or auto; got {requested_processes}.")
    if cpu and devices is not None:
        raise LaunchRefused(f"--cpu and --devices {devices} contradict each other: leave one of them out.")
    if cpu:
        return Devices(requested_processes or 1, hides_gpus=True)
    gpus = survey.gpus if devices is None else _pick(devices, survey.gpus, survey.why_no_gpu)
    if not gpus:
        return Devices(requested_processes or 1, why_no_gpu=survey.why_no_gpu)
    wanted = requested_processes or len(gpus)
    if wanted > len(gpus):
        raise NoSuchDevice(
            f"{wanted} processes were asked for (-n {wanted}), but there {_are(len(gpus), 'GPU')}: {_listed(gpus)}. "
            f"Each rank needs its own: use -n {len(gpus)}, or --cpu to run {wanted} ranks on the CPU."
        )
    return Devices(wanted, gpus[:wanted])


def choose_start(
    requested: str,
    *,
    world_size: int,
    platform_can_fork: bool,
    why_forks_fail: str | None,
    since: str | None = None,
    bytes_on_device: int = 0,
) -> Start:
    """Return the start method of the ranks.

    requested: "auto", or the method that the user insists on.
    platform_can_fork: false on macOS, and where MPS or XLA holds the device.
    why_forks_fail: the reason why ranks forked from this process would fail; None if they would not.
    since: the origin of that reason, "cell [7]", if known.
    bytes_on_device: bytes on a device of the names that the cell reads.

    Raises:
        CannotFork: forked ranks were insisted on and could not work.
        LaunchRefused: several ranks where only one process is possible.
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
    if requested != "auto":
        return Start(requested, "asked for", is_explicit=True)
    if why_forks_fail is None:
        return Start("fork", "the notebook has not used CUDA")
    if world_size == 1 and bytes_on_device > COPY_LIMIT_BYTES:
        return Start("inline", f"the names it reads hold {_gb(bytes_on_device)} on the device, too much to copy")
    return Start("zygote", f"{why_forks_fail}{f' since {since}' if since else ''}")


def threads_per_rank(cores: int, ranks: int, own: int | None = None) -> int:
    """Return the CPU threads of each rank: an equal share, at least one, and no more than the launching process has.

    own: `ProcessState.threads`.

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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {_count(number, noun)}"


def _listed(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(f"{gpu.index} {gpu.name}" for gpu in gpus)


def _numbers(numbers: list[int]) -> str:
    """Format the numbers of GPUs.

    >>> _numbers([0, 1]), _numbers([0, 1, 2, 3]), _numbers([1, 3, 4])
    ('0, 1', '0-3', '1, 3, 4')
    """
    is_range = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_range else ", ".join(map(str, numbers))


def _gb(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 1e9:.1f} GB"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Facts of this process that preflight needs.

    can_fork: ranks can be separate processes here.  why_forks_fail: the reason why forks would fail; None if they would
    not.
    threads: number of CPU threads that the user, the environment or torch has set; None if nothing has set it.
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
