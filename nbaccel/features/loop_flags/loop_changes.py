"""The changes of a loop that flags ask for, around each other. Runs in ranks."""

from __future__ import annotations

from nbaccel.base.settings import RunSettings
from nbaccel.features.loop_flags.accumulated_batches import AccumulatedBatches
from nbaccel.features.loop_flags.loop_precision import precision_of_loop
from nbaccel.train.raw_loop.changes_by_flags import LoopChange

__all__ = ["loop_changes"]


def loop_changes(settings: RunSettings) -> tuple[LoopChange, ...]:
    """Return what flags change of a loop that prepares nothing, the outermost change first."""
    changes: list[LoopChange] = []
    count = settings.gradient_accumulation_steps or 1
    accumulated = AccumulatedBatches(count)
    if count > 1:
        changes.append(accumulated)
    if settings.raw_precision is not None:
        changes.append(precision_of_loop(settings.raw_precision, accumulated.holds))
    return tuple(changes)
