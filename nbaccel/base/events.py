"""Events: the reports of a rank while it runs, and the outlet that takes them. Runs in ranks; the kernel reads them.

`train` emits, `launch` and `trackers` listen; neither knows the other. The current outlet is the only module-level
state in nbaccel: one plain object, because threads do not inherit context variables.

Some events are answered at once and stay in the rank: `StepEntered`, `StepsEnded`, `CallEntered`, `CallsEnded`,
`SaveDue`, `SaveAsked`, `SavesItself`, `SavingAtStop`, `Writing`, `TimeLimit`, `CollectiveEntered`, `ExchangeLeft`,
`GroupRenewed`, `Waiting`, `Gauge`. All others are sent: a launcher passes them to the kernel, whose `Listener`s receive
them. A sent event holds numbers, strings and None, in mappings and lists if needed; a tensor in `Loss` or `Metric`
arrives as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from enum import StrEnum
from typing import Any, Protocol

from nbaccel.base.values import frozen

__all__ = [
    "CallEntered",
    "CallsEnded",
    "Checkpoint",
    "CollectiveEntered",
    "Event",
    "ExchangeLeft",
    "ExchangeTime",
    "Gauge",
    "GroupRenewed",
    "ItemsDone",
    "Listener",
    "LoopEntered",
    "LoopKind",
    "Loss",
    "Memory",
    "Metric",
    "Opened",
    "OutOfMemory",
    "Phase",
    "Progress",
    "RankRestarted",
    "RecordsLost",
    "Reports",
    "Restarted",
    "Resumed",
    "SaveAsked",
    "SaveDue",
    "SavesItself",
    "SavingAtStop",
    "Sink",
    "StepEntered",
    "StepsEnded",
    "TimeLimit",
    "TrainingMode",
    "Waiting",
    "Writing",
    "emit",
    "outlet",
    "reports",
]


@frozen
class Event:
    """Something that happened in one rank."""


@frozen
class Metric(Event):
    """Numbers that the user logged.

    Args:
        values: Number or 0-d tensor by name; tensors are read later, away from the step.
        step: The optimizer step they belong to.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0


@frozen
class Loss(Event):
    """The loss of one backward, before it is divided or scaled. Several of one step belong to one point of a curve.

    Args:
        value: A detached tensor in the rank, which is read later, away from the step; a number on arrival.
        step: The optimizer step that this backward belongs to, 0-based.
    """

    value: Any = 0.0
    step: int = 0


@frozen
class Progress(Event):
    """Progress of a loop over a loader. The newest event counts; the last one of a loop says where it ended.

    A training without a loader has no `batches`, and `batch` stays 0.

    Args:
        step: Optimizer steps that are complete.
        epoch: 0-based number of the epoch.
        epochs: Number of epochs.
        batch, batches: Batches of this rank handed out in this epoch, and their number.
        samples: Number in one batch of this rank. Unknown values are None.
        is_training: Whether batches lead to backward; else the loop evaluates.
        is_guess: Whether no step has shown yet whether the loop trains.
        is_over: Whether the loop has ended, or was left.
        first: Optimizer steps that were complete when the loop began.
        began: Time of that, in the machine's `time.monotonic()`; it identifies a loop of the rank. 0 if unknown.
        waiting: The fraction of its time, 0 to 1, that the loop has waited for batches; None before that is known.
        learning_rates: Learning rates of the optimizers that step, each different one once, four at most; empty if
            unknown.
    """

    step: int = 0
    batch: int = 0
    batches: int | None = None
    epoch: int = 0
    epochs: int | None = None
    samples: int | None = None
    is_training: bool = True
    is_guess: bool = False
    is_over: bool = False
    first: int = 0
    began: float = 0.0
    waiting: float | None = None
    learning_rates: Sequence[float] = ()


