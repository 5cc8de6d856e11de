"""RankResults: the end of each rank of a run, and the values that ranks sent back. Runs in the kernel.

It holds descriptors, and the task with the notebook's names, so it lasts only until a run is concluded. What stays of a
run is its record, `launching/run.Run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbaccel.base.quantities import duration, plural
from nbaccel.display.history import History
from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.ipc.spec import ProgramLimit, Task
from nbaccel.namespace.kind import Change
from nbaccel.namespace.payload import rows_in, unpack_what_can_be_rebuilt

if TYPE_CHECKING:
    from nbaccel.launching.processes.joined_tensors import JoinedTensors
    from nbaccel.launching.processes.standstill import Hang

__all__ = [
    "RankResults",
    "Returned",
]


@dataclass(frozen=True, slots=True)
class Returned:
    """The values that a rank sent back.

    Args:
        values: By name.
        changes: The changes of objects that the kernel has.
        lost: Other changes that cannot be rebuilt here: their numbers, in the order of the rank's, each with the
            reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class RankResults:
    """The ends of a run's ranks, and what they sent; of several attempts the last.

    Args:
        reports: By rank; None for a rank that died without one.
        exit_codes: By rank, negative for signals.
        first_failed: The rank whose failure was the cause, if any.
        is_interrupted, is_timed_out: The user, or the time limit, ended it.
        seconds: The seconds of this attempt.
        steps: Training steps that every rank had done when the run was stopped at a step; None otherwise.
        open_files: Files that ranks were writing when the first of them failed.
        hang: The hang that ended the run.
        stays: Ranks that have not died stay after the run.
        program_limit: The limit that the program had set itself, if any.
        is_own_limit: This limit ended it.
        saves_itself: Ranks save the training, also when they are stopped.
        why_not_again: Why the rank that failed first was not started again, see `RestartRanks`; empty in other runs.
        raised: The exception in the kernel that ended it, as an interrupt does; it is the caller's.
        has_written: They have written some.
        nodes: By rank, the machine that it ran on; empty if all ran on this one.
        lost: By rank, why the machine that it ran on was given up; empty if it was not.

    Attributes:
        checkpoint: The newest one of the run, which is named if rows of sharded tensors do not fit together.
    """

    task: Task
    reports: list[RankReport | None]
    exit_codes: list[int]
    killed_by_us: list[bool]
    first_failed: int | None
    is_interrupted: bool
    is_timed_out: bool
    seconds: float
    steps: int | None = None
    open_files: list[str] = field(default_factory=list)
    hang: Hang | None = None
    stays: bool = False
    program_limit: ProgramLimit | None = None
    is_own_limit: bool = False
    saves_itself: bool = False
    why_not_again: str = ""
    raised: BaseException | None = None
    has_written: bool = False
    lost: list[str] = field(default_factory=list)
    nodes: Sequence[str] = ()
    checkpoint: str = field(init=False, default="")
    _rows_of: list[RankReport | None] = field(init=False)
    _joined: JoinedTensors | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._rows_of = self.reports

    @property
    def ended_by(self) -> int | None:
        """Return the rank whose failure ended the run; None if none failed, or the run was ended otherwise."""
        return None if self.is_interrupted or self.is_timed_out else self.first_failed

    @property
    def failed_alike(self) -> bool:
        """Return whether all of several ranks failed with the same error, so that none of them is the one to name."""
        cause = self.first_failed
        return cause is not None and 1 < len(self.reports) == 1 + len(self.alike(cause))

    def alike(self, cause: int) -> list[int]:
        """Return the other ranks that failed with the same error as the rank `cause`."""
        links = [None if report is None else report.links for report in self.reports]
        headlines = [each[-1].headline if each else None for each in links]
        return [rank for rank, line in enumerate(headlines) if rank != cause and line and line == headlines[cause]]

    def node_of(self, rank: int) -> str:
        """Return the machine that a rank ran on; empty if all ran on this one."""
        return self.nodes[rank] if self.nodes else ""

    def needs_rows(self, rank: int) -> bool:
        """Return whether `rank` has sent rows of sharded tensors, so that those of the other ranks are needed too."""
        report = self.reports[rank]
        return report is not None and report.payload_fd >= 0 and bool(rows_in(report.payload_fd))

    def join(self, others: RankResults) -> None:
        """Take rows from another run, in which those ranks took part that had no part in this one."""
        pairs = zip(self.reports, others.reports, strict=True)
        self._rows_of = [theirs if mine is None or not mine.has_values else mine for mine, theirs in pairs]
        self._joined = None

    def whole(self, key: str) -> Any:
        """Return the whole tensor with this key, of which its ranks have sent rows.

        Raises:
            CannotJoin: Rows of it are missing, or do not belong together.
        """
        if self._joined is None:
            from nbaccel.launching.processes.joined_tensors import JoinedTensors  # most runs have no sharded tensor

            self._joined = JoinedTensors(self._rows_of, self.checkpoint)
        return self._joined.whole(key)

    def values(self, rank: int | None = None) -> dict[str, Any]:
        """Return the names and objects that `rank`, by default the task's result rank, sent back; empty if it died."""
        return self.returned(rank).values

    def returned(self, rank: int | None = None) -> Returned:
        """Return everything that `rank`, by default the task's result rank, sent back; nothing if it died.

        Values that cannot be rebuilt here are missing, and are added to the rank's report as missing.
        """
        report = self.reports[self.task.result_rank if rank is None else rank]
        if report is not None and report.plain is not None:
            return Returned({name.removeprefix("out:"): value for name, value in report.plain.items()})
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
                joined=self,
            )
        except Exception:
            if self.ended_by is None:
                raise
            return Returned()
        report.missing |= {name.removeprefix("out:"): why for name, why in refused.items() if name.startswith("out:")}
        return Returned(
            {name.removeprefix("out:"): value for name, value in values.items() if name.startswith("out:")},
            {name: value for name, value in values.items() if name.startswith("change:")},
            {int(name.removeprefix("change:")): why for name, why in refused.items() if name.startswith("change:")},
        )

    def at_the_limit(
        self,
        history: History,
        checkpoint: str,
        launch_s: float = 0.0,
        resume: str = "resume=True",
        what_saves: str = "checkpoint_every does at a limit too, for a prepared loop",
    ) -> str:
        """Return the line for a run that a time limit ended at a step.

        Args:
            history, checkpoint: Those of the run, see `Run`.
            launch_s: The limit of the launch.
            resume, what_saves: Words for the caller's users: the option that goes on, and the one that saves.
        """
        own = self.program_limit if self.is_own_limit else None
        done = "" if self.steps is None else f" after {plural(max(0, self.steps - history.first_step), 'step')}"
        if checkpoint:
            then = f"{resume} goes on from its checkpoint"
        elif self.saves_itself:
            then = "it has saved nothing new"
        elif history.items is not None:
            items = history.items.done
            then = f"{plural(items, 'item')} of a map {'is' if items == 1 else 'are'} done, and a map with out= goes on"
        else:
            then = f"nothing was saved, which {what_saves}"
        return f"stopped{done} at the time limit of {duration(launch_s if own is None else own.seconds)}; {then}"

    def close(self) -> None:
        """Release the data that the ranks sent."""
        if self._joined is not None:
            self._joined.close()
        for report in self.reports:
            if report is not None:
                report.close()
