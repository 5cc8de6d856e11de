"""DryRunRanks: the place of one run whose ranks, files and results are discarded. Runs in the kernel.

Ranks write into a file shield. Where the system allows none, or it leaves a folder open, saves are redirected, what
else ranks write is undone, and files that are not as before are listed. Nothing comes back: the variables of the
notebook are as before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbaccel.display.run_view import RunView
from nbaccel.features.check.dry_run.rank_records import ORIGINALS, SAVES
from nbaccel.features.check.folder_snapshot import FolderSnapshot, undo_changes
from nbaccel.features.check.shield.file_shield import FileShield
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import SilentScreen

__all__ = ["PREFIX", "DryRunRanks", "interrupted", "unseen"]

PREFIX = "nbaccel-check-"
"""Beginning of the names of folders for temporary files."""


_SHIELDED = "nbaccel.features.check.shield.shielded:Shielded"
_REDIRECTED = "nbaccel.features.check.redirected_saves:RedirectedSaves"


class DryRunRanks:
    """The place of one run, see `start`.

    records: the folder into which ranks record what they see; what they write there stays until the end.
    shield: what they write elsewhere is discarded by it, if there is one.
    """

    def __init__(self, folder: Path, shield: FileShield, shared: Sequence[Path] = ()) -> None:
        self.records = _of_ranks(folder) / "records"
        self.shield = shield
        self._shared = shared
        self._open = [path for path in shield.not_covered if path not in (_of_ranks(folder), *shared)]
        self._kept = folder / "kept"
        self._snapshot: FolderSnapshot | None = None

    @classmethod
    @contextmanager
    def start(cls, launcher: Launcher, shared: Sequence[Path] = ()) -> Iterator[DryRunRanks]:
        """Yield a new one; it is removed afterwards, also if this process is killed.

        shared: folders, without links in their paths, in which what ranks write stays.
        """
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()  # mode 0700
        launcher.resources.guard(str(folder))
        try:
            for name in ("records", ORIGINALS):
                (_of_ranks(folder) / name).mkdir(parents=True)
            (folder / "shield").mkdir()
            shield = FileShield.start([_of_ranks(folder), *shared], folder / "shield")
            place = cls(folder, shield, shared)
            try:
                yield place
            finally:
                try:
                    place._undo()  # also after an interrupt
                finally:
                    shield.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            launcher.resources.guard(f"-{folder}")

    @property
    def is_shielded(self) -> bool:
        """Return whether nothing that ranks write reaches the machine."""
        return not (self.shield.why_not or self._open)

    def watch_files(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Prepare for a run without a whole shield, and say what is not shielded."""
        if self.is_shielded:
            return
        where = f"in {', '.join(map(str, self._open))}" if self._open else f"here: {self.shield.why_not}"
        say(
            f"files are not shielded {where}. Saves of torch, safetensors and nbaccel are redirected, what else Python "
            "writes there is undone at the end, and the rest is real"
        )
        self._saves.mkdir()
        if self.shield.why_not or not self.shield.covers(Path.cwd()):
            self._kept.mkdir()
            self._snapshot = FolderSnapshot.of(Path.cwd(), keep=self._kept)

    def changed_files(self) -> list[str]:
        """Undo what the run has changed, as far as that is known, and return the files that are not as before."""
        undone = self._undo()
        changed = [] if self._snapshot is None else self._snapshot.changed()
        return [path for path in changed if path not in undone]

    def _undo(self) -> set[str]:
        """Undo what can be; return the paths of files that are as before now."""
        undone = undo_changes(self.records.with_name(ORIGINALS), self._is_to_be_undone)
        return {*undone} if self._snapshot is None else {*undone, *self._snapshot.put_back()}

    def _is_to_be_undone(self, path: str) -> bool:
        return not self.shield.covers(path) and not any(Path(path).is_relative_to(each) for each in self._shared)

    @property
    def _saves(self) -> Path:
        return self.records.with_name(SAVES)

    def spec(self, plan: LaunchPlan, task: CellTask, cell: CellTask, setup: str | None) -> LaunchSpec:
        """Return the spec of a run of `task`, which runs what `cell` would run.  setup: see `Session`."""
        task.random = cell.random
        spec = plan.spec(task, setup, wants_results=False)
        parts = ((_SHIELDED, self.shield.entry),) if self.shield.entry else ()
        if not self.is_shielded:
            parts = (*parts, (_REDIRECTED, str(self._saves)))
        settings = replace(spec.settings, dry_run=str(self.records), checkpoint_every=None, resume=None)
        return replace(
            spec,
            settings=settings,
            timeout_s=None,
            ends_waiting=True,
            parts=parts,
            meeting_folder=self.shield.meeting_folder,
        )


def _of_ranks(folder: Path) -> Path:
    """Return the folder that ranks and the kernel share."""
    return folder / "ranks"


def interrupted(what: str, changed: Sequence[str]) -> KeyboardInterrupt:
    """Return the interrupt that ends `what`.  changed: of `DryRunRanks.changed_files`."""
    left = f"changed: {', '.join(changed)}" if changed else "nothing was changed"
    return KeyboardInterrupt(f"{what} interrupted; {left}.")


def unseen(plan: LaunchPlan, title: str) -> RunObservers:
    """Return observers of a run that show nothing."""
    return RunObservers(RunView(SilentScreen(), plan.devices.num_processes, plan.facts(title)))
