"""Values that pass from the kernel to a run. Built in the kernel, read in ranks.

A `LaunchSpec` says what to run and on how many ranks; a `Task` is the work of one rank; a `RankBoot` holds the facts
that one rank needs before any user code runs.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from nbaccel.hardware import Gpu
from nbaccel.launch.home import Home
from nbaccel.launch.limits import ProgramLimit
from nbaccel.launch.preflight import VISIBLE_DEVICES, Start
from nbaccel.launch.wire.kind import Change
from nbaccel.launch.wire.parcel import Parcel, pack, unpack
from nbaccel.launch.wire.pickling import Places
from nbaccel.settings import OOM_CHOICES, STOP
from nbaccel.world import World

__all__ = ["FunctionTask", "LaunchSpec", "RankBoot", "Results", "Task", "TaskWatch", "load_named"]


def load_named(reference: str) -> Any:
    """Return the object that "package.module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class Results:
    """The values that a rank sends back.

    values: objects by name, all in one pickle so that aliases hold.
    missing: names that were asked for and do not exist, with the reason.
    optional: names in `values` that are dropped silently when they cannot be sent.
    facts: small JSON about the run: sizes, names not asked for, the last expression's display.
    changes: changes of objects that the kernel has.  places: the places of these; None if only values go back.
    may_lack: a value is sent without its parts that cannot be sent, and `facts["lacks"]` names these.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    places: Places | None = None
    may_lack: bool = False


class Task(ABC):
    """The work of one rank. The same object runs in every rank of a run."""

    namespace: dict[str, Any] | None = None
    """The globals that the code of a notebook cell runs in; ranks bind `accelerator` there."""

    home: Home | None = None
    """The namespace of the task in persistent ranks; None in ranks that end with it."""

    speaker: int = 0
    """The rank whose values go back."""

    debugged: int | None = None
    """The rank whose `breakpoint()` and errors open a debugger in the notebook; None: such calls are refused."""

    knows_ranks: bool = True
    """True if its code is written for several ranks; else all ranks continue with the kernel's random numbers."""

    first_card: str = ""
    """The words by which its code names the first GPU that it sees; empty if it has none. See `card_numbers`."""

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
    def pack(self) -> Parcel:
        """Return the task as a parcel for a process that is not a copy of this one, in the kernel.

        Raises:
            CannotSend: names the values that cannot be sent.
        """

    @classmethod
    @abstractmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        """Rebuild the task from its parcel, in a rank.

        home: of a persistent rank; None in a rank that has just begun.
        """

    def names_to_send(self) -> list[str]:
        """Return the names of `namespace` that a process which is no copy of the kernel needs."""
        return []

    def left_behind(self) -> tuple[str, dict[str, Any]]:
        """Return a file, and the names that its top level has bound, in a rank whose work is over."""
        return "", {}

    def anchors(self) -> dict[int, str]:
        """Return classes and functions that the kernel has too, by id; they are sent back by name."""
        return {}

    def anchored(self, name: str) -> Any:
        """Return the kernel's object behind an anchor."""
        raise LookupError(name)

    def placed(self, token: Any) -> Any:
        """Return the kernel's object at a place.

        Raises:
            LookupError: there is nothing, or another object.
        """
        raise LookupError(str(token))


@runtime_checkable
class TaskWatch(Protocol):
    """Keeps one training equal in all ranks if its program does not. A setup may make one, in each rank.

    It does nothing before `begin`, and nothing after `end` or `stop`: a task in which not all ranks take part has none.
    """

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task; called before the task's `begin` and `run`.  namespace: its globals, if it is a cell."""

    def end(self) -> None:
        """End a task that finished. It may wait for peers; an exception raised here is the task's error."""

    def stop(self) -> None:
        """End a task that ended otherwise. It waits for no rank, and never raises."""

    def keeps(self, tensors: Sequence[Any]) -> bool:
        """Return whether all `tensors` are kept equal in all ranks; with no tensors: whether the watch is active."""

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        """Return whether the program made `tensors` for one batch, so that ranks rightly have different ones."""

    @property
    def is_at_work(self) -> bool:
        """Return whether the watch has trained something in this task."""

    def explain(self) -> str:
        """Return why the watch does not keep equal what ranks train separately; empty if there is nothing to say."""


