"""Values that pass from the kernel to a run. Built in the kernel, read in ranks.

A `LaunchSpec` says what to run and on which devices; a `Task` is the work of one rank; a `WorkerBoot` holds the facts
that one rank needs before any user code runs.
"""

from __future__ import annotations

import importlib
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from nbaccel.base.hardware import Gpu
from nbaccel.base.quantities import number_spans, plural
from nbaccel.base.settings import OOM_CHOICES, STOP, RunSettings, may_change_loops
from nbaccel.base.world import World
from nbaccel.errors import FeatureMissing, LaunchRefused
from nbaccel.features import feature
from nbaccel.namespace.kind import Change
from nbaccel.namespace.payload import Payload
from nbaccel.namespace.pickling import Places
from nbaccel.options.given_flags import GivenFlag

if TYPE_CHECKING:
    from nbaccel.launching.ipc.shared_namespace import SharedNamespace

__all__ = [
    "Devices",
    "ForkServer",
    "LaunchSpec",
    "ProgramLimit",
    "Results",
    "RunEnd",
    "Start",
    "Task",
    "TaskWatch",
    "WorkerBoot",
    "load_named",
    "set_up",
]


def set_up(setup: str | None, task: Task) -> TaskWatch | None:
    """Set up this rank for its task and later ones; return what watches them, if something does.

    Where the launch names no setup, and a flag changes loops, they are changed.
    """
    if setup is not None:
        binds = {} if task.binds_accelerator else {"binds_accelerator": False}
        found: TaskWatch | None = load_named(setup)(task.namespace, **binds)
        return found
    if not (may_change_loops() and RunSettings.from_env().changes_loops):
        return None
    with suppress(FeatureMissing):  # then the flag holds for what is prepared
        changing: TaskWatch = feature("loops of a launched function")(task.namespace)
        return changing
    return None


def load_named(reference: str) -> Any:
    """Return the object that "package.module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class Results:
    """The values that a rank sends back.

    Args:
        values: Objects by name, all in one pickle so that aliases hold.
        missing: Names that were asked for and do not exist, with the reason.
        optional: Names in `values` that are dropped silently when they cannot be sent.
        facts: Small JSON about the run: sizes, names not asked for, the last expression's display.
        changes: Changes to objects that the kernel has.
        places: Where these objects are; None if only values go back.
        may_lack: Whether a value is sent without its parts that cannot be sent, and `facts["lacks"]` names these.
        parts: Objects of which another rank sends the value, by name: of these only this rank's rows of sharded tensors
            go.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    places: Places | None = None
    may_lack: bool = False
    parts: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC):
    """The work of one rank. The same object runs in every rank of a run."""

    namespace: dict[str, Any] | None = None
    """The globals that the code of a notebook cell runs in; ranks bind `accelerator` there."""

    home: SharedNamespace | None = None
    """The namespace of the task in persistent ranks; None in ranks that end with it."""

    result_rank: int = 0
    """The rank whose values go back."""

    debugged: int | None = None
    """The rank whose `breakpoint()` and errors open a debugger in the notebook; None: such calls are refused."""

    knows_ranks: bool = True
    """True if its code is written for several ranks; else all ranks continue with the kernel's random numbers."""

    binds_accelerator: bool = True
    """False if its code forms torch's process group by itself: the `accelerator` of a cell comes with one."""

    first_card: str = ""
    """The words by which its code names the first GPU that it sees; empty if it has none. See `card_numbers`."""

    flags: tuple[GivenFlag, ...] = ()
    """The flags of the run whose effect depends on how its code trains, see `given_flags`."""

    saves_itself: ClassVar[bool] = False
    """True if a loop that prepares nothing is saved too, and goes on from a checkpoint."""

    reference: ClassVar[str]
    """The class as "module:Class", by which a zygote and a persistent rank find it."""

    def begin(self, rank: int) -> None:  # noqa: B027  # few tasks have to
        """Record facts about the time before `run`, in a rank."""

    @abstractmethod
    def run(self) -> None:
        """Run the user's code, in a rank."""

    @abstractmethod
    def results(self, rank: int) -> Results:
        """Return the values to send back, after `run` returned or raised, in a rank."""

    @abstractmethod
    def pack(self) -> Payload:
        """Return the task as a payload for a process that is not a copy of this one, in the kernel.

        Raises:
            CannotSend: Names the values that cannot be sent.
        """

    @classmethod
    @abstractmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        """Rebuild the task from its payload, in a rank.

        Args:
            home: The names of a persistent rank; None in a rank that has just begun.
        """

    def names_to_send(self) -> list[str]:
        """Return the names of `namespace` that a process which is no copy of the kernel needs."""
        return []

    def values_to_send(self) -> dict[str, Any]:
        """Return what such a process gets, by name: also what functions and classes among it read of the notebook."""
        return {}

    def own_codes(self) -> Sequence[types.CodeType]:
        """Return the code of the task that is no function of the notebook."""
        return ()

    def left_behind(self) -> tuple[str, dict[str, Any]]:
        """Return a file, and the names that its top level has bound, in a rank whose work is over."""
        return "", {}

    def named_objects(self) -> Sequence[str]:
        """Return the objects that it loads in a rank, as "module:name"."""
        return ()

    def by_reference(self) -> dict[int, str]:
        """Return classes and functions that the kernel has too, by id; they are sent back by name."""
        return {}

    def anchored(self, name: str) -> Any:
        """Return the kernel's object behind an anchor."""
        raise LookupError(name)

    def placed(self, token: Any) -> Any:
        """Return the kernel's object at a place.

        Raises:
            LookupError: There is nothing, or another object.
        """
        raise LookupError(str(token))


