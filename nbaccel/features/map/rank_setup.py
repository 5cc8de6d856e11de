"""Work on a map in a rank; `nbaccel.map` names it by a string, and the kernel loads it before ranks start. In ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbaccel.features.map.map_job import MapJob
from nbaccel.features.map.map_worker import work
from nbaccel.train.accelerator import Accelerator

__all__ = ["map_in_rank"]


def map_in_rank(
    job: MapJob,
    items: Any,
    function: Callable[..., Any],
    setup: Callable[..., Any] | None,
    hang_timeout_s: float | None = None,
) -> None:
    """Work on a map in a rank that the launcher starts again if it dies; see `nbaccel.map`."""
    work(Accelerator(), job, items, function, setup, is_restarted=True, hang_timeout_s=hang_timeout_s)
