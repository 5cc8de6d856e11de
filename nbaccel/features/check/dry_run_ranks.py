"""DryRunRanks: the place of one run whose ranks, files and results are discarded. Runs in the kernel.

Saves of its ranks are redirected, what else they change is undone, and files that are not as before are listed. Nothing
comes back: the variables of the notebook are as before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbaccel.display.run_view import RunView
from nbaccel.features.check.dry_run.rank_records import ORIGINALS, RECORDS, SAVES
from nbaccel.features.check.folder_snapshot import FolderSnapshot, undo_changes
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.interaction import uninterrupted
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import SilentScreen

__all__ = ["PREFIX", "DryRunRanks", "free_bytes", "interrupted", "unseen"]

PREFIX = "nbaccel-check-"
"""Beginning of the names of folders for temporary files."""

_PROTECTED = "nbaccel.features.check.protected_files:ProtectedFiles"


class DryRunRanks:
    """The place of one run, see `start`.

    Attributes:
        records: The folder into which ranks record what they see.
    """

    def __init__(self, folder: Path) -> None:
        self._ranks = folder / "ranks"
        self._left: dict[str, str] = {}  # originals that could not be put back, by the path of the file
        self.records = self._ranks / RECORDS
        for name in (RECORDS, ORIGINALS, SAVES):
            (self._ranks / name).mkdir(parents=True)
        (folder / "kept").mkdir()
        self._snapshot = FolderSnapshot.of(Path.cwd(), keep=folder / "kept")

    @classmethod
    @contextmanager
    def start(cls, launcher: Launcher) -> Iterator[DryRunRanks]:
        """Yield a new one; afterwards what its ranks have changed is undone.

        That is so also if this process is killed: the reaper does it then.
        """
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()  # mode 0700
        undo = _program_that_undoes(folder)
        launcher.resources.guard(str(folder))
        launcher.resources.guard(f"!{undo}")
        place = None
        try:
            place = cls(folder)
            yield place
        finally:
            # Another interrupt would remove the originals of files that are not back yet.
            with uninterrupted():
                if place is not None:
                    place._undo()  # also after an interrupt
                launcher.resources.guard(f"-!{undo}")
                parts = [folder / "kept", folder / "ranks" / RECORDS, folder / "ranks" / SAVES]
                for each in parts if place is not None and place._left else [folder]:
                    shutil.rmtree(each, ignore_errors=True)
                launcher.resources.guard(f"-{folder}")

    def changed_files(self) -> list[str]:
        """Undo what the run has changed, as far as that is known, and return the files that are not as before.

        One that could not be put back is named with its original, which stays.
        """
        undone = self._undo()
        changed = [path for path in self._snapshot.changed() if not (path in undone and self._snapshot.has(path))]
        left = [f"{path} (not put back; the original is {kept})" for path, kept in sorted(self._left.items())]
        return [*(path for path in changed if path not in self._left), *left]

    def _undo(self) -> set[str]:
        """Undo what can be; return the paths of files that are as before now."""
        with uninterrupted():  # a file may be half written
            # First what has a second name: what the notebook has open is the same file then.
            again, undone = self._snapshot.put_back(), undo_changes(self._ranks / ORIGINALS)
            self._left = undone.failed
            return {*again, *undone.done}

    def spec(self, plan: LaunchPlan, task: CellTask, cell: CellTask, setup: str | None) -> LaunchSpec:
        """Return the spec of a run of `task`, which runs what `cell` would run.

        Args:
            setup: See `Session`.
        """
        task.random = cell.random
        spec = plan.spec(task, setup, wants_results=False)
        settings = replace(spec.settings, dry_run=str(self.records), checkpoint_every=None, resume=None)
        parts = ((_PROTECTED, str(self._ranks)),)
        return replace(spec, settings=settings, parts=parts).ending(timeout_s=None, ends_waiting=True)


def _program_that_undoes(folder: Path) -> str:
    """Return the arguments of a process that undoes what a run has changed, as JSON."""
    code = f"import sys; sys.path.append(sys.argv[1]); from {undo_changes.__module__} import undo_changes as undo; "
    return json.dumps(
        [
            sys.executable,
            *("-c", f"{code}import pathlib; undo(pathlib.Path(sys.argv[2]))"),
            *(str(Path(__file__).parents[3]), str(folder / "ranks" / ORIGINALS)),
        ]
    )


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk of `path`, which may not exist yet, for this user."""
    place = Path(path).absolute()
    disk = os.statvfs(next(folder for folder in (place, *place.parents) if folder.exists()))
    return disk.f_bavail * disk.f_frsize


def interrupted(what: str, changed: Sequence[str]) -> KeyboardInterrupt:
    """Return the interrupt that ends `what`.

    Args:
        changed: What `DryRunRanks.changed_files` returned.
    """
    left = f"changed: {', '.join(changed)}" if changed else "nothing was changed"
    return KeyboardInterrupt(f"{what} interrupted; {left}.")


def unseen(plan: LaunchPlan, title: str) -> RunObservers:
    """Return observers of a run that show nothing."""
    return RunObservers(RunView(SilentScreen(), plan.devices.num_processes, plan.facts(title)))