@runtime_checkable
class TaskWatch(Protocol):
    """Keeps one training equal in all ranks if its program does not. A setup may make one, in each rank.

    It does nothing before `begin`, and nothing after `end` or `stop`: a task in which not all ranks take part has none.
    """

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task; called before the task's `begin` and `run`.

        Args:
            namespace: The globals of the task, if it is a cell.
        """

    def end(self) -> None:
        """End a task that finished. It may wait for peers; an exception raised here is the task's error."""

    def stop(self) -> None:
        """End a task that ended otherwise. It waits for no rank, and never raises."""

    def keeps(self, tensors: Sequence[Any]) -> bool:
        """Return whether all `tensors` are kept equal in all ranks; with no tensors: whether the watch is active."""

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        """Return whether the program made `tensors` for one batch, so that ranks rightly have different ones."""

    def note_wrapper(self) -> None:
        """Note that the program has wrapped a model for several ranks by itself, so that it is written for them."""

    @property
    def fails_on_parts(self) -> str:
        """Return how the task has failed on parts of batches, in a way that it may not on whole ones; "" if not."""

    @property
    def is_at_work(self) -> bool:
        """Return whether the watch has trained something in this task."""

    def explain(self) -> str:
        """Return why the watch does not keep equal what ranks train separately; empty if there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of the ranks of a run: an equal share of GPUs for each, see `of_rank`, or all of them on the CPU.

    Args:
        gpus: The GPUs, a multiple of the number of ranks; empty for the CPU.
        hides_gpus: Whether ranks must not see the existing GPUs.
        why_no_gpu: See `Survey.why_no_gpu`; empty if the CPU was asked for.
        is_here: Whether it is a run in this process.
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

    @property
    def gpus_per_rank(self) -> int:
        """Return the number of GPUs of each rank, 0 on the CPU."""
        return len(self.gpus) // self.num_processes

    def of_rank(self, rank: int) -> tuple[Gpu, ...]:
        """Return the GPUs of local rank `rank`; it computes on the first of them."""
        return self.gpus[rank * self.gpus_per_rank : (rank + 1) * self.gpus_per_rank]

    def each(self) -> Iterator[tuple[int, Gpu]]:
        """Yield every GPU with the local rank that has it."""
        for number, gpu in enumerate(self.gpus):
            yield number // self.gpus_per_rank, gpu

    def names(self) -> tuple[str, ...]:
        """Return the device of each rank, as a person calls it; empty on the CPU."""
        ranks = range(self.num_processes) if self.gpus else ()
        return tuple(f"GPU {number_spans([gpu.index for gpu in self.of_rank(rank)])}" for rank in ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the machine of each rank; empty if all are on this one."""
        return ()

    def environ(self) -> dict[str, str]:
        """Return the variables that show every rank these devices, in their order.

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
            return {_VISIBLE_DEVICES: ",".join(names)} if all(names) else {}
        return {_VISIBLE_DEVICES: ""} if self.hides_gpus else {}

    def started_by(self, start: Start) -> Devices:
        """Return the same devices for ranks that start by `start`.

        Raises:
            LaunchRefused: The run is to be in this process, which computes on its first device, and another is asked
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
        return bool(self.environ().get(_VISIBLE_DEVICES))

    def __str__(self) -> str:
        ranks = plural(self.num_processes, "rank")
        if self.gpus:
            return f"{ranks} on {', '.join(f'GPU {gpu.index} {gpu.name}' for gpu in self.gpus)}{self._shares}"
        return f"{ranks} on the CPU{self.why_no_gpu and f', NOT on a GPU: {self.why_no_gpu}'}"

    def in_short(self, width: int) -> str:
        """Return the text in at most `width` characters if possible: the names of the GPUs are left out first.

        Example:
            >>> Devices(2).in_short(20)
            '2 ranks on CPU'
            >>> t4s = tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 16 * 10**9) for index in range(4))
            >>> Devices(4, t4s).in_short(40), Devices(4, t4s).in_short(20)
            ('4 ranks on GPU 0-3 (Tesla T4)', '4 ranks on GPU 0-3')
            >>> Devices(2, t4s).in_short(40)
            '2 ranks on GPU 0-3, 2 each (Tesla T4)'
        """
        ranks = plural(self.num_processes, "rank")
        if not self.gpus:
            return f"{ranks} on CPU"
        plain = f"{ranks} on GPU {number_spans([gpu.index for gpu in self.gpus])}{self._shares}"
        named = f"{plain} ({', '.join(dict.fromkeys(gpu.name for gpu in self.gpus))})"
        return named if len(named) <= width else plain

    @property
    def _shares(self) -> str:
        """Return how many GPUs each of several ranks has, if that is not one."""
        return f", {self.gpus_per_rank} each" if self.gpus_per_rank > 1 < self.num_processes else ""