@frozen
class Memory(Event):
    """Memory that this rank holds, in bytes; sampled a few times per second by a thread of the rank.

    Args:
        host_bytes: Resident memory of the process; pages that it still shares with the kernel it was forked from count
            in full.
        host_peak_bytes: Maximum of `host_bytes`.
        host_limit_bytes: Limit of the machine or the container for all its processes together.
        device_bytes: Tensors on the rank's device.
        device_reserved_bytes: These, and the reserve of the caching allocator.
        device_peak_bytes: Maximum that was reserved.
        device_limit_bytes: The device's memory. All None without one.
    """

    host_bytes: int = 0
    host_peak_bytes: int = 0
    host_limit_bytes: int | None = None
    device_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_limit_bytes: int | None = None


@frozen
class ExchangeTime(Event):
    """Time that a rank has spent in exchanges with the others; reported at the end of a task.

    Exchanges of unmodified loops, of `gather` and its neighbours, and of DistributedDataParallel on the CPU are in it.

    Args:
        seconds: In exchanges, waiting for the others included, since the task began.
        of_s: Since the task began.
    """

    seconds: float = 0.0
    of_s: float = 0.0


@frozen
class Checkpoint(Event):
    """A checkpoint is complete.

    Args:
        path: Folder of the checkpoint.
        step: Optimizer steps in it.
        seconds: Duration of the writing, perhaps in the background.
        goes_on: Whether the program goes on from it wherever it was, whatever loops it has.
    """

    path: str = ""
    step: int = 0
    seconds: float = 0.0
    goes_on: bool = False


@frozen
class Phase(Event):
    """Beginning of a new phase: other curves, another estimate of the remaining time.

    Args:
        name: Name that the user gave, such as "fold 2".
    """

    name: str = ""


@frozen
class ItemsDone(Event):
    """Items of a map that this rank has finished since it was started.

    Args:
        done: Items with an answer.
        failed: Items that failed each time.
        size: Items in one call of the function now.
        everywhere: Items of the map that anyone has finished, in this run, before it, or in another notebook, as far as
            this rank has seen.
    """

    done: int = 0
    failed: int = 0
    size: int = 0
    everywhere: int = 0


@frozen
class CallTimedOut(Event):
    """Report of a rank of a map that its process before was ended by a call which took too long.

    The rank goes on, with ever fewer items in a call, so this is progress.
    """


@frozen
class OutOfMemory(Event):
    """Shortage of memory in this rank, which goes on with the same step in smaller pieces; no work is lost.

    Or, in `find_executable_batch_size`, it goes on with a new attempt, whose batch is smaller: `next_size` instead of
    `batch_size`.

    Args:
        step: Optimizer steps that were complete.
        phase: "forward", "backward" or "optimizer".
        micro_batch_size: Samples of the forward that did not fit.
        next_size: Samples of the next one, 0 if there is no smaller one.
        batch_size: Samples of the whole batch on this rank. All 0 in the optimizer.
        message: The first line of the error.
    """

    step: int = 0
    phase: str = "forward"
    micro_batch_size: int = 0
    next_size: int = 0
    batch_size: int = 0
    message: str = ""


@frozen
class LoopEntered(Event):
    """Entry into a loop over a loader, or its continuation, with what can be cut if memory runs out in it.

    Args:
        samples: Samples in a batch of this rank; None if that varies.
        parts: Number of parts that each batch is cut into already.
        sharing_ranks: Number of ranks that share one batch and its parts; 1 if each has its own batches.
        batches_per_step: Gradient accumulation steps.
        obstacle: Why batches of this loop cannot be cut into more parts; empty if they can.
        batch_norms: The layers that would normalise over fewer samples then, by name.
    """

    samples: int | None = None
    parts: int = 1
    batches_per_step: int = 1
    obstacle: str = ""
    batch_norms: Sequence[str] = ()
    sharing_ranks: int = 1


class LoopKind(StrEnum):
    """Ways in which a program trains, in words."""

    UNMODIFIED = "an unmodified loop"
    PREPARED = "a prepared loop"
    TRAINER = "transformers' Trainer"
    LIGHTNING = "Lightning's Trainer"
    FABRIC = "Lightning's Fabric"
    ACCELERATE = "Accelerate's own Accelerator"
    DDP = "a model in DistributedDataParallel"
    NOTHING = "a cell that trains nothing"


