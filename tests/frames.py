"""Count the frames of this package on a stack: how far a user's line is from what it asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import nbaccel

__all__ = ["our_frames"]

OURS = str(Path(nbaccel.__file__).parent) + "/"


def our_frames(below: str | None = None) -> list[str]:
    """Name this package's functions that the caller stands on, the innermost first.

    below: stop at the function of that name, which asked; None for the whole stack.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != below:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_code.co_name}")
        frame = frame.f_back
    assert below is None or frame is not None, f"{below} is not on the stack"
    return found
