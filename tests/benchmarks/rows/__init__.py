"""The rows of the comparison, by the name that ``make bench ROWS=...`` knows them by. Names only: nothing is imported.

A group is a module with a function ``rows()``. Reports are scripts whose findings are no ratio to raw: batch sizes and
trials, a share of a core, lines that arrived.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks.harness import Row

__all__ = ["GROUPS", "REPORTS", "rows"]

GROUPS = (
    *("step", "ranks", "sharded", "loader", "collectives", "microbatch", "starts", "cells", "imports", "saves", "logs"),
    *("recovery", "inference", "unprepared", "first_cell", "deepspeed"),
)

REPORTS = (
    "alternatives",
    "output",
    "orphans",
    "handover",
    "memory",
    "planner",
    "checkpoints",
    "offloading",
    "mapping",
    "history",
    "executable",
    "telemetry",
    "panel",
)


def rows(group: str) -> Sequence[Row]:
    """The rows of one of `GROUPS`."""
    made: Sequence[Row] = importlib.import_module(f"benchmarks.rows.{group}").rows()
    return made