@frozen
class TrainingMode(Event):
    """The way in which the program in this rank trains, known before its first optimizer step.

    An outlet may answer by raising `nbaccel.errors.FlagWithoutEffect`: nothing has been trained yet.

    Args:
        kind: One of `LoopKind`.
        is_split: Whether ranks have parts of the loop's batches.
        in_force: Settings that a library has made of the run's, or has chosen by itself, by their names in
            `RunOptions`.
    """

    kind: str = LoopKind.NOTHING
    is_split: bool = False
    in_force: Mapping[str, str] = field(default_factory=dict)


@frozen
class Opened(Event):
    """Something outside of the run that is written to from now on, and stays if the run is started again.

    Args:
        what: The name that a person would look for: "jsonl tracker in runs/digits".
    """

    what: str = ""


@frozen
class RecordsLost(Event):
    """Events of this rank that were overwritten before the kernel read them; reported by the kernel itself.

    Args:
        count: Number of records that were lost so far.
    """

    count: int = 0


@frozen
class Restarted(Event):
    """Restart of all ranks of the run; reported by the kernel itself.

    Args:
        line: The reason and the changes, as shown to the user.
    """

    line: str = ""


@frozen
class RankRestarted(Event):
    """Start of a new process for this rank alone, after the one before died; reported by the kernel itself.

    Args:
        line: The end of the process, and what follows, as shown to the user.
    """

    line: str = ""


@frozen
class Resumed(Event):
    """Continuation of a training from a checkpoint, because the run was started with a resume.

    Args:
        path: Folder of the checkpoint.
        step: Optimizer steps in it.
    """

    path: str = ""
    step: int = 0


@frozen
class Gauge(Event):
    """A value that is read from time to time rather than reported at each change.

    Args:
        read: Returns the present value as an event, and None once there is nothing more to read. An outlet calls it a
            few times per second from a separate thread, so it only reads: it changes nothing, and waits for nothing.
    """

    read: Callable[[], Event | None]


@frozen
class StepEntered(Event):
    """The rank is at a step boundary and about to enter a step; every collective of earlier steps is over.

    An outlet may answer by raising `nbaccel.errors.RunStopped`: this is where a run stops.

    Args:
        step: Training step about to be entered, 0-based and equal on all ranks that meet in its collectives.
        substep: Batches taken since the last training step, for loops that never train (evaluation).
    """

    step: int
    substep: int = 0


@frozen
class StepsEnded(Event):
    """The rank left its loop: no step is in flight until the next `StepEntered`."""


@frozen
class CallEntered(Event):
    """The rank is about to work on something that no other rank waits for: the next call of the function of a map.

    Args:
        done: Calls that are over. A rank that has nothing to do and looks for work is here again with the same number.
        stop: Called by an outlet whose run is being stopped; the rank then leaves before this call, not in the middle.
    """

    done: int
    stop: Callable[[], None]


@frozen
class CallsEnded(Event):
    """The rank has made its last call, see `CallEntered`, and is where it was before the first."""


@frozen
class SaveDue(Event):
    """Rank 0 announces that all ranks save before optimizer step `step`, which none of them has reached yet.

    Args:
        choose: Called by a launcher that chooses a later step itself, since ranks on other machines could have passed
            this one when they hear of it.
    """

    step: int
    choose: Callable[[], None] = lambda: None


@frozen
class SavesItself(Event):
    """This rank saves its training by itself, and at a stop: a session that ends has to leave it time for that."""


@frozen
class SavingAtStop(Event):
    """The run is being stopped, and this rank writes its last checkpoint, or has finished it.

    Args:
        is_over: Whether it has finished.
    """

    is_over: bool = False


@frozen
class Writing(Event):
    """This rank writes a checkpoint, or has written it. It needs no other rank for that.

    So a run that ends because another rank has failed lets it finish: the checkpoint is lost otherwise.

    Args:
        is_over: Whether it has.
    """

    is_over: bool = False


@frozen
class SaveAsked(Event):
    """Another rank asks whether rank 0 has announced a save before optimizer step `step`.

    Args:
        answer: Called by an outlet that knows that it has.
    """

    step: int
    answer: Callable[[], None]


