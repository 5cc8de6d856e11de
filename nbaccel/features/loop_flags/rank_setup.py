"""Setup of a rank whose launch names none: loops that prepare nothing are changed as flags ask. Runs in ranks."""

from __future__ import annotations

from typing import Any

from nbaccel.base.settings import RunSettings
from nbaccel.features.loop_flags.loop_changes import loop_changes
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.raw_loop.lone_loop import LoneLoop

__all__ = ["change_loops"]


def change_loops(namespace: dict[str, Any] | None) -> LoneLoop:
    """Return what changes the loops of each task of this rank. Nothing is trained on all ranks by it."""
    return LoneLoop(loop_changes(RunSettings.from_env()), current_world().is_main_process)
