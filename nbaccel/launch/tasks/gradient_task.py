"""GradientTask: a cell that runs until its first step, whose gradients are recorded. Made in the kernel, for ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.dry_run.rank_records import RankRecords
from nbaccel.dry_run.rank_run import go_offline
from nbaccel.launch.ipc.spec import Results, load_named
from nbaccel.launch.tasks.cell_code import CellSource
from nbaccel.launch.tasks.cell_task import CellTask

__all__ = ["GradientTask"]


class GradientTask(CellTask):
    """Runs a cell until its first step; see `CellTask` for the arguments.

    folder: the folder of the records.  make_probe: "module:function" that returns what watches the cell.
    turns, steps: see `nbaccel.train.gradient_probe.GradientProbe`.
    """

    reference = "nbaccel.launch.tasks.gradient_task:GradientTask"

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] | None = None,
        extra: tuple[str, ...] = (),
        *,
        folder: str,
        make_probe: str,
        turns: int = 1,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, namespace, out, extra, **options)
        self.folder = folder
        self.make_probe = make_probe
        self.turns = turns
        self.steps = steps
        self._rank = 0

    def _own_facts(self) -> Mapping[str, Any]:
        return {"folder": self.folder, "make_probe": self.make_probe, "turns": self.turns, "steps": self.steps}

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self._rank = rank
        go_offline()

    def run(self) -> None:
        folder = Path(self.folder)
        write = RankRecords(folder, self._rank).write
        values = folder / f"gradients-{self._rank}.f32"
        with load_named(self.make_probe)(write, values, self.turns, self.steps):
            super().run()

    def results(self, rank: int) -> Results:
        return Results()
