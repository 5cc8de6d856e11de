"""Calls that all ranks make together when a task has finished, before its results leave them. Runs in ranks.

A strategy that holds a model in parts makes it whole then. A task that failed or was stopped makes none of these calls,
since not every rank may come to them.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["before_results_leave", "finish_task"]


class _TaskEnd:
    """The calls of this process."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []


_task_end = _TaskEnd()


def before_results_leave(call: Callable[[], object]) -> None:
    """Make `finish_task` call a function once. Every rank asks for the same ones, in the same order.

    Args:
        call: May be collective.
    """
    _task_end.calls.append(call)


def finish_task() -> None:
    """Make all calls that were asked for, and forget them. Collective where they are."""
    while _task_end.calls:
        _task_end.calls.pop(0)()
