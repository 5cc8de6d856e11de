"""OOM score: decides which process is killed first when the machine runs out of memory. Runs in ranks.

Without it the system may kill the notebook's kernel, which holds the data, for the memory that a rank takes. Every
process may raise its own score; children inherit it, and it is never lowered here.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["volunteer"]

RANK, CHILD_OF_RANK = 900, 1000
"""Scores, of at most 1000.

A loader's worker process is killed first: its end is an error in its rank, which can still report it.
"""


def volunteer(score_file: str = "/proc/self/oom_score_adj") -> None:
    """Let this process be killed before the kernel, and the processes it forks before this one."""
    _raise_to(RANK, score_file)
    os.register_at_fork(after_in_child=lambda: _raise_to(CHILD_OF_RANK, score_file))


def _raise_to(score: int, score_file: str) -> None:
    with (
        contextlib.suppress(OSError, ValueError),  # not Linux, or not allowed: then the system chooses
        open(score_file, "r+b", buffering=0) as file,
    ):
        if int(file.read()) < score:
            file.seek(0)
            file.write(b"%d" % score)
