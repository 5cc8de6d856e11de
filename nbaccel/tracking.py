"""Trackers, and what own ones are built on: names that programs import from ``accelerate.tracking``. Used anywhere."""

from __future__ import annotations

from typing import Any

from nbaccel.base import tracking as _tracking
from nbaccel.base.tracking import (
    BlankTracker,
    GeneralTracker,
    LoggerType,
    find_tracker,
    on_main_process,
    tracker_names,
    without_none,
)

__all__ = [
    "BlankTracker",
    "GeneralTracker",
    "LoggerType",
    "find_tracker",
    "on_main_process",
    "tracker_names",
    "without_none",
]


def __getattr__(name: str) -> Any:
    return getattr(_tracking, name)


def __dir__() -> list[str]:
    return dir(_tracking)
