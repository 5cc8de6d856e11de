"""ProtectedFiles: the part of a rank by which a dry run leaves files as they are. Runs in ranks; imports no torch.

Saves are written elsewhere (`redirected_saves`, `redirected_checkpoints`). Of other files that Python changes the
originals are kept (`kept_originals`), and the kernel puts them back (`folder_snapshot`). Files that a forked rank has
from the notebook are parted from it (`inherited_files`). What cannot be undone is not run (`unrun_statements`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nbaccel.base.world import World
from nbaccel.features.check.dry_run.rank_records import ORIGINALS, RECORDS, SAVES, RankRecords
from nbaccel.features.check.inherited_files import part_from_inherited_files
from nbaccel.features.check.kept_originals import KeptOriginals
from nbaccel.features.check.redirected_saves import redirect_saves
from nbaccel.features.check.unrun_statements import UnrunStatements, skip_programs, skip_removals
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import RankPart

__all__ = ["ProtectedFiles"]


class ProtectedFiles(RankPart):
    """Leaves files as they are.

    Args:
        argument: The folder that the ranks of a dry run share.
    """

    def install(self) -> None:
        folder = Path(self.argument)
        unrun = UnrunStatements(RankRecords(folder / RECORDS, World.from_env().rank).write)
        originals = KeptOriginals(str(folder / ORIGINALS), unrun)
        part_from_inherited_files(folder)
        skip_programs(unrun)
        skip_removals(unrun, originals.why_not_removed)
        redirect_saves(str(folder / SAVES))  # around those that skip: what was saved elsewhere is removed there
        sys.addaudithook(originals.look)  # stays until the process, a rank, ends
        when_loaded({"nbaccel.train.accelerator": self._redirect_checkpoints})

    def _redirect_checkpoints(self, module: Any) -> None:
        from nbaccel.features.check.dry_run.redirected_checkpoints import redirect_checkpoints  # imports torch

        redirect_checkpoints(os.path.join(self.argument, SAVES))
