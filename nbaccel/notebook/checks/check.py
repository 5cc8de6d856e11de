"""A cell with `--check`: a dry run in ranks that are thrown away, and a report. Runs in the kernel.

Ranks write into a file shield, or, where the system allows none, saves are redirected and files that changed are
listed. Nothing comes back: the variables of the notebook are as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbaccel.dry_run.forecasts.forecast import measure_noise
from nbaccel.dry_run.rank_records import read_records
from nbaccel.hardware import Platform
from nbaccel.launch.launcher import Launcher
from nbaccel.launch.plan import LaunchPlan
from nbaccel.launch.tasks.cell_task import CellTask
from nbaccel.launch.tasks.dry_run_task import DryRunTask
from nbaccel.notebook.checks.findings import DryRunResult
from nbaccel.notebook.checks.report import CheckReport
from nbaccel.notebook.checks.throwaway import Throwaway, unseen
from nbaccel.notebook.checks.trained_names import trained_names

__all__ = ["CellCheck"]

_PARTS = "nbaccel.train.setup:dry_run_parts"
"""Function that returns what cuts the loaders of a rank, and measures."""


class CellCheck:
    """The check of one cell.

    task: the cell as it would run.  setup: see `Session`.  say: prints a line of the project.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        task: CellTask,
        setup: str | None,
        platform: Platform,
        say: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._plan = plan
        self._cell = task
        self._source = task.source
        self._setup = setup
        self._platform = platform
        self._say = say

    def run(self) -> CheckReport:
        """Run it, and return its report.

        Raises:
            LaunchRefused: nothing was started.  KeyboardInterrupt: it was interrupted.
        """
        noise = measure_noise()
        with Throwaway.start(self._launcher) as place:
            place.watch_files(self._say)
            return self._in_place(place, noise)

    def _in_place(self, place: Throwaway, noise: float) -> CheckReport:
        cell = self._cell
        out = None if cell.leaves_all else cell.out
        records = place.records
        task = DryRunTask(self._source, cell.namespace, out, cell.extra, folder=str(records), make_parts=_PARTS)
        spec = place.spec(self._plan, task, cell, self._setup)
        began = time.monotonic()
        outcome = self._launcher.run(spec, unseen(self._plan, self._source.name))
        try:
            if outcome.ended.is_interrupted:
                raise KeyboardInterrupt("the check was interrupted; nothing was changed.")
            found = DryRunResult.of(
                [read_records(records, rank) for rank in range(len(outcome.ended.reports))],
                outcome,
                seconds=time.monotonic() - began,
                noise=noise,
                free_bytes=place.shield.free_bytes,
                trained=trained_names(self._source.parsed(), self._cell.namespace),
            )
        finally:
            outcome.close()
        return CheckReport.of(found, self._source, self._plan, place.changed_files(), self._platform)
