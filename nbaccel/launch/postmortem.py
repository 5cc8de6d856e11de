"""PostMortem: the record of a run that ended badly, kept until the next run. Runs in the kernel.

It is text alone: it needs no process of the run, and keeps no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbaccel.launch.group import Ended
from nbaccel.launch.member import Report
from nbaccel.launch.rank.look import scenes
from nbaccel.launch.report import signal_name
from nbaccel.launch.snapshot import Snapshot
from nbaccel.launch.spec import Task
from nbaccel.launch.verdict import failed_alike

__all__ = ["PostMortem"]

_WIDTH = 240


@dataclass(frozen=True, slots=True)
class PostMortem:
    """The record of a run that ended badly.

    title, end, headline: "Cell In[5]" or "train(2)", "failed", the error in one line.
    first: the rank that failed first, if one did.  is_everyones: all of several ranks failed with the same error.
    fates: the end of each rank, in words.  snapshots: by rank, of those that left one.
    """

    title: str
    end: str
    headline: str
    first: int | None
    fates: tuple[str, ...]
    snapshots: Mapping[int, Snapshot]
    is_everyones: bool = False

    @classmethod
    def of(cls, title: str, end: str, error: BaseException, ended: Ended) -> PostMortem:
        return cls(
            title,
            end,
            _headline(error),
            None if ended.is_interrupted or ended.is_timed_out else ended.first_failed,
            tuple(map(_fate, ended.reports, ended.exit_codes, ended.killed_by_us)),
            {rank: report.snapshot for rank, report in enumerate(ended.reports) if report is not None},
            failed_alike(ended),
        )

    @classmethod
    def of_this_process(cls, title: str, error: BaseException, task: Task) -> PostMortem:
        """Return the record of a run in the kernel's own process, taken when `error` has just left the user's code."""
        is_stopped = isinstance(error, KeyboardInterrupt)
        snapshot = Snapshot(scenes(error.__traceback__, *task.left_behind()))
        return cls(
            title,
            "stopped" if is_stopped else "failed",
            _headline(error),
            None if is_stopped else 0,
            ("was interrupted" if is_stopped else f"raised {type(error).__name__}",),
            {0: Snapshot.from_json(snapshot.to_json())},
        )


def _headline(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{text and ': '}{text}"[:_WIDTH]


def _fate(report: Report | None, exit_code: int, was_killed: bool) -> str:
    if report is None and was_killed:
        return "did not hear the interrupt in time and was killed; it left no snapshot"
    if report is None:
        how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return f"{how}; it left no snapshot"
    if report.status == "ok":
        return "had finished"
    if report.status == "stopped":
        return "was interrupted"
    if report.is_consequence:
        return "lost its peer"
    return "exited" if report.status == "exited" else f"raised {report.links[-1].type_name}"