@frozen
class TimeLimit(Event):
    """Time limit that the program in this rank sets for its run; emitted when it is set, and again when it is over.

    Args:
        at: End of the time, in the machine's `time.monotonic()`.
        seconds: The limit as the program gave it.
        take: Called by an outlet that makes the run end in time; if none does, the program has to end by itself.
    """

    at: float
    seconds: float
    take: Callable[[], None]


@frozen
class CollectiveEntered(Event):
    """The rank enters a collective of the project. Every rank enters the same ones, so counting them compares ranks.

    An outlet that knows of a peer which has left its exchange, or is in another one, may answer by raising
    `nbaccel.errors.PeerFailed` or `CollectiveMismatch`: nothing is sent then.

    Args:
        call: The collective in words.
        is_compared: Whether the ranks compare their calls before they exchange anything.
    """

    call: str = ""
    is_compared: bool = False


@frozen
class ExchangeLeft(Event):
    """An exception has ended the rank's exchange with its peers half-way, see `nbaccel.base.aborting.leave_exchange`.

    Args:
        call: The collective in words.
    """

    call: str


@frozen
class GroupRenewed(Event):
    """All ranks form their process group again, after one of them had left its collectives: counting starts again.

    Args:
        times: Number of renewals, equal on all ranks.
    """

    times: int = 0


@frozen
class Waiting(Event):
    """The rank waits in the collective that it entered last; emitted again while that lasts.

    An outlet that knows of a peer which will never come may answer by raising `nbaccel.errors.CollectiveMismatch`.

    Args:
        call: The collective in words.
        seconds: Duration so far.
    """

    call: str
    seconds: float = 0.0


Sink = Callable[[Event], None]


class Listener(Protocol):
    """Receives in the kernel the reports of a run's ranks: stores them, draws them, writes them down.

    The thread that supervises the run calls both methods, at most a few times per second, many events at a time; they
    return soon. One that raises is not called again in this run, and the run goes on.
    """

    def feed(self, rank: int, at: float, event: Event) -> None:
        """Take `event` of `rank` at `at` of the machine's `time.monotonic()`; each rank's come in their order."""

    def tick(self, now: float) -> None:
        """Handle the end of a round of reading: all events have been fed. Called also when there were none."""


class _Nowhere:
    """The outlet of a process without a listener."""

    def __call__(self, event: Event) -> None:
        pass

    def enter_step(self, step: int, substep: int) -> None:
        pass

    def record_loss(self, value: Any, step: int) -> None:
        pass

    def record_metric(self, values: Mapping[str, Any], step: int) -> None:
        pass


class Reports:
    """The destination of this process's events, and of those of every training step as bare values.

    Making an event object takes longer than recording its values. A sink that has a method `enter_step`, `record_loss`
    or `record_metric` is called with the fields of `StepEntered`, `Loss` or `Metric`; all others get the event.
    """

    __slots__ = ("enter_step", "record_loss", "record_metric", "sink")

    def __init__(self, sink: Sink) -> None:
        self.lead_to(sink)

    def lead_to(self, sink: Sink) -> None:
        self.sink = sink
        self.enter_step: Callable[[int, int], None] = getattr(
            sink, "enter_step", lambda step, substep: sink(StepEntered(step, substep))
        )
        self.record_loss: Callable[[Any, int], None] = getattr(
            sink, "record_loss", lambda value, step: sink(Loss(value, step))
        )
        self.record_metric: Callable[[Mapping[str, Any], int], None] = getattr(
            sink, "record_metric", lambda values, step: sink(Metric(values, step))
        )


reports = Reports(_Nowhere())
"""The current outlet. Its attributes are read at each call: they change with `outlet`."""


def emit(event: Event) -> None:
    """Hand `event` to the current outlet. Cheap; never blocks on the kernel."""
    reports.sink(event)


@contextmanager
def outlet(sink: Sink) -> Iterator[Sink]:
    """Send every event of this process to `sink` while the block runs; yield the previous outlet.

    Example:
        >>> seen = []
        >>> with outlet(seen.append):
        ...     emit(StepEntered(step=3))
        >>> seen[0].step
        3
    """
    previous = reports.sink
    reports.lead_to(sink)
    try:
        yield previous
    finally:
        reports.lead_to(previous)
