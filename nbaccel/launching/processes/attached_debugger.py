"""Keep a debugger that is attached to the notebook (debugpy, by JupyterLab or VS Code) out of the processes of runs.

debugpy replaces `os.fork` and what starts Python processes: a child waits for a client of the debugger, which never
comes to a rank, https://github.com/microsoft/vscode-jupyter/issues/9886. So the kernel forks and starts its helpers by
the functions of Python's own (`fork`, `undebugged`), and a rank gives up the tracing that it has inherited, whose
threads it lacks (`leave_debugger`). No breakpoint stops a rank; `--pdb` does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

__all__ = ["fork", "is_attached", "leave_debugger", "undebugged", "untrace", "what_it_replaced"]

_ORIGINAL = "original_"
"""What the debugger puts before the name of a function that it has replaced."""

_PATCHED = ("os", "_posixsubprocess", "subprocess")
_THREADS = ("_thread", "threading")


def is_attached() -> bool:
    """Return whether a debugger of pydevd's traces this process."""
    constants = sys.modules.get("_pydevd_bundle.pydevd_constants")
    return constants is not None and constants.get_global_debugger() is not None


def fork() -> int:
    """Fork this process, as `os.fork` does without a debugger."""
    original: Any = getattr(os, f"{_ORIGINAL}fork", os.fork)
    return int(original())


@contextmanager
def undebugged() -> Iterator[None]:
    """Start Python processes in the block without the debugger; it concerns the calling thread alone."""
    patches = sys.modules.get("_pydev_bundle.pydev_monkey")
    skip = getattr(patches, "skip_subprocess_arg_patch", nullcontext)
    with skip():
        yield


def untrace() -> None:
    """End the tracing of the calling thread: imports of torch take a minute under it."""
    tracing = sys.modules.get("_pydevd_bundle.pydevd_tracing") or sys.modules.get("pydevd_tracing")
    holder = getattr(tracing, "TracingFunctionHolder", None)
    if (settrace := getattr(holder, "_original_tracing", None)) is not None:  # `sys.settrace` would print a warning
        settrace(None)


def what_it_replaced() -> list[tuple[dict[str, Any], str, Any]]:
    """Return the functions of Python's own that a debugger has replaced: the names of a module, the name, the function.

    Called in the kernel: a rank that went through these modules would copy the pages of all their names.
    """
    if "_pydev_bundle.pydev_monkey" not in sys.modules:
        return []
    found: list[tuple[dict[str, Any], str, Any]] = []
    for name in _PATCHED if hasattr(os, f"{_ORIGINAL}fork") else ():  # it replaces all of them, or none
        functions = vars(sys.modules.get(name, os))
        originals = [each for each in list(functions) if each.startswith(_ORIGINAL)]
        found += [(functions, each.removeprefix(_ORIGINAL), functions[each]) for each in originals]
    for name in _THREADS:
        functions = vars(sys.modules[name])
        if (original := functions.get("_original_start_new_thread")) is not None:
            starts = ("start_new_thread", "start_new", "_start_new_thread")
            found += [(functions, start, original) for start in starts if start in functions]
    return found


def leave_debugger(replaced: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Undo in a forked rank what the debugger has changed in the kernel; called before any thread is started.

    Args:
        replaced: See `what_it_replaced`.
    """
    if "_pydev_bundle.pydev_monkey" not in sys.modules:
        return
    for functions, name, original in replaced:
        functions[name] = original
    untrace()
    threading.settrace(None)
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)
