"""Warnings that stand at the user's line, by whichever way they were reached. Runs in ranks."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch

from nbaccel.notices import unignored

__all__ = ["users_line", "warn_user"]

_PASSED_BY = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,  # whose schedulers wrap an optimizer's step
)


def warn_user(message: str) -> None:
    """A `UserWarning` at the line that called this package, whatever the program's filters ignore.

    A depth that is counted holds for one way alone.
    """
    depth = _callers()[1]
    with unignored():
        warnings.warn(message, stacklevel=depth)


def users_line() -> str:
    """The line that called this package, ``train:12``, without a path, which may differ between ranks."""
    frame = _callers()[0]
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _callers() -> tuple[FrameType, int]:
    """The first frame outside of this package, and its depth as the caller of this function counts."""
    frame, depth = sys._getframe(2), 2
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PASSED_BY):
        frame, depth = frame.f_back, depth + 1
    return frame, depth
