"""Find the user's line that called this package, for warnings and for names. Runs in ranks.

`warn_user` points a warning at that line, however it called this package. Other functions find the place of the call,
and the name of a variable there.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from nbaccel.base.notices import PACKAGE_DIR, is_users, unignored

__all__ = [
    "lasting_place",
    "library_that_trains",
    "place_of_call",
    "program_frames",
    "users_frames",
    "users_line",
    "users_name",
    "variables_of",
    "warn_user",
]

_PASSED_BY = (
    PACKAGE_DIR,
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
    while frame.f_back is not None and _is_passed_by(frame.f_code):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def _is_passed_by(code: CodeType) -> bool:
    """Return whether `code` is the package's, torch's, or the ``__init__`` of a dataclass, which has no file."""
    is_generated = code.co_filename == "<string>" and code.co_name == "__init__"
    return is_generated or os.path.abspath(code.co_filename).startswith(_PASSED_BY)


_MOST_DEPTH = 100
_OWN_REFERENCES = 3  # the frame's, ours, and that of the call
_NOT_USERS = (
    PACKAGE_DIR,
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


# PEP 667, https://peps.python.org/pep-0667/, ended these copies.
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


def program_frames(most: int) -> Iterator[FrameType]:
    """Yield these frames up to that of the cell, or of the module: what has started it differs between processes."""
    for frame in users_frames(most):
        yield frame
        if frame.f_code.co_name == "<module>":
            return


_TRAINS = {
    "transformers.trainer": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "accelerate": "accelerate",
}
"""Modules of libraries that count batches, and choose a precision, by arguments of their own."""


def library_that_trains() -> str:
    """Return the library of `_TRAINS` whose functions are being called; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    depth = _MOST_DEPTH
    while frame is not None and depth:
        name = str(frame.f_globals.get("__name__", ""))
        found = _TRAINS.get(name.partition(".")[0], "") or _TRAINS.get(".".join(name.split(".")[:2]), "")
        if found:
            return found
        frame, depth = frame.f_back, depth - 1
    return ""


def place_of_call() -> int:
    """Return a number for the lines that led here; equal for passes that the same loop begins, also through a bar.

    All lines, up to the program's first: a library may train and evaluate by one engine, however many calls deep, which
    is told apart by who calls it, or by the functions and flags that a caller gives.
    """
    return hash(tuple((frame.f_code, frame.f_lineno, *_given(frame)) for frame in users_frames(_MOST_DEPTH)))


def lasting_place() -> int:
    """Return a number for the user's own lines that led here; equal in another process that runs the same program."""
    frames = (frame for frame in program_frames(_MOST_DEPTH) if is_users(frame.f_code.co_filename))
    return zlib.crc32(" ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames).encode())


def _given(frame: FrameType) -> Iterator[Any]:
    """Yield the functions, by their code, and the flags among the arguments of a frame."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not code.co_argcount + code.co_kwonlyargcount:
        return
    values = variables_of(frame)
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = values.get(name)
        if type(value) is bool:
            yield value
        elif isinstance(value, FunctionType | MethodType):
            yield value.__code__


def users_name(value: Any) -> str:
    """Return the variable that holds `value` in the frames that led here, not in a library; "" if there is none."""
    for frame in users_frames(_MOST_DEPTH):
        if not is_users(frame.f_code.co_filename):
            continue
        for names in (variables_of(frame), frame.f_globals):
            for name, each in list(names.items()):
                if each is value and name != "self" and not name.startswith("_"):
                    return name
    return ""
