"""Warnings that point at the user's line, however that called this package. Runs in ranks."""

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
    """Emit a `UserWarning` at the line that called this package, whatever the program's filters ignore.

    The depth is searched, since a fixed stacklevel would be right for one chain of calls only.
    """
    depth = _callers()[1]
    with unignored():
        warnings.warn(message, stacklevel=depth)


def users_line() -> str:
    """Return the line that called this package, ``train:12``, without a path, which may differ between ranks."""
    frame = _callers()[0]
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _callers() -> tuple[FrameType, int]:
    """Return the first frame outside of this package, and its depth as seen from the caller of this function."""
    frame, depth = sys._getframe(2), 2
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PASSED_BY):
        frame, depth = frame.f_back, depth + 1
    return frame, depth
