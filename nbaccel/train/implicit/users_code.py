"""User's code around a call: finds the place of the call, and the name of a variable there. Runs in ranks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = ["place_of_call", "users_frames", "users_name", "variables_of"]

_DEPTH = 3
_OWN_REFERENCES = 3  # the frame's, ours, and that of the call
_NOT_USERS = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
)
_BARS = frozenset({"fastprogress", "rich", "tqdm"})
"""Packages that begin a pass for the program: the place of the call is a line of the frames above them."""


def users_frames(most: int) -> Iterator[FrameType]:
    """Yield the innermost frames outside of this package, torch and progress bars, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BARS and not frame.f_code.co_filename.startswith(_NOT_USERS):
            most -= 1
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of `frame`, in a mapping that the caller must not keep.

    Until Python 3.12 a function's frame keeps a mapping that was read, and so a model that the function deletes.
    """
    found = frame.f_locals
    if type(found) is not dict:
        return dict(found)
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return found
    copy = dict(found)
    if sys.getrefcount(found) <= _OWN_REFERENCES:  # otherwise the program has it, by `locals()`
        found.clear()
    return copy


def place_of_call() -> tuple[tuple[CodeType, int], ...]:
    """Return the lines that led here; equal for passes that the same loop begins, also through a progress bar."""
    return tuple((frame.f_code, frame.f_lineno) for frame in users_frames(_DEPTH))


def users_name(value: Any) -> str:
    """Return the variable that holds `value` in the frames that led here; "" if there is none."""
    for frame in users_frames(_DEPTH):
        for names in (variables_of(frame), frame.f_globals):
            for name, each in list(names.items()):
                if each is value and not name.startswith("_"):
                    return name
    return ""
