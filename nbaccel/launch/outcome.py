"""Outcome: a finished run, with what its ranks sent back. Pure data; runs in the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.intervals import said
from nbaccel.launch.group import Ended
from nbaccel.launch.preflight import Start
from nbaccel.launch.spec import Task
from nbaccel.launch.wire.kind import Change
from nbaccel.launch.wire.parcel import unpack_what_can_be_rebuilt
from nbaccel.view.words import plural

__all__ = ["Outcome", "Returned"]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a rank sent back.

    values: by name.  changes: of objects that the kernel has.
    lost: the numbers of other changes, in the order of the rank's, which cannot be rebuilt here, each with the reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """A finished run: how it ended, and what its ranks sent back.

    error: what the run raises, None if no rank failed.  start: how the ranks were started in the end, and why.
    checkpoint: the newest that it has written; empty for none.
    restarts: a line for each time that it ran out of memory and was started again; all else is of the last attempt.
    """

    task: Task
    ended: Ended
    start: Start
    error: BaseException | None
    log_path: str
    checkpoint: str = ""
    restarts: list[str] = field(default_factory=list)

    def values(self, rank: int | None = None) -> dict[str, Any]:
        """Names and objects that `rank` sent back, by default the rank that speaks for all; empty if it died."""
        return self.returned(rank).values

    def returned(self, rank: int | None = None) -> Returned:
        """What `rank` sent back, by default the rank that speaks for all; nothing if it died.

        Values that cannot be rebuilt here are missing, and the rank's report says so from then on.
        """
        report = self.ended.reports[self.task.speaker if rank is None else rank]
        if report is None or report.parcel_fd < 0:
            return Returned()
        task = self.task
        try:
            values, refused = unpack_what_can_be_rebuilt(
                report.parcel_fd,
                namespace=task.namespace,
                anchored=task.anchored,
                placed=task.placed,
                is_lasting=True,
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

    def at_the_limit(self, launch_s: float, resume: str, checkpoint_every: str, first_step: int) -> str:
        """The line on a run that ended well at a time limit.

        launch_s: that of the launch.  resume, checkpoint_every: what the caller's users call these.  first_step: steps
        that the program had behind it when the run began.
        """
        ended = self.ended
        own = ended.program_limit if ended.is_own_limit else None
        done = "" if ended.steps is None else f" after {plural(max(0, ended.steps - first_step), 'step')}"
        if self.checkpoint:
            then = f"{resume} goes on from its checkpoint"
        elif ended.saves_itself:
            then = "it has saved nothing new"
        else:
            then = f"nothing was saved, which {checkpoint_every} does at a limit too"
        return f"stopped{done} at the time limit of {said(launch_s if own is None else own.seconds)}; {then}"

    def close(self) -> None:
        self.ended.close()
