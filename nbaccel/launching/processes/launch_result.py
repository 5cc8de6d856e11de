"""LaunchResult: a finished run, with the values that its ranks sent back. Pure data; runs in the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.quantities import plural, said
from nbaccel.launching.ipc.spec import Start, Task
from nbaccel.launching.processes.joined_tensors import JoinedTensors
from nbaccel.launching.processes.supervisor import RunResult
from nbaccel.namespace.kind import Change
from nbaccel.namespace.payload import rows_in, unpack_what_can_be_rebuilt

__all__ = [
    "LaunchResult",
    "Returned",
]


@dataclass(frozen=True, slots=True)
class Returned:
    """The values that a rank sent back.

    values: by name.  changes: of objects that the kernel has.
    lost: other changes that cannot be rebuilt here: their numbers, in the order of the rank's, each with the reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class LaunchResult:
    """A finished run: its end, and the values that its ranks sent back.

    error: the exception that the run raises; None if no rank failed.  start: the final start method, and its reason.
    checkpoint: the newest that it has written; empty for none.
    restarts: a line for each time that it ran out of memory and was started again; everything else is of the last
    attempt.
    joined: the sharded tensors of which its ranks have sent rows.
    """

    task: Task
    ended: RunResult
    start: Start
    error: BaseException | None
    log_path: str
    checkpoint: str = ""
    restarts: list[str] = field(default_factory=list)
    joined: JoinedTensors = field(init=False)

    def __post_init__(self) -> None:
        self.joined = JoinedTensors(self.ended.reports, self.checkpoint)

    def needs_rows(self, rank: int) -> bool:
        """Return whether `rank` has sent rows of sharded tensors, so that those of the other ranks are needed too."""
        report = self.ended.reports[rank]
        return report is not None and report.payload_fd >= 0 and bool(rows_in(report.payload_fd))

    def join(self, others: LaunchResult) -> None:
        """Take rows from another run, in which those ranks took part that had no part in this one."""
        pairs = zip(self.ended.reports, others.ended.reports, strict=True)
        reports = [theirs if mine is None or mine.payload_fd < 0 else mine for mine, theirs in pairs]
        self.joined = JoinedTensors(reports, self.checkpoint)

    def values(self, rank: int | None = None) -> dict[str, Any]:
        """Return the names and objects that `rank`, by default the task's result rank, sent back; empty if it died."""
        return self.returned(rank).values

    def returned(self, rank: int | None = None) -> Returned:
        """Return everything that `rank`, by default the task's result rank, sent back; nothing if it died.

        Values that cannot be rebuilt here are missing, and are added to the rank's report as missing.
        """
        report = self.ended.reports[self.task.result_rank if rank is None else rank]
        if report is None or report.payload_fd < 0:
            return Returned()
        task = self.task
        try:
            values, refused = unpack_what_can_be_rebuilt(
                report.payload_fd,
                namespace=task.namespace,
                anchored=task.anchored,
                placed=task.placed,
                is_lasting=True,
                joined=self.joined,
            )
        except Exception:
            if self.error is None:
                raise
            return Returned()
        report.missing |= {name.removeprefix("out:"): why for name, why in refused.items() if name.startswith("out:")}
        return Returned(
            {name.removeprefix("out:"): value for name, value in values.items() if name.startswith("out:")},
            {name: value for name, value in values.items() if name.startswith("change:")},
            {int(name.removeprefix("change:")): why for name, why in refused.items() if name.startswith("change:")},
        )

    def at_the_limit(
        self, launch_s: float, resume: str, checkpoint_every: str, first_step: int, items: int | None = None
    ) -> str:
        """Return the line for a run that a time limit ended at a step.

        launch_s: the limit of the launch.  resume, checkpoint_every: the names of these options for the caller's users.
        first_step: steps that the program had done before the run began.
        items: those that a map in the run has finished; None without a map.
        """
        ended = self.ended
        own = ended.program_limit if ended.is_own_limit else None
        done = "" if ended.steps is None else f" after {plural(max(0, ended.steps - first_step), 'step')}"
        if self.checkpoint:
            then = f"{resume} goes on from its checkpoint"
        elif ended.saves_itself:
            then = "it has saved nothing new"
        elif items is not None:
            then = f"{plural(items, 'item')} of a map {'is' if items == 1 else 'are'} done, and a map with out= goes on"
        else:
            then = f"nothing was saved, which {checkpoint_every} does at a limit too"
        return f"stopped{done} at the time limit of {said(launch_s if own is None else own.seconds)}; {then}"

    def close(self) -> None:
        self.joined.close()
        self.ended.close()