class FunctionTask(Task):
    """Calls a function in every rank and sends its value back."""

    reference = "nbaccel.launch.spec:FunctionTask"

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        debugged: int | None = None,
    ) -> None:
        self.function = function
        self.debugged = debugged
        self.args = args
        self.kwargs = kwargs or {}
        self.value: Any = None

    def run(self) -> None:
        self.value = self.function(*self.args, **self.kwargs)

    def results(self, rank: int) -> Results:
        return Results(values={"value": self.value})

    def pack(self) -> Parcel:
        return pack({"function": self.function, "args": self.args, "kwargs": self.kwargs, "debugged": self.debugged})

    @classmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        values = unpack(fd)
        return cls(**values)

    def anchors(self) -> dict[int, str]:
        """Return the classes of `__main__`: otherwise a class of the script would come back as a copy of itself."""
        import __main__

        return {
            id(value): name
            for name, value in vars(__main__).items()
            if issubclass(type(value), type) and value.__module__ == "__main__"
        }

    def anchored(self, name: str) -> Any:
        import __main__

        return getattr(__main__, name)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One run.

    task: the work of every rank.  world_size: number of ranks.  start: the start method, and the reason.
    environ: variables set in every rank (settings, devices).
    setup: "module:function" called in every rank with the task's namespace before the task runs; it may return a
    `TaskWatch`, which watches this task and all later ones.
    threads: CPU threads of each rank.  timeout_s: seconds after which the run is stopped, None for never.
    wants_results: a failing run waits for rank 0's results before it is ended.
    oom: one of `settings.OOM_CHOICES`.  no_restart: why the run cannot be started a second time; empty if it can.
    hang_timeout_s: seconds without a step or a collective on any rank after which the run is ended, None for never.
    stays: the ranks stay when the task is done, and wait for the next.
    program_limit: a limit that an earlier attempt of this run had set itself.
    gpus: the GPUs of the ranks, as they were before the run; none on the CPU.
    own_devices: each rank sees only its own device of those in `environ`, as the first; otherwise every rank sees all
    of them.
    """

    task: Task
    world_size: int
    start: Start
    environ: Mapping[str, str] = field(default_factory=dict)
    setup: str | None = None
    threads: int = 1
    timeout_s: float | None = None
    wants_results: bool = True
    oom: str = STOP
    no_restart: str = ""
    hang_timeout_s: float | None = None
    stays: bool = False
    program_limit: ProgramLimit | None = None
    own_devices: bool = False
    gpus: tuple[Gpu, ...] = ()

    def __post_init__(self) -> None:
        if self.oom not in OOM_CHOICES:
            raise ValueError(f"oom must be one of {', '.join(map(repr, OOM_CHOICES))}, got {self.oom!r}")

    def environ_of(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank: `environ`, and the device of the rank."""
        chosen = dict(self.environ)
        if self.own_devices:
            chosen[VISIBLE_DEVICES] = chosen[VISIBLE_DEVICES].split(",")[rank]
        return chosen


@dataclass(frozen=True, slots=True)
class RankBoot:
    """The facts that one rank gets at its start. Descriptors are valid in the rank's process.

    sees_one_card: as `LaunchSpec.own_devices`, among several ranks.
    run_nonce: marks places in the output pipe where a rich message belongs.
    store_path: the file through which the ranks of the run find each other.
    """

    world: World
    environ: Mapping[str, str]
    sees_one_card: bool
    setup: str | None
    threads: int
    run_nonce: str
    store_path: str
    kernel_pidfd: int
    channel_fd: int
    stdout_fd: int
    stderr_fd: int
    page_fd: int
    ring_fd: int

    FDS: ClassVar[tuple[str, ...]] = ("kernel_pidfd", "channel_fd", "stdout_fd", "stderr_fd", "page_fd", "ring_fd")
