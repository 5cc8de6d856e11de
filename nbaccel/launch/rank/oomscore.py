"""OOM score: who is killed first when the machine runs out of memory. Runs in ranks.

Without it the system may take the notebook's kernel, which holds the data, for a rank's greed. Anybody may raise the
score of a process; it stays with its children, and is never lowered here.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["volunteer"]

RANK, CHILD_OF_RANK = 900, 1000
"""Of at most 1000. A loader's worker process goes first: its end is an error in its rank, which can still speak."""


def volunteer(score_file: str = "/proc/self/oom_score_adj") -> None:
    """Let this process be killed before the kernel, and the processes it forks before this one."""
    _raise_to(RANK, score_file)
    os.register_at_fork(after_in_child=lambda: _raise_to(CHILD_OF_RANK, score_file))


def _raise_to(score: int, score_file: str) -> None:
    with (
        contextlib.suppress(OSError, ValueError),  # not Linux, or not allowed: then the system chooses as it likes
        open(score_file, "r+b", buffering=0) as file,
    ):
        if int(file.read()) < score:
            file.seek(0)
            file.write(b"%d" % score)
