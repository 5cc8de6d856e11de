"""Trackers, and what own ones are built on: names that programs import from ``accelerate.tracking``. Used anywhere."""

from __future__ import annotations

from typing import Any

from nbaccel.base.missing_names import missing_from
from nbaccel.base.tracking import BlankTracker, GeneralTracker, on_main_process, without_none
from nbaccel.train.named_trackers import ACCELERATES_TRACKERS, LoggerType, find_tracker, tracker_names

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
    if name in ACCELERATES_TRACKERS:
        return find_tracker(ACCELERATES_TRACKERS[name])
    return missing_from(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ACCELERATES_TRACKERS})
