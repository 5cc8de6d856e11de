"""SavingCellTask: a cell that saves its training, or goes on from a checkpoint. Made in the kernel, run in ranks."""

from __future__ import annotations

import secrets
import types
from collections.abc import Mapping
from typing import Any

from nbaccel.features.cell_checkpoints.saves import CellSaves, marks_of
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask

__all__ = ["SavingCellTask"]


class SavingCellTask(CellTask):
    """Runs a cell like a `CellTask`, in a version that is saved and that goes on, see `CellSaves`.

    Args:
        run_name: A name for the run that is equal in all ranks, also when it is started again.
        marks: Marks of the cell's code, and of the functions and classes that it names. The kernel has their texts.
    """

    reference = "nbaccel.features.cell_checkpoints.saving_task:SavingCellTask"
    saves_itself = True

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] | None = None,
        extra: tuple[str, ...] = (),
        *,
        run_name: str = "",
        marks: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, namespace, out, extra, **options)
        self.run_name = run_name or secrets.token_hex(6)
        self.marks = marks_of(source, namespace) if marks is None else marks
        self._saving_parts: list[types.CodeType] = []

    def _own_facts(self) -> Mapping[str, Any]:
        return {"run_name": self.run_name, "marks": self.marks}

    def run(self) -> None:
        with CellSaves(self.source, self.namespace, self.run_name, self.marks, self.flags) as saves:
            self._saving_parts = saves.parts
            super().run()

    def _executed(self) -> list[types.CodeType]:
        return self._saving_parts
