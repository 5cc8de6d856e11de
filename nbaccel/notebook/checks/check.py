"""A cell with `--check`: a dry run in ranks that are thrown away, and a report. Runs in the kernel.

Ranks write into a file shield, or, where the system allows none, saves are redirected and files that changed are
listed. Nothing comes back: the variables of the notebook are as before.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbaccel.display.run_view import RunView
from nbaccel.dry_run.forecasts.forecast import measure_noise
from nbaccel.dry_run.rank_records import SAVES, read_records
from nbaccel.hardware import Platform
from nbaccel.launch.ipc.spec import LaunchSpec
from nbaccel.launch.launcher import Launcher
from nbaccel.launch.plan import LaunchPlan
from nbaccel.launch.processes.file_shield import FileShield
from nbaccel.launch.processes.folder_snapshot import FolderSnapshot
from nbaccel.launch.processes.supervisor import RunObservers
from nbaccel.launch.tasks.cell_code import CellSource
from nbaccel.launch.tasks.cell_task import CellTask
from nbaccel.launch.tasks.dry_run_task import DryRunTask
from nbaccel.launch.tasks.gradient_task import GradientTask
from nbaccel.notebook.checks.findings import DryRunResult
from nbaccel.notebook.checks.full_check import FullCheck
from nbaccel.notebook.checks.report import CheckReport, ReportLine
from nbaccel.options.run_options import FULL
from nbaccel.output.screens import SilentScreen
from nbaccel.settings import STOP

__all__ = ["CellCheck"]

_PREFIX = "nbaccel-check-"

_RECORDS = "records"

_MOST_SECONDS = 30.0
"""Seconds that a cell may take to its first step, where gradients are compared."""

_PARTS = "nbaccel.train.setup:dry_run_parts"
"""Function that returns what cuts the loaders of a rank, and measures."""

_PROBE = "nbaccel.train.setup:gradient_probe"
"""Function that returns what records the gradients of a rank."""


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
        self._said: list[str] = []

    def run(self) -> CheckReport:
        """Run it, and return its report.

        Raises:
            LaunchRefused: nothing was started.  KeyboardInterrupt: it was interrupted.
        """
        noise = measure_noise()
        with _folder(self._launcher) as folder:
            first, changed = self._attempt(folder / "first", self._plan, self._task, noise)
            more: list[ReportLine] = []
            if self._plan.options.check == FULL and first.error is None:
                more, changed_later = self._full(folder, first, noise)
                changed = list(dict.fromkeys([*changed, *changed_later]))
        return CheckReport.of(first, self._source, self._plan, changed, self._platform, more)

    def _full(self, folder: Path, first: DryRunResult, noise: float) -> tuple[list[ReportLine], list[str]]:
        """Run the cell again, see `FullCheck`; return the lines, and files that this has changed."""
        numbers = itertools.count(1)
        changed: list[str] = []

        def again() -> DryRunResult:
            found, files = self._attempt(folder / "again", self._plan, self._task, noise, folder / "first")
            changed.extend(files)
            return found

        def attempt(plan: LaunchPlan, turns: int, steps: int | None) -> tuple[DryRunResult, Path]:
            place = folder / f"gradients-{next(numbers)}"
            make = functools.partial(self._gradient_task, turns=turns, steps=steps)
            found, files = self._attempt(place, plan, make, noise)
            changed.extend(files)
            return found, place / _RECORDS

        return list(FullCheck(self._plan, self._source, again, attempt).lines(first)), changed

    def _attempt(
        self,
        folder: Path,
        plan: LaunchPlan,
        make: Callable[[str], CellTask],
        noise: float,
        like: Path | None = None,
    ) -> tuple[DryRunResult, list[str]]:
        """Run one task in ranks whose files are thrown away; return what was found, and files that it has changed.

        make: returns the task, for the folder of the records.  like: the folder of a run whose decisions are taken.
        """
        for name in (_RECORDS, "shield"):
            (folder / name).mkdir(parents=True)
        for decision in () if like is None else (like / _RECORDS).glob("*.json"):
            shutil.copy(decision, folder / _RECORDS)
        shield = FileShield.start([folder / _RECORDS], folder / "shield")
        try:
            return self._in_shield(folder, shield, plan, make, noise)
        finally:
            shield.close()

    def _in_shield(
        self, folder: Path, shield: FileShield, plan: LaunchPlan, make: Callable[[str], CellTask], noise: float
    ) -> tuple[DryRunResult, list[str]]:
        snapshot = None
        records = folder / _RECORDS
        if shield.why_not:
            self._say_once(
                f"files are not shielded here: {shield.why_not}. Saves of torch, safetensors and nbaccel are "
                "redirected, and what else the cell writes is real"
            )
            (folder / SAVES).mkdir()
            (folder / "kept").mkdir()
            snapshot = FolderSnapshot.of(Path.cwd(), keep=folder / "kept")
        elif open_folders := [path for path in shield.not_covered if path != records]:
            self._say_once(f"files are not shielded here: {', '.join(map(str, open_folders))}")
        began = time.monotonic()
        spec = self._spec(make(str(records)), plan, records, shield)
        outcome = self._launcher.run(spec, RunObservers(_hidden_view(plan, self._source)))
        try:
            if outcome.ended.is_interrupted:
                raise KeyboardInterrupt("the check was interrupted; nothing was changed.")
            found = DryRunResult.of(
                [read_records(records, rank) for rank in range(len(outcome.ended.reports))],
                outcome,
                seconds=time.monotonic() - began,
                noise=noise,
                free_bytes=shield.free_bytes,
            )
        finally:
            outcome.close()
        changed, restored = ([], []) if snapshot is None else (snapshot.changed(), snapshot.put_back())
        return found, [f"{path}{', and put back' * (path in restored)}" for path in changed]

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.append(text)
            self._say(text)

    def _task(self, records: str) -> DryRunTask:
        cell = self._cell
        out = None if cell.leaves_all else cell.out
        return DryRunTask(self._source, cell.namespace, out, cell.extra, folder=records, make_parts=_PARTS)

    def _gradient_task(self, records: str, turns: int, steps: int | None) -> GradientTask:
        cell = self._cell
        return GradientTask(
            self._source, cell.namespace, (), cell.extra, folder=records, make_probe=_PROBE, turns=turns, steps=steps
        )

    def _spec(self, task: CellTask, plan: LaunchPlan, records: Path, shield: FileShield) -> LaunchSpec:
        task.random = self._cell.random
        spec = plan.spec(task, self._setup, wants_results=False)
        saves_to = str(records.with_name(SAVES)) if shield.why_not else ""
        settings = replace(spec.settings, dry_run=str(records), checkpoint_every=None, resume=None)
        return replace(
            spec,
            settings=settings,
            oom=STOP,
            timeout_s=_MOST_SECONDS if isinstance(task, GradientTask) else None,
            shield=shield.entry,
            ends_waiting=True,
            saves_to=saves_to,
        )


@contextmanager
def _folder(launcher: Launcher) -> Iterator[Path]:
    """Yield a private folder, which is removed afterwards, also if this process is killed."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    launcher.resources.guard(str(path))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        launcher.resources.guard(f"-{path}")


def _hidden_view(plan: LaunchPlan, source: CellSource) -> RunView:
    return RunView(SilentScreen(), plan.devices.num_processes, plan.facts(source.name))
