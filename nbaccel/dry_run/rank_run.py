"""RankDryRun: all that watches and cuts the program of one rank during a dry run. Runs in ranks.

It owns the log of loops, the cuts of loaders, the clocks and the records. Its parts are installed when the rank begins,
before other hooks of torch, and removed when the cell is over.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nbaccel.dry_run.decisions import SharedDecisions
from nbaccel.dry_run.loader_cuts import LoaderCuts
from nbaccel.dry_run.loop_log import DryRunEnded, LoopLog
from nbaccel.dry_run.memory_peaks import MemoryPeaks
from nbaccel.dry_run.rank_records import RankRecords
from nbaccel.dry_run.rewriting import Table, provide, rewrite, rewrite_functions
from nbaccel.dry_run.saved_files import SavedFiles
from nbaccel.dry_run.step_times import StepTimes
from nbaccel.settings import EACH, RunSettings
from nbaccel.world import World

__all__ = ["RankDryRun"]

_OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables by which libraries leave the network alone. What a program sends by itself is sent."""

_OFFLINE_FLAGS = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""Where libraries that the notebook has imported keep them."""


class RankDryRun:
    """Watches the program of one rank, and ends its loops.

    folder: that the ranks share.
    reached: lines of the cell in which a statement has begun.
    """

    def __init__(self, folder: Path, world: World, settings: RunSettings) -> None:
        self._records = RankRecords(folder, world.rank)
        write = self._records.write
        self.reached: set[int] = set()
        self._log = LoopLog(write)
        self._times = StepTimes(write, on_step=self._log.note_step)
        self._peaks = MemoryPeaks(write)
        self._saves = SavedFiles(write, self._log.open_loops, self._times.part)
        is_shared = world.is_distributed and not (settings.strict or settings.independent)
        self._cuts = LoaderCuts(
            self._log,
            write,
            SharedDecisions(folder, world.rank, world.world_size),
            [self._times, self._peaks],
            self._times.part,
            stride=world.world_size if is_shared and settings.batches == EACH else 1,
            begins_whole=is_shared and settings.batches != EACH,
        )
        self._table: Table = []

    def install(self) -> None:
        """Cut loaders from now on, and keep libraries from the network."""
        _go_offline()
        self._cuts.begin()

    def rewritten(
        self, tree: ast.Module, name: str, compile_parts: Callable[[ast.Module], list[types.CodeType]]
    ) -> list[types.CodeType]:
        """Return the code of the cell with loops that can be ended; functions of earlier cells are rewritten in place.

        compile_parts: compiles the tree as the cell itself would be compiled.
        """
        self._table = rewrite(tree, marks_lines=True, file=name)
        parts = compile_parts(tree)
        self._table += rewrite_functions(len(self._table))
        self._records.write({"kind": "table", "table": self._table})
        return parts

    def __enter__(self) -> Self:
        provide(self._log, self.reached.add)
        self._times.begin()
        self._peaks.begin()
        self._saves.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Remove what was installed, and write the last records. A loop that could be ended only so is no error."""
        is_cut = isinstance(error, DryRunEnded)
        with suppress(OSError):  # the disk of the records is full: the error of the cell says more
            for part in (self._cuts, self._saves, self._times, self._peaks):
                part.end()
            self._log.close(ended_well=error is None)
            self._records.write(
                {
                    "kind": "end",
                    "reached": sorted(self.reached),
                    "ended_well": error is None,
                    "left": str(error) if is_cut else "",
                    "error": None if kind is None or is_cut else kind.__name__,
                }
            )
        self._log.leave()
        return is_cut


def _go_offline() -> None:
    os.environ.update(_OFFLINE)
    for module, name in _OFFLINE_FLAGS:
        if module in sys.modules:
            setattr(sys.modules[module], name, True)
