"""The farewell: what a Python process does at its end, in a rank that leaves by `os._exit`. Used by the runtime."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time

__all__ = ["farewell"]

_FAREWELL_S = 10.0


def farewell(status: str) -> int:
    """The rank's own atexit handlers, threads and children get 10 s; then the process ends whatever they do."""
    code = 0 if status in ("ok", "stopped") else 1

    def cut() -> None:
        time.sleep(_FAREWELL_S)
        os._exit(code)

    threading.Thread(target=cut, name="nbaccel-farewell", daemon=True).start()
    if code:
        # Handlers that ask how the process ended (wandb does) look here.
        sys.last_type, sys.last_value = RuntimeError, RuntimeError("the rank failed")
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads, as the interpreter would
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:
            multiprocessing_util._exit_function()
    return code
