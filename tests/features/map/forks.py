"""Processes that a test forks, and kills."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


def fork(function: Callable[..., Any], *args: Any) -> int:
    """Run a function in a forked process; return its process id. The process ends with 0 if the function returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    """End a process of `fork` at once, and wait for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
