"""A cell with `--check`: a dry run in ranks that are discarded, and a report. Runs in the kernel.

`DryRunRanks` gives the ranks a place to run, and discards what they write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from nbaccel.base.hardware import Platform
from nbaccel.features.check.dry_run.rank_records import read_records
from nbaccel.features.check.dry_run_ranks import DryRunRanks, free_bytes, interrupted, unseen
from nbaccel.features.check.dry_run_task import DryRunTask, GradientTask
from nbaccel.features.check.findings import DryRunResult
from nbaccel.features.check.forecasts.forecast import measure_noise
from nbaccel.features.check.full_check import FullCheck, StepGradients
from nbaccel.features.check.incomparable_names import incomparable_names
from nbaccel.features.check.report import CheckReport, ReportLine
from nbaccel.features.check.trained_names import trained_names
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.options.run_options import FULL

__all__ = ["CellCheck"]

_PARTS = "nbaccel.features.check.rank_setup:dry_run_parts"
"""Function that returns what cuts the loaders of a rank, and measures."""

_PROBE = "nbaccel.features.check.rank_setup:gradient_probe"
"""Function that returns what records the gradients of a rank."""

_MOST_SECONDS = 30.0
"""Seconds that a cell may take to its first step, where gradients are compared."""


class CellCheck:
    """The check of one cell.

    Args:
        task: The cell as it would run.
        setup: See `Session`.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        task: CellTask,
        setup: str | None,
        platform: Platform,
    ) -> None:
        self._launcher = launcher
        self._plan = plan
        self._cell = task
        self._source = task.source
        self._setup = setup
        self._platform = platform
        self._changed_later: list[str] = []  # files that further runs have changed

    def run(self) -> CheckReport:
        """Run it, and return its report.

        Raises:
            LaunchRefused: Nothing was started.
            KeyboardInterrupt: It was interrupted.
        """
        noise = measure_noise()
        with DryRunRanks.start(self._launcher) as place:
            first = self._dry_run(place, noise)
            changed = place.changed_files()
            decisions = {path.name: path.read_bytes() for path in place.records.glob("*.json")}
        more: list[ReportLine] = []
        if self._plan.options.check == FULL:
            more = list(FullCheck(self._plan, self._again(decisions, noise), self._gradients).lines(first))
        changed = [*dict.fromkeys([*changed, *self._changed_later])]
        return CheckReport.of(first, self._source, self._plan, changed, self._platform, more)

    def _again(self, decisions: Mapping[str, bytes], noise: float) -> Callable[[], DryRunResult]:
        """Return what runs the dry run once more.

        Args:
            decisions: The decisions of the first one, which the second one takes, too.
        """

        def run() -> DryRunResult:
            with self._later_place() as place:
                for name, content in decisions.items():
                    (place.records / name).write_bytes(content)
                return self._dry_run(place, noise)

        return run

    def _gradients(
        self, plan: LaunchPlan, turns: int, steps: int | None
    ) -> tuple[DryRunResult, list[StepGradients | None]]:
        """Run the cell to its first step; return what was found, and the gradients of each rank."""
        cell = self._cell
        with self._later_place() as place:
            records = str(place.records)
            task = GradientTask(
                self._source,
                cell.namespace,
                (),
                cell.extra,
                folder=records,
                make_probe=_PROBE,
                turns=turns,
                steps=steps,
            )
            spec = place.spec(plan, task, cell, self._setup).ending(timeout_s=_MOST_SECONDS)
            found = self._run(place, plan, spec)
            ranks = range(plan.devices.num_processes)
            return found, [StepGradients.read(found, place.records, rank) for rank in ranks]

    @contextmanager
    def _later_place(self) -> Iterator[DryRunRanks]:
        with DryRunRanks.start(self._launcher) as place:
            yield place
            self._changed_later += place.changed_files()

    def _dry_run(self, place: DryRunRanks, noise: float) -> DryRunResult:
        cell = self._cell
        out = None if cell.leaves_all else cell.out
        folder = str(place.records)
        task = DryRunTask(self._source, cell.namespace, out, cell.extra, folder=folder, make_parts=_PARTS)
        return self._run(place, self._plan, place.spec(self._plan, task, cell, self._setup), noise)

    def _run(self, place: DryRunRanks, plan: LaunchPlan, spec: LaunchSpec, noise: float = 0.0) -> DryRunResult:
        began = time.monotonic()
        tree, namespace = self._source.parsed(), self._cell.namespace
        run, ended = self._launcher.run(spec, unseen(plan, self._source.name))
        try:
            if ended.is_interrupted:
                raise interrupted("the check was", [*self._changed_later, *place.changed_files()])
            return DryRunResult.of(
                [read_records(place.records, rank) for rank in range(len(ended.reports))],
                run,
                ended,
                seconds=time.monotonic() - began,
                noise=noise,
                free_bytes=free_bytes,
                trained=trained_names(tree, namespace),
                incomparable=incomparable_names(tree, namespace),
            )
        finally:
            ended.close()
