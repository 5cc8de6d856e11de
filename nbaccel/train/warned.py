"""Warnings that stand at the user's line, by whichever way they were reached. Runs in ranks."""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["warn_user"]

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def warn_user(message: str) -> None:
    """A `UserWarning` at the line that called this package. A depth that is counted holds for one way alone."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
