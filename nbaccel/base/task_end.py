"""Calls that all ranks make together before the results of a finished task leave them. Runs in ranks and kernels.

A strategy that holds a model in parts makes it whole then. A task that failed makes none of these calls, since not
every rank may come to them; it forgets them. A kernel that has trained makes them before ranks become copies of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["before_results_leave", "finish_stopped_task", "finish_task", "forget_task"]


class _TaskEnd:
    """The calls of this process, each with the one that takes its place if the task fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], object], Callable[[], object]]] = []


_task_end = _TaskEnd()


def before_results_leave(call: Callable[[], object], otherwise: Callable[[], object]) -> None:
    """Make `finish_task` call a function once. Every rank asks for the same ones, in the same order.

    Args:
        call: May be collective.
        otherwise: Called instead if the task has failed; not collective.
    """
    _task_end.calls.append((call, otherwise))


def finish_task() -> None:
    """Make all calls that were asked for, and forget them. Collective where they are."""
    while _task_end.calls:
        call, _ = _task_end.calls.pop(0)
        call()


def finish_stopped_task() -> None:
    """Do the same for a task that was stopped in all ranks alike; one that fails is a warning, and the last."""
    try:
        finish_task()
    except Exception as error:
        warnings.warn(
            f"the model of this stopped run is not whole ({type(error).__name__}: {error}): make it anew, or load a "
            "checkpoint",
            stacklevel=2,
        )
        forget_task()


def forget_task() -> None:
    """Forget all calls that were asked for, since not every rank comes to them."""
    while _task_end.calls:
        _, otherwise = _task_end.calls.pop(0)
        otherwise()
