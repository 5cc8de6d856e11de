"""Throwaway: the place of one run whose ranks, files and results are thrown away. Runs in the kernel.

Ranks write into a file shield, or, where the system allows none, saves are redirected and files that changed are
listed. Nothing comes back: the variables of the notebook are as before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbaccel.display.run_view import RunView
from nbaccel.dry_run.rank_records import SAVES
from nbaccel.launch.ipc.spec import LaunchSpec
from nbaccel.launch.launcher import Launcher
from nbaccel.launch.plan import LaunchPlan
from nbaccel.launch.processes.file_shield import FileShield
from nbaccel.launch.processes.folder_snapshot import FolderSnapshot
from nbaccel.launch.processes.supervisor import RunObservers
from nbaccel.launch.tasks.cell_task import CellTask
from nbaccel.output.screens import SilentScreen

__all__ = ["PREFIX", "PUT_BACK", "Throwaway", "unseen"]

PUT_BACK = ", and put back"
"""The words behind a file that a run has changed, where it is as before again."""

PREFIX = "nbaccel-check-"
"""Beginning of the names of folders for temporary files."""


class Throwaway:
    """The place of one run, see `throwaway`.

    records: the folder into which ranks record what they see; what they write there stays until the end.
    shield: what they write elsewhere is thrown away by it, if there is one.
    """

    def __init__(self, folder: Path, shield: FileShield, shared: Sequence[Path] = ()) -> None:
        self.records = folder / "records"
        self.shield = shield
        self._kept = folder / "kept"
        self._shared = [path.resolve() for path in shared]
        self._snapshot: FolderSnapshot | None = None

    @classmethod
    @contextmanager
    def start(cls, launcher: Launcher, kept: Sequence[Path] = ()) -> Iterator[Throwaway]:
        """Yield a new one; it is removed afterwards, also if this process is killed.

        kept: folders in which what ranks write stays.
        """
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        launcher.resources.guard(str(folder))
        try:
            for name in ("records", "shield"):
                (folder / name).mkdir()
            shield = FileShield.start([folder / "records", *kept], folder / "shield")
            try:
                yield cls(folder, shield, kept)
            finally:
                shield.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            launcher.resources.guard(f"-{folder}")

    def watch_files(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Prepare for a run without a shield, and say what is not shielded."""
        shield = self.shield
        if shield.why_not:
            say(
                f"files are not shielded here: {shield.why_not}. Saves of torch, safetensors and nbaccel are "
                "redirected, and what else the cell writes is real"
            )
            self.records.with_name(SAVES).mkdir()
            self._kept.mkdir()
            self._snapshot = FolderSnapshot.of(Path.cwd(), keep=self._kept)
        elif open_folders := [path for path in shield.not_covered if path not in (self.records, *self._shared)]:
            say(f"files are not shielded here: {', '.join(map(str, open_folders))}")

    def changed_files(self) -> list[str]:
        """Return the files that the run has changed, and put back those that can be."""
        if self._snapshot is None:
            return []
        changed, restored = self._snapshot.changed(), self._snapshot.put_back()
        return [f"{path}{PUT_BACK * (path in restored)}" for path in changed]

    def spec(self, plan: LaunchPlan, task: CellTask, cell: CellTask, setup: str | None) -> LaunchSpec:
        """Return the spec of a run of `task`, which runs what `cell` would run.  setup: see `Session`."""
        task.random = cell.random
        spec = plan.spec(task, setup, wants_results=False)
        saves_to = str(self.records.with_name(SAVES)) if self.shield.why_not else ""
        settings = replace(spec.settings, dry_run=str(self.records), checkpoint_every=None, resume=None)
        return replace(
            spec,
            settings=settings,
            timeout_s=None,
            shield=self.shield.entry,
            ends_waiting=True,
            saves_to=saves_to,
        )


def unseen(plan: LaunchPlan, title: str) -> RunObservers:
    """Return observers of a run that show nothing."""
    return RunObservers(RunView(SilentScreen(), plan.devices.num_processes, plan.facts(title)))