PartName = tuple[str, str]
"""A `RankPart`, as "module:class", and its argument."""


class ForkServer(Protocol):
    """A process that starts ranks when it is asked to."""

    def get_ready(self) -> None:
        """Wait until it can.

        Raises:
            LaunchRefused: It cannot.
        """

    def fork(self, boots: Sequence[WorkerBoot], reference: str, payload: Payload) -> list[Any]:
        """Start one rank for each boot record, all or none, and return their `WorkerProcess`es.

        Args:
            boots: The boot records, in the order of ranks.
            reference: The class of their task, see `Task`.
            payload: The packed task.

        Raises:
            LaunchRefused: No rank was started.
        """


@dataclass(frozen=True, slots=True)
class ProgramLimit:
    """A limit that a program has set itself, as by ``Accelerator(time_limit="11h30m")``.

    Args:
        at: End of the limit, in `time.monotonic()`.
        seconds: Duration of the limit.
    """

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run whose ranks do not end it, and what becomes of them.

    Args:
        timeout_s: Seconds after which the run is stopped, None for never.
        program_limit: A limit that an earlier attempt of this run had set itself.
        hang_timeout_s: Seconds without a step or a collective on any rank after which the run is ended, None for never.
        ends_waiting: Whether a run in which all ranks wait in collectives, and none goes on, is ended after a few
            seconds.
        wants_results: Whether a failing run waits for rank 0's results before it is ended.
        restarts_ranks: Whether a rank that dies is started again alone, while the others work; for independent ranks
            only.
        stays: Whether the ranks stay when the task is done, and wait for the next.
    """

    timeout_s: float | None = None
    program_limit: ProgramLimit | None = None
    hang_timeout_s: float | None = None
    ends_waiting: bool = False
    wants_results: bool = True
    restarts_ranks: bool = False
    stays: bool = False

    def after(self, seconds: float) -> RunEnd:
        """Return the end of a run that is started again after `seconds`, which count for the time limit."""
        return self if self.timeout_s is None else replace(self, timeout_s=max(0.0, self.timeout_s - seconds))


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One run.

    Args:
        task: The work of every rank.
        devices: The devices of the ranks, as they were before the run, and how many ranks there are.
        start: The start method, and the reason.
        settings: What was chosen for every rank.
        setup: "module:function" called in every rank with the task's namespace before the task runs; it may return a
            `TaskWatch`, which watches this task and all later ones.
        threads: CPU threads of each rank.
        end: What ends the run, besides its ranks.
        oom: One of `settings.OOM_CHOICES`.
        no_restart: Why the run cannot be started a second time; empty if it can.
        own_devices: Whether each rank sees only its own devices, the first as number 0; otherwise every rank sees all
            of them.
        parts: What features add to the ranks, see `RankPart`.
        fork_server: Starts the ranks of `start` "nodes", on other machines; None for ranks of this one.
    """

    task: Task
    devices: Devices
    start: Start
    settings: RunSettings = field(default_factory=RunSettings)
    setup: str | None = None
    threads: int = 1
    end: RunEnd = RunEnd()
    oom: str = STOP
    no_restart: str = ""
    own_devices: bool = False
    parts: tuple[PartName, ...] = ()
    fork_server: ForkServer | None = None

    def __post_init__(self) -> None:
        if self.oom not in OOM_CHOICES:
            raise ValueError(f"oom must be one of {', '.join(map(repr, OOM_CHOICES))}, got {self.oom!r}")

    def ending(self, **changes: Any) -> LaunchSpec:
        """Return the specification of a run that ends otherwise; `changes` are fields of `RunEnd`."""
        return replace(self, end=replace(self.end, **changes))

    @property
    def world_size(self) -> int:
        return self.devices.num_processes

    @property
    def named_objects(self) -> list[str]:
        """Return the objects that ranks load by name: the setup, parts, and those of the task, as "module:name"."""
        setup = [] if self.setup is None else [self.setup]
        return [*setup, *(name for name, _ in self.parts), *self.task.named_objects()]

    def load_for_ranks(self) -> None:
        """Load what ranks with these settings need of the modules of `named_objects`, before they are forked."""
        for name in self.named_objects:
            module = importlib.import_module(name.partition(":")[0])
            if (load := getattr(module, "load_for_ranks", None)) is not None:
                load(self.settings, self.world_size)

    @property
    def watches_flags(self) -> bool:
        """Return whether ranks may have to say that a flag has no effect; of those that stay, each task has its own."""
        return bool(self.task.flags) or self.end.stays

    def environ_of(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank, made where its process is started: its settings and its devices."""
        devices = self.devices.environ()
        if self.own_devices:
            share = self.devices.gpus_per_rank
            own = devices[_VISIBLE_DEVICES].split(",")[rank * share : (rank + 1) * share]
            devices[_VISIBLE_DEVICES] = ",".join(own)
        return self.settings.environ() | devices


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """The facts that one rank gets at its start. Descriptors are valid in the rank's process.

    Args:
        sees_one_card: Whether this rank, one of several, sees a single device, its own.
        run_nonce: Marks places in the output pipe where a rich message belongs.
        store_path: The file through which the ranks of the run find each other.
        parts: See `LaunchSpec`.
        watches_flags: See `LaunchSpec`.
        address: This machine's address for ranks on other machines; empty if all ranks are here.
    """

    world: World
    environ: Mapping[str, str]
    sees_one_card: bool
    setup: str | None
    threads: int
    run_nonce: str
    store_path: str
    parts: tuple[PartName, ...]
    watches_flags: bool
    kernel_pidfd: int
    channel_fd: int
    stdout_fd: int
    stderr_fd: int
    page_fd: int
    ring_fd: int
    address: str = ""

    FDS: ClassVar[tuple[str, ...]] = ("kernel_pidfd", "channel_fd", "stdout_fd", "stderr_fd", "page_fd", "ring_fd")


_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA shows a process some of the devices, and numbers them."""


@dataclass(frozen=True, slots=True)
class Start:
    """The start method of a run's ranks ("fork", "zygote" or "inline"), and the reason, as half a sentence.

    Args:
        is_explicit: Whether the user insisted on the method, so no other may be tried in its place.

    Example:
        >>> str(Start("fork", "the notebook has not used CUDA"))
        'fork: the notebook has not used CUDA'
    """

    method: str
    reason: str
    is_explicit: bool = False

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}"
