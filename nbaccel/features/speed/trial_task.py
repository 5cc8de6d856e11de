"""TrialTask: a cell that runs with one change until its speed is known. Made in the kernel, for ranks.

`RankTrial` makes the change in each rank, and measures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.check.dry_run.rank_records import RankRecords
from nbaccel.features.check.dry_run_task import DiscardedTask
from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.throughput import Throughput, TrialEnded
from nbaccel.features.speed.training_parts import TrainingParts

__all__ = ["RankTrial", "TrialTask"]


class TrialTask(DiscardedTask):
    """Tries a cell with `change`.

    Args:
        wanted_s: Seconds to measure.
        compiled: The folder in which trials share what compilers make; may be empty.
    """

    reference = "nbaccel.features.speed.trial_task:TrialTask"

    def __init__(self, *cell: Any, change: SpeedChange, wanted_s: float, compiled: str = "", **options: Any) -> None:
        super().__init__(*cell, **options)
        self.change = change
        self.wanted_s = wanted_s
        self.compiled = compiled
        self._trial: RankTrial | None = None

    def _own_facts(self) -> Mapping[str, Any]:
        return {
            "folder": self.folder,
            "change": self.change,
            "wanted_s": self.wanted_s,
            "compiled": self.compiled,
        }

    def begin(self, rank: int) -> None:
        super().begin(rank)
        if self.compiled:
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": self.compiled, "TRITON_CACHE_DIR": f"{self.compiled}/triton"}
        settings, world = RunSettings.from_env(), World.from_env()
        joint_ranks = 1 if settings.independent else world.world_size
        self._trial = RankTrial(Path(self.folder), rank, joint_ranks, self.change, self.wanted_s, self.namespace)

    def run(self) -> None:
        assert self._trial is not None, "`begin` comes before"
        with self._trial:
            super().run()


class RankTrial:
    """Changes and measures what runs while it is entered. An end by `TrialEnded` is no error.

    Args:
        folder: That the ranks share.
        joint_ranks: Ranks that train together, and so have to end at the same step.
        wanted_s: Seconds to measure.
        namespace: The namespace of the cell.
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
