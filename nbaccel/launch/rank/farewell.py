"""The end of a rank: ends its own exit functions, threads and children, and nothing inherited. Runs in ranks, last.

`worker` ends the ranks of notebooks with it, `script` those of `nbaccel launch`.
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
    """Ends a rank: its own atexit handlers, threads and children get 10 s; then the process ends in any case.

    It is made before any user code. `atexit` runs the newest function first and has no list of its functions, and
    clearing it would release, in this process, the objects that the notebook's functions hold. So a function is
    registered that ends the process when its turn comes, before those of the notebook.
    """

    def __init__(self) -> None:
        self._code = 0
        atexit.register(self._end)
        atexit.register(logging.shutdown)

    def __call__(self, status: str) -> int:
        """End the process.

        status: that of the rank's last task. Return the exit code, if other code has removed the registered function.
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
        if multiprocessing_util is not None:  # its handler is among those of the notebook
            with contextlib.suppress(BaseException):
                multiprocessing_util._exit_function()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(self._code)


def end_as_the_interpreter() -> None:
    """Join the threads that are no daemons, run the `atexit` handlers, and flush the output."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
