"""TrialTask: a cell that runs with one change until its speed is known, and leaves nothing. Made in the kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.dry_run.rank_run import go_offline
from nbaccel.launch.ipc.spec import Results
from nbaccel.launch.tasks.cell_code import CellSource
from nbaccel.launch.tasks.cell_task import CellTask
from nbaccel.settings import RunSettings
from nbaccel.trials.changes import SpeedChange
from nbaccel.trials.rank_trial import RankTrial
from nbaccel.world import World

__all__ = ["TrialTask"]


class TrialTask(CellTask):
    """Tries a cell with `change`; see `CellTask` for the arguments.

    folder: the folder in which the ranks record what they measure; it exists, and ranks share it.
    wanted_s: seconds to measure.  compiled: the folder in which trials share what compilers make; may be empty.
    """

    reference = "nbaccel.launch.tasks.trial_task:TrialTask"

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] | None = None,
        extra: tuple[str, ...] = (),
        *,
        folder: str,
        change: SpeedChange,
        wanted_s: float,
        compiled: str = "",
        **options: Any,
    ) -> None:
        super().__init__(source, namespace, (), extra, **options)  # nothing is compared with what the cell leaves
        self.folder = folder
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
        go_offline()
        if self.compiled:
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": self.compiled, "TRITON_CACHE_DIR": f"{self.compiled}/triton"}
        settings, world = RunSettings.from_env(), World.from_env()
        joint_ranks = 1 if settings.independent else world.world_size
        self._trial = RankTrial(Path(self.folder), rank, joint_ranks, self.change, self.wanted_s, self.namespace)

    def run(self) -> None:
        assert self._trial is not None, "`begin` comes before"
        with self._trial:
            super().run()

    def results(self, rank: int) -> Results:
        return Results()
