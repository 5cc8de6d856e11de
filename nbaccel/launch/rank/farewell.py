"""The end of a rank: its own exit functions, threads and children, and nothing that it inherited. Runs in ranks, last.

`worker` ends the ranks of notebooks so, `script` those of `nbaccel launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time

__all__ = ["Farewell", "end_as_the_interpreter"]

_FAREWELL_S = 10.0


class Farewell:
    """Ends a rank: its own atexit handlers, threads and children get 10 s; then the process ends whatever they do.

    Made before any user code. `atexit` runs the newest function first and shows no list, and to clear it would drop
    what the notebook's functions hold, in this process. So a function is registered that ends the process when its
    turn comes, before the notebook's.
    """

    def __init__(self) -> None:
        self._code = 0
        atexit.register(self._end)
        atexit.register(logging.shutdown)

    def __call__(self, status: str) -> int:
        """Leave.

        status: of the rank's last task.  Returns the exit code, if somebody has removed our function.
        """
        self._code = 0 if status in ("ok", "stopped") else 1
        threading.Thread(target=self._cut, name="nbaccel-farewell", daemon=True).start()
        if self._code:
            # Handlers that ask how the process ended (wandb does) look here.
            sys.last_type, sys.last_value = RuntimeError, RuntimeError("the rank failed")
        end_as_the_interpreter()
        return self._code

    def _cut(self) -> None:
        time.sleep(_FAREWELL_S)
        os._exit(self._code)

    def _end(self) -> None:
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:  # its handler stands among the notebook's
            with contextlib.suppress(BaseException):
                multiprocessing_util._exit_function()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(self._code)


def end_as_the_interpreter() -> None:
    """Join the threads that are no daemons, run the `atexit` handlers, and flush what was printed."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
