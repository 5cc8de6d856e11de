"""A cell with `--check`: a dry run in ranks that are thrown away, and a report. Runs in the kernel.

Ranks write into a file shield, or, where the system allows none, saves are redirected and files that changed are
listed. Nothing comes back: the variables of the notebook are as before.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbaccel.display.run_view import RunView
from nbaccel.dry_run.forecast import measure_noise
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
from nbaccel.notebook.checks.findings import DryRunResult
from nbaccel.notebook.checks.report import CheckReport
from nbaccel.output.screens import SilentScreen

__all__ = ["CellCheck"]

_PREFIX = "nbaccel-check-"

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
        with _folder(self._launcher) as folder:
            shield = FileShield.start([folder / "records"], folder / "shield")
            try:
                return self._in_shield(folder, shield, noise)
            finally:
                shield.close()

    def _in_shield(self, folder: Path, shield: FileShield, noise: float) -> CheckReport:
        snapshot = None
        if shield.why_not:
            self._say(
                f"files are not shielded here: {shield.why_not}. Saves of torch, safetensors and nbaccel are "
                "redirected, and what else the cell writes is real"
            )
            (folder / SAVES).mkdir()
            (folder / "kept").mkdir()
            snapshot = FolderSnapshot.of(Path.cwd(), keep=folder / "kept")
        elif open_folders := [path for path in shield.not_covered if path != folder / "records"]:
            self._say(f"files are not shielded here: {', '.join(map(str, open_folders))}")
        records = folder / "records"
        began = time.monotonic()
        outcome = self._launcher.run(self._spec(records, shield), RunObservers(_hidden_view(self._plan, self._source)))
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
        changed = [f"{path}{', and put back' * (path in restored)}" for path in changed]
        return CheckReport.of(found, self._source, self._plan, changed, self._platform)

    def _spec(self, records: Path, shield: FileShield) -> LaunchSpec:
        cell = self._cell
        out = None if cell.leaves_all else cell.out
        task = DryRunTask(self._source, cell.namespace, out, cell.extra, folder=str(records), make_parts=_PARTS)
        task.random = cell.random
        spec = self._plan.spec(task, self._setup, wants_results=False)
        saves_to = str(records.with_name(SAVES)) if shield.why_not else ""
        settings = replace(spec.settings, dry_run=str(records), checkpoint_every=None, resume=None)
        return replace(
            spec, settings=settings, timeout_s=None, shield=shield.entry, ends_waiting=True, saves_to=saves_to
        )


@contextmanager
def _folder(launcher: Launcher) -> Iterator[Path]:
    """Yield a private folder, which is removed afterwards, also if this process is killed."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    launcher.resources.guard(str(path))
    try:
        for name in ("records", "shield"):
            (path / name).mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        launcher.resources.guard(f"-{path}")


def _hidden_view(plan: LaunchPlan, source: CellSource) -> RunView:
    return RunView(SilentScreen(), plan.devices.num_processes, plan.facts(source.name))
