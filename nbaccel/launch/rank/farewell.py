"""The farewell: what a Python process does at its end, in ranks that leave by `os._exit`. Runs in ranks, last.

`worker` ends the ranks of notebooks so, `script` those of `nbaccel launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time

__all__ = ["end_as_the_interpreter", "farewell"]

_FAREWELL_S = 10.0


def farewell(status: str) -> int:
    """The rank's own atexit handlers, threads and children get 10 s; then the process ends whatever they do.

    status: of the rank's last task.  Returns the exit code.
    """
    code = 0 if status in ("ok", "stopped") else 1

    def cut() -> None:
        time.sleep(_FAREWELL_S)
        os._exit(code)

    threading.Thread(target=cut, name="nbaccel-farewell", daemon=True).start()
    if code:
        # Handlers that ask how the process ended (wandb does) look here.
        sys.last_type, sys.last_value = RuntimeError, RuntimeError("the rank failed")
    end_as_the_interpreter()
    with contextlib.suppress(BaseException):  # its handler went with the kernel's
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:
            multiprocessing_util._exit_function()
    return code


def end_as_the_interpreter() -> None:
    """Join the threads that are no daemons, run the `atexit` handlers, and flush what was printed."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
