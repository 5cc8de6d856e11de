"""Where a rank is, told on a signal: faulthandler writes the stacks into a file of the run's private folder. In ranks.

The handler is C and needs no interpreter that answers, so it also tells of a rank that is stuck in C.
"""

from __future__ import annotations

import faulthandler
import threading

from nbaccel.launch.hangs import ASK, stack_path

__all__ = ["tell_on_signal"]


def tell_on_signal(store_path: str, rank: int) -> object:
    """From now on the signal `ASK` writes this process's stacks. Returns the open file; the caller keeps it."""
    file = open(stack_path(store_path, rank), "w", buffering=1, encoding="utf-8")  # noqa: SIM115  # for life
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)
    file.write(f"main {threading.main_thread().ident:#018x}\n")  # last: it says that the signal is heard
    return file
