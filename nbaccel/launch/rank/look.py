"""Look: turns the traceback of a rank's end into a snapshot of its stack. Runs in ranks, after the user's code.

Frames of the project are left out, those of libraries have no values. The rank's peers are handled the same way: the
kernel interrupts them, and the traceback of the interrupt says where they were.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
import types
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

from nbaccel.launch.rank.describing import described
from nbaccel.launch.snapshot import Scene, Value
from nbaccel.launch.wire.wrappers import plain

__all__ = ["is_data", "is_users", "left_behind", "scenes"]

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THEIRS = (_OURS, *_LIBRARIES, "<frozen")
_MOST_SCENES = 30
_MOST_VALUES = 40
_SOURCE = 200
_NO_DATA = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def is_users(filename: str) -> bool:
    """Return whether a frame of that file belongs neither to the project nor to a library."""
    return not filename.startswith(_NOT_THEIRS)


def scenes(trace: TracebackType | None, file: str = "", names: Mapping[str, Any] | None = None) -> list[Scene]:
    """Return the stack below the place that caught the error, outermost first; of a very deep one the innermost frames.

    names: names that the top level of the cell `file` has bound; a frame of it is compiled in parts, and does not know
    all.
    """
    found: list[tuple[FrameType, int]] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return [
        _scene(frame, line, (names or {}) if frame.f_code.co_filename == file and _is_top_level(frame) else {})
        for frame, line in found[-_MOST_SCENES:]
    ]


def left_behind(file: str, names: Mapping[str, Any]) -> list[Scene]:
    """Return a scene for a rank that is done with the cell `file`: the names it has left; none if there are none."""
    return [Scene(file, 0, "<module>", "", True, _values(names))] if names else []


def _scene(frame: FrameType, line: int, more: Mapping[str, Any]) -> Scene:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()[:_SOURCE]
    theirs = is_users(code.co_filename)
    values = _values(dict(_names_in(frame)) | dict(more)) if theirs else []
    return Scene(code.co_filename, line, code.co_name, source, theirs, values)


def _names_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the names that the frame's code mentions: its locals, and globals, which are the whole notebook."""
    namespace = frame.f_globals
    yield from ((name, namespace[name]) for name in frame.f_code.co_names if name in namespace)
    if not _is_top_level(frame):
        yield from frame.f_locals.items()


def _is_top_level(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _values(names: Mapping[str, Any]) -> list[Value]:
    """Describe the values that matter to a reader; for prepared objects the originals."""
    data = [(name, plain(value)) for name, value in names.items() if is_data(name, plain(value))]
    return [described(name, value) for name, value in data[:_MOST_VALUES]]


def is_data(name: str, value: Any) -> bool:
    """Return whether a value matters to a reader: it is no code, and belongs neither to IPython nor to the project."""
    is_ours = str(type(value).__module__).startswith("nbaccel.")
    return not (name.startswith("_") or issubclass(type(value), _NO_DATA) or is_ours)
