"""RankDryRun: all that watches and cuts the program of one rank during a dry run. Runs in ranks.

It owns the log of loops, and the parts that cut loaders and measure, from the first line of the cell to its last.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbaccel.features.check.dry_run.loop_log import DryRunEnded, LoopLog
from nbaccel.features.check.dry_run.rank_records import RankRecords
from nbaccel.features.check.dry_run.rewriting import Table, provide, rewrite, rewrite_functions
from nbaccel.features.check.dry_run.short_trainings import ShortTrainings

__all__ = ["RankDryRun", "go_offline"]

_OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables by which libraries leave the network alone. What a program sends by itself is sent."""

_OFFLINE_FLAGS = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""Where libraries that the notebook has imported keep them."""


def go_offline() -> None:
    """Keep libraries from the network, before the program imports them."""
    os.environ.update(_OFFLINE)
    for module, name in _OFFLINE_FLAGS:
        if module in sys.modules:
            setattr(sys.modules[module], name, True)


class RankDryRun:
    """Watches the program of one rank, and ends its loops.

    Args:
        folder: That the ranks share.
        rank: The rank of this process.
        make_parts: Returns, for a log, a function that appends a record, and a folder, an object that cuts loaders and
            measures from `begin` to `end`.
        when_loaded: See `ShortTrainings`.

    Attributes:
        reached: Lines of the cell in which a statement has begun.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        make_parts: Callable[..., Any],
        when_loaded: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self._records = RankRecords(folder, rank)
        self.reached: set[int] = set()
        self._log = LoopLog(self._records.write)
        self._parts = make_parts(self._log, self._records.write, folder)
        self._trainings = ShortTrainings(self._parts.cuts, self._records.write, when_loaded, self._log.part)
        self._table: Table = []

    def rewritten(
        self, tree: ast.Module, name: str, compile_parts: Callable[[ast.Module], list[types.CodeType]]
    ) -> list[types.CodeType]:
        """Return the code of the cell with loops that can be ended; functions of earlier cells are rewritten in place.

        Args:
            compile_parts: Compiles the tree as the cell itself would be compiled.
        """
        self._table = rewrite(tree, marks_lines=True, file=name)
        parts = compile_parts(tree)
        self._table += rewrite_functions(len(self._table))
        self._records.write({"kind": "table", "table": self._table})
        return parts

    def __enter__(self) -> Self:
        provide(self._log, self.reached.add)
        self._parts.begin()
        self._trainings.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Remove what was installed, and write the last records. A loop that could be ended only so is no error."""
        is_cut = isinstance(error, DryRunEnded)
        record = {
            "kind": "end",
            "reached": sorted(self.reached),
            "left": str(error) if is_cut else "",
            "error": None if kind is None or is_cut else kind.__name__,
        }
        ends = (
            self._trainings.end,
            self._parts.end,
            self._log.close,
            functools.partial(self._records.write, record),
        )
        for end in ends:
            # The error of the cell says more: a full disk, or a device that refuses everything after a failed assert.
            with suppress(OSError if error is None else Exception):
                end()
        self._log.leave()
        return is_cut
