"""Outcome: a finished run, with what its ranks sent back. Pure data; runs in the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.launch.group import Ended
from nbaccel.launch.preflight import Start
from nbaccel.launch.spec import Task
from nbaccel.launch.wire.parcel import unpack

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """A finished run: how it ended, and what its ranks sent back.

    error: what the run raises, None if no rank failed.  start: how the ranks were started in the end, and why.
    restarts: a line for each time that it ran out of memory and was started again; all else is of the last attempt.
    """

    task: Task
    ended: Ended
    start: Start
    error: BaseException | None
    log_path: str
    restarts: list[str] = field(default_factory=list)

    def values(self, rank: int | None = None) -> dict[str, Any]:
        """Names and objects that `rank` sent back, by default the rank that speaks for all; empty if it died."""
        report = self.ended.reports[self.task.speaker if rank is None else rank]
        if report is None or report.parcel_fd < 0:
            return {}
        try:
            values = unpack(report.parcel_fd, namespace=self.task.namespace, anchored=self.task.anchored)
        except Exception:
            if self.error is None:
                raise
            return {}
        return {name.removeprefix("out:"): value for name, value in values.items() if name.startswith("out:")}

    def close(self) -> None:
        self.ended.close()
