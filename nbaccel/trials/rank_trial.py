"""RankTrial: one trial of a cell in one rank, with a change, until its speed is known. Runs in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbaccel.dry_run.decisions import SharedDecisions
from nbaccel.dry_run.rank_records import RankRecords
from nbaccel.trials.changes import SpeedChange
from nbaccel.trials.throughput import Throughput, TrialEnded
from nbaccel.trials.training_parts import TrainingParts

__all__ = ["RankTrial"]


class RankTrial:
    """Changes and measures what runs while it is entered. An end by `TrialEnded` is no error.

    folder: that the ranks share.  joint_ranks: ranks that train together, and so have to end at the same step.
    namespace: of the cell.  wanted_s: seconds to measure.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        joint_ranks: int,
        change: SpeedChange,
        wanted_s: float,
        namespace: Mapping[str, Any],
    ) -> None:
        self._records = RankRecords(folder, rank)
        self._parts = TrainingParts(change, namespace)
        decisions = SharedDecisions(folder, rank, joint_ranks)
        self._speed = Throughput(wanted_s, decisions, self._parts.note_model, self._parts.note_step)

    def __enter__(self) -> Self:
        self._parts.begin()
        self._speed.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._speed.end()
        speed, is_enough = self._speed, isinstance(error, TrialEnded)
        if error is None or is_enough:
            self._records.write(
                {
                    "kind": "trial",
                    "steps": speed.steps,
                    "seconds": speed.seconds,
                    "samples_per_step": speed.samples_per_step,
                    "losses": speed.losses,
                    "first_step_s": speed.first_step_s,
                    "whole_s": speed.whole_s,
                    "is_whole": not is_enough,
                    **self._parts.facts(),
                }
            )
        self._parts.end()
        return is_enough
