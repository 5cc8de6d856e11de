"""SavingCellTask: a cell that saves its training, or goes on from a checkpoint. Made in the kernel, run in ranks."""

from __future__ import annotations

import os
import secrets
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbaccel.errors import CannotResume, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.saves import CellSaves, marks_of
from nbaccel.launching.ipc.spec import Results
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask

__all__ = ["SavingCellTask"]

_WRITTEN = (
    "objects of these cells have the values of the checkpoint by now: run the cells above again, which make them, also "
    "before the training begins anew"
)
"""Said where the process, and with it the objects, outlives the run."""


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
        self._made_in = os.getpid() if marks is None else 0
        self._is_refused = self._was_over = False

    def _own_facts(self) -> Mapping[str, Any]:
        return {"run_name": self.run_name, "marks": self.marks}

    def run(self) -> None:
        saves: CellSaves | None = None
        try:
            with CellSaves(self.source, self.namespace, self.run_name, self.marks, self.flags) as saves:
                self._saving_parts = saves.parts
                super().run()
            self._was_over = saves.was_over
        except BaseException as error:
            is_on_the_way = saves is not None and saves.is_on_the_way
            self._is_refused = is_on_the_way or isinstance(error, CannotResume | CheckpointCorrupt)
            if not self._is_refused:
                raise
            if saves is not None and saves.has_written and (self.home is not None or os.getpid() == self._made_in):
                error.add_note(_WRITTEN)
            raise

    def results(self, rank: int) -> Results:
        """Return what the cell leaves; nothing of a resume that was refused, or has failed on the way."""
        if self._is_refused and self.home is None:
            return Results()
        found = super().results(rank)
        if self._is_refused:  # ranks that stay know what they have
            found = replace(found, values={}, changes=())
        return replace(found, facts={**found.facts, "was_over": self._was_over})

    def _executed(self) -> list[types.CodeType]:
        return self._saving_parts
